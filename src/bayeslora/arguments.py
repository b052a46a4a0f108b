"""The words of a command line, before and after tyro reads them: settings from a file, and mistakes told in one line."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from bayeslora.errors import InputError, did_you_mean
from bayeslora.train.config import flatten

_TYRO_WORDS = {
    r"Error parsing __tyro-dummy-inner__\S*: ": "",
    r"no type matching \{None\}\|(.+?) could be instantiated from (\[.*?\])\. Got errors: .*?;": r"\2 is not \1 ;",
    r"invalid literal for int\(\) with base 10: ('.*?')": r"\1 is not INT",
    r"could not convert string to float: ('.*?')": r"\1 is not FLOAT",
}
"""How tyro puts it, and how to say it without the names of its inner parts and of Python's."""


def with_config(arguments: Sequence[str], known: Sequence[str]) -> list[str]:
    """``--config FILE`` of the verb ``train`` as the options that the file stands for, before those given as well.

    ``known`` are the names that a file may hold.
    """
    words = list(arguments)
    if words[:1] != ["train"] or not any(word.split("=")[0] == "--config" for word in words):
        return words
    if sum(word.split("=")[0] == "--config" for word in words) > 1:
        raise InputError("--config is given more than once; give one file, and what differs from it as options")
    at = next(k for k, word in enumerate(words) if word.split("=")[0] == "--config")
    if "=" not in words[at] and at + 1 == len(words):
        raise InputError("--config needs the path of a JSON file")
    taken = 1 if "=" in words[at] else 2
    path = Path(words[at].partition("=")[2] or words[at + 1])
    return ["train", *_options(path, known), *words[1:at], *words[at + taken :]]


def _options(path: Path, known: Sequence[str]) -> Iterable[str]:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(f"{path}: cannot be read as JSON ({error}); give a file of settings") from error
    if not isinstance(values, dict):
        raise InputError(f'{path}: holds no JSON object; give settings such as {{"model": "smollm2"}}')
    for name, value in flatten(values).items():
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
    """The text of a box without its title. A rule across it, of dashes where stdout is not UTF-8, becomes a semicolon."""
    rows = [row.strip("│╭╮╰╯ ") for row in re.sub(r"\x1b\[[0-9;]*m", "", box).splitlines()]
    text = " ".join(";" if set(row) <= set("─-") else row for row in rows[1:] if row)
    for pattern, plain in _TYRO_WORDS.items():
        text = re.sub(pattern, plain, text)
    return text.replace(" ;", ";").strip("; ")
