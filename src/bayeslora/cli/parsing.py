"""Pre- and post-processing of command lines around tyro: settings from a file, and errors in one line."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from bayeslora.errors import InputError, did_you_mean
from bayeslora.runs.config import flatten, without_trust

_TYRO_WORDS = {
    r"Error parsing __tyro-dummy-inner__\S*: ": "",
    r"no type matching \{None\}\|(.+?) could be instantiated from (\[.*?\])\. Got errors: .*?;": r"\2 is not \1 ;",
    r"invalid literal for int\(\) with base 10: ('.*?')": r"\1 is not INT",
    r"could not convert string to float: ('.*?')": r"\1 is not FLOAT",
}
"""Replacements for phrases in tyro's messages that name its internals or those of Python."""

_OWN = ("method", "preset", "seed", "start_from", "report_split", "prediction")
"""Settings that a run does not inherit from the LoRA it starts from."""

_PAIRED = ("--settings", "--rate-multipliers")
"""Options whose values are pairs of a name and a value."""

_PEFT_NAMES = {"base_model_name_or_path": "model", "r": "rank", "lora_alpha": "alpha", "target_modules": "targets"}
"""Our names of the fields in PEFT's ``adapter_config.json``."""


def with_config(arguments: Sequence[str], known: Sequence[str]) -> list[str]:
    """Expand ``--config FILE`` of the verb ``train`` into options, placed before those on the command line.

    Without such a file, ``--start-from LORA`` expands into the settings of that LoRA.

    ``known`` are the names that a file may contain.
    """
    words = list(arguments)
    if words[:1] != ["train"]:
        return words
    if not any(word.split("=")[0] == "--config" for word in words):
        return ["train", *_options_of_origin(words, known), *words[1:]]
    if sum(word.split("=")[0] == "--config" for word in words) > 1:
        raise InputError("--config is given more than once; give one file, and what differs from it as options")
    at = next(k for k, word in enumerate(words) if word.split("=")[0] == "--config")
    if "=" not in words[at] and at + 1 == len(words):
        raise InputError("--config needs the path of a JSON file")
    taken = 1 if "=" in words[at] else 2
    path = Path(words[at].partition("=")[2] or words[at + 1])
    return ["train", *_together(list(_options(path, known)), [*words[1:at], *words[at + taken :]])]


def _together(said: list[str], given: list[str]) -> list[str]:
    """Options from a file, then those given. Pairs of one option are merged, else the given ones would replace all others."""
    for option in _PAIRED:
        theirs, mine = _values_at(said, option), _values_at(given, option)
        if theirs and mine:
            pairs = {word.partition("=")[0]: word for word in (*said[theirs], *given[mine])}
            given = [*given[: mine.start], *pairs.values(), *given[mine.stop :]]
            said = [*said[: theirs.start - 1], *said[theirs.stop :]]
    return [*said, *given]


def _values_at(words: Sequence[str], option: str) -> slice | None:
    """Positions of the values of an option, or ``None`` if it is absent."""
    at = next((k for k, word in enumerate(words) if _name(word) == option), None)
    if at is None:
        return None
    end = next((k for k in range(at + 1, len(words)) if words[k].startswith("--")), len(words))
    return slice(at + 1, end)


def _name(word: str) -> str:
    """Normalised name of an option."""
    return word.split("=")[0].replace("_", "-")


def _options_of_origin(words: Sequence[str], known: Sequence[str]) -> Iterable[str]:
    """Options for model, data, shape and training taken from the LoRA to start from."""
    at = next((k for k, word in enumerate(words) if _name(word) == "--start-from"), None)
    if at is None or ("=" not in words[at] and at + 1 == len(words)):
        return ()
    origin = Path(words[at].partition("=")[2] or words[at + 1])
    if (origin / "config.json").exists():
        run = {name: value for name, value in _read(origin / "config.json").items() if name not in _OWN}
        run["adapter"] = {name: value for name, value in run.get("adapter", {}).items() if name != "settings"}
        return _as_options(origin / "config.json", run, known)
    if (origin / "adapter_config.json").exists():
        adapter = _read(origin / "adapter_config.json")
        said = {ours: adapter.get(theirs) for theirs, ours in _PEFT_NAMES.items()}
        return _as_options(origin / "adapter_config.json", said, known)
    return ()


def _options(path: Path, known: Sequence[str]) -> Iterable[str]:
    return _as_options(path, _read(path), known)


def _read(path: Path) -> dict[str, Any]:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(f"{path}: cannot be read as JSON ({error}); give a file of settings") from error
    if not isinstance(values, dict):
        raise InputError(f'{path}: holds no JSON object; give settings such as {{"model": "smollm2"}}')
    return values


def _as_options(path: Path, values: Mapping[str, Any], known: Sequence[str]) -> Iterable[str]:
    for name, value in flatten(without_trust(values)).items():
        if name not in known:
            raise InputError(f"{path}: unknown setting {name!r}{did_you_mean(name, known)}; see bayeslora train --help")
        option = f"--{name.replace('_', '-')}"
        if value is None or value is False:
            continue
        if isinstance(value, dict):
            yield from (option, *(f"{key}={json.dumps(it)}" for key, it in value.items()))
        elif isinstance(value, list):
            yield from (option, *map(str, value))
        else:
            yield from ((option,) if value is True else (option, str(value)))


def one_line(box: str) -> str:
    """The text of a tyro box without its title. A horizontal rule, of dashes if stdout is not UTF-8, becomes a semicolon."""
    rows = [row.strip("│╭╮╰╯ ") for row in re.sub(r"\x1b\[[0-9;]*m", "", box).splitlines()]
    text = " ".join(";" if set(row) <= set("─-") else row for row in rows[1:] if row)
    for pattern, plain in _TYRO_WORDS.items():
        text = re.sub(pattern, plain, text)
    return text.replace(" ;", ";").strip("; ")
