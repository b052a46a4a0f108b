"""Defaults for the options of ``train``: from a file of settings, or from the LoRA that a run starts from.

tyro takes a default instance of a verb, so values from a file are validated like any other and shown by ``--help``.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import tyro
import yaml

from bayeslora.cli.runs import Train
from bayeslora.errors import InputError, did_you_mean
from bayeslora.runs.config import RunConfig
from bayeslora.runs.saved_config import flatten, from_flat, to_dict, without_trust
from bayeslora.type_checks import check_kinds

_TREE = to_dict(RunConfig(model="", task=""))
_OPTIONS = [field.name for field in fields(Train) if field.name not in ("config", "experiment", "trust_remote_code")]
_PATHS = ("out", "data_dir")

_NOT_INHERITED = ("method", "preset", "seed", "start_from", "report_split", "prediction")
"""Settings that a run does not take from the run of the LoRA it starts from."""

_PEFT_NAMES = {"base_model_name_or_path": "model", "r": "rank", "lora_alpha": "alpha", "target_modules": "targets"}
"""Our names for the fields of PEFT's ``adapter_config.json``."""


def defaults_of_train(arguments: Sequence[str]) -> Train | None:
    """Options of ``train`` that ``--config FILE`` or, without it, ``--start-from LORA`` implies; ``None`` without either.

    For the help, those of the method.
    """
    scanner = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    scanner.add_argument("--config", action="append", default=[])
    scanner.add_argument("--start-from", "--start_from", nargs="*", default=[])
    scanner.add_argument("--model")
    scanner.add_argument("--task")
    scanner.add_argument("--method", default="bayesian-lora")
    scanner.add_argument("--preset", default="default")
    scanner.add_argument("-h", "--help", action="store_true")
    try:
        given, _ = scanner.parse_known_args(list(arguments))
    except argparse.ArgumentError as error:
        if error.argument_name != "--config":
            return None  # tyro says what is wrong
        raise InputError("--config needs the path of a JSON or YAML file") from None
    if len(given.config) > 1:
        raise InputError("--config is given more than once; give one file, and what differs from it as options")
    if given.config:
        return _from_file(Path(given.config[0]), _read(Path(given.config[0])))
    if given.start_from:
        origin = Path(given.start_from[0])
        if not origin.exists() and None in (given.model, given.task):  # which it was to say
            raise InputError(f"--start-from: {origin}: no such directory; give that of a LoRA's run or adapter")
        return _from_lora(origin)
    return _defaults_of_method(given.method, given.preset) if given.help else None


def _defaults_of_method(method: str, preset: str) -> Train:
    """The settings that a method's preset decides, for the help."""
    from bayeslora.runs.config import resolve

    open_run = RunConfig(model=tyro.MISSING, task=tyro.MISSING, method=method, preset=preset)
    decided = resolve(replace(open_run, model="", task=""))
    return Train(experiment=replace(open_run, training=decided.training), out=tyro.MISSING)


def with_pairs(given: Train, defaults: Train) -> Train:
    """Add pairs such as ``--settings`` to those of the defaults, which tyro would replace all together."""
    mine, theirs = given.experiment, defaults.experiment
    rates = {**(theirs.training.rate_multipliers or {}), **(mine.training.rate_multipliers or {})}
    adapter = replace(mine.adapter, settings={**theirs.adapter.settings, **mine.adapter.settings})
    training = replace(mine.training, rate_multipliers=rates or None)
    return replace(given, experiment=replace(mine, adapter=adapter, training=training))


def _from_lora(origin: Path) -> Train | None:
    """Model, data, shape and training of the LoRA to start from: a run of ours, or an adapter of PEFT's."""
    if (origin / "config.json").exists():
        saved = _read(origin / "config.json")
        if saved.get("method", "lora") != "lora":
            raise InputError(f"{origin}: is a run of method {saved['method']!r}; give one of method 'lora'")
        run = {name: it for name, it in saved.items() if name not in _NOT_INHERITED}
        if isinstance(run.get("adapter"), dict):
            own = ("settings", "posterior")  # of the LoRA's own method
            run["adapter"] = {name: it for name, it in run["adapter"].items() if name not in own}
        return _from_file(origin / "config.json", run)
    if (origin / "adapter_config.json").exists():
        adapter = _read(origin / "adapter_config.json")
        values = {ours: adapter.get(theirs) for theirs, ours in _PEFT_NAMES.items()}
        if isinstance(values["targets"], str):  # a regular expression, or a word such as all-linear
            values["targets"] = [values["targets"]]
        values["model"] = _builtin(origin, values["model"]) or values["model"]
        return _from_file(origin / "adapter_config.json", values)
    return None


def _builtin(origin: Path, hub_id: Any) -> str | None:
    """The built-in model that an adapter was trained on, which it names as the original on the hub; ``None`` if another."""
    from bayeslora.models.locate import BUILTINS

    if hub_id not in [it.hub_id for it in BUILTINS.values()]:
        return None
    from bayeslora.runs.adapters import builtin_of
    from bayeslora.runs.directory import RunDirectory

    return builtin_of(RunDirectory(origin))


class _Yaml(yaml.SafeLoader):
    """YAML with numbers such as ``1e-4``, which version 1.1 takes for text as they have no decimal point."""


_Yaml.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?(\d+|\d*\.\d+)[eE][-+]?\d+"), list("-+.0123456789")
)


def _read(path: Path) -> dict[str, Any]:
    kind, parse = ("YAML", _parse_yaml) if path.suffix in (".yaml", ".yml") else ("JSON", json.loads)
    try:
        values = parse(path.read_text(encoding="utf-8-sig"))
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        reason = " ".join(str(error).split())
        raise InputError(f"{path}: cannot be read as {kind} ({reason}); give a file of settings") from error
    if not isinstance(values, dict):
        raise InputError(f'{path}: holds no {kind} object; give settings such as {{"model": "smollm2"}}')
    return values


def _parse_yaml(text: str) -> Any:
    return yaml.load(text, _Yaml)


def _from_file(path: Path, values: Mapping[str, Any]) -> Train:
    """Defaults from settings by name, nested as in a run's ``config.json`` or flat as on the command line."""
    try:
        flat = {name: value for name, value in flatten(without_trust(values)).items() if value is not None}
        known = [*flatten(_TREE), *_OPTIONS]
        for name in flat:
            if name not in known:
                raise InputError(
                    f"unknown setting {name!r}{did_you_mean(str(name), known)}; see bayeslora train --help"
                )
        options = {name: _option(name, value) for name, value in flat.items() if name in _OPTIONS}
        check_kinds(Train, options)
        required = {"out": tyro.MISSING} | options
        return Train(experiment=_run({name: it for name, it in flat.items() if name not in _OPTIONS}), **required)
    except InputError as error:
        raise InputError(f"{path}: {error}") from error


def _run(flat: Mapping[str, Any]) -> RunConfig:
    """A run from settings by name; a model or task that is missing is left for the command line."""
    run = from_flat({"model": "", "task": "", **flat})
    return replace(run, **{name: tyro.MISSING for name in ("model", "task") if name not in flat})


def _option(name: str, value: Any) -> Any:
    if name in _PATHS and isinstance(value, str):
        return Path(value).expanduser()  # as a shell does
    return tuple(value) if isinstance(value, list) else value
