"""Contents of an export and how to query it: ``manifest.json``, all that a client needs besides a tokenizer."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bayeslora.atomic_files import write_json
from bayeslora.errors import InputError
from bayeslora.tasks import Scoring

SCHEMA = 1
NAME = "manifest.json"


@dataclass(frozen=True)
class Served:
    """An adapter: the name it is served under, and its path relative to the manifest."""

    name: str
    path: str


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """Description of an export.

    Attributes:
        base_model: a hub id, a built-in name or an absolute path.
        revision: of a hub model.
        method: name of the run's method.
        adapters: those whose probabilities are averaged, in the order of the draws; only the mean if there are no draws.
        mean: the posterior mean, for use as a single adapter.
        rank: of the adapters, padded to one that servers support.
        adapts_head: whether they change the output head.
        scoring: what answers a question.
        max_tokens: longest prompt with an option, in tokens.
        context: longest one of a question without a passage, which is kept whole.
        posterior_scale: scale of the posterior for the draws.
        temperature: temperature to apply to the average.
        threshold: least confidence for an answer; below it, abstain.
        conformal: conformal thresholds of prediction sets, by level.
        seed: of the draws.
        versions: of the packages that wrote the export.
        commands: command lines of the engines that can serve it, by engine.
        warnings: to read before serving.
    """

    base_model: str
    revision: str | None
    method: str
    adapters: tuple[Served, ...]
    mean: Served
    rank: int
    adapts_head: bool
    scoring: Scoring
    max_tokens: int
    context: int | None = None
    posterior_scale: float
    temperature: float
    threshold: float | None
    conformal: Mapping[str, float]
    seed: int
    versions: Mapping[str, str]
    commands: Mapping[str, str]
    warnings: tuple[str, ...]

    def write(self, directory: Path) -> None:
        """Write ``manifest.json`` into a directory."""
        write_json(directory / NAME, {"schema": SCHEMA, **asdict(self)})


def read_manifest(path: str | Path) -> Manifest:
    """Read the manifest of an export, given the directory or the file."""
    path = Path(path).expanduser()
    file = path / NAME if path.is_dir() else path
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
        return _parse(values)
    except OSError as error:
        raise InputError(f"{file}: cannot be read: {error.strerror}; give a directory written by an export") from error
    except (ValueError, OverflowError, RecursionError) as error:
        raise InputError(f"{file}: not a manifest: {error}; export the run again") from error


def _parse(values: Any) -> Manifest:
    if not isinstance(values, dict):
        raise InputError("it holds no JSON object")
    if values.get("schema") != SCHEMA:
        raise InputError(f"its schema is {values.get('schema')!r}, and this version of bayeslora reads {SCHEMA}")
    adapters = _field(values, "adapters", list)
    if not adapters:
        raise InputError("it names no adapters")
    return Manifest(
        base_model=_field(values, "base_model", str),
        revision=_field(values, "revision", str, optional=True),
        method=_field(values, "method", str),
        adapters=tuple(_served(it) for it in adapters),
        mean=_served(values.get("mean")),
        rank=_field(values, "rank", int),
        adapts_head=_field(values, "adapts_head", bool),
        scoring=_field(values, "scoring", str),
        max_tokens=_field(values, "max_tokens", int),
        context=_field(values, "context", int, optional=True),
        posterior_scale=_field(values, "posterior_scale", float),
        temperature=_field(values, "temperature", float),
        threshold=_field(values, "threshold", float, optional=True),
        conformal=_field(values, "conformal", dict),
        seed=_field(values, "seed", int),
        versions=_field(values, "versions", dict),
        commands=_field(values, "commands", dict),
        warnings=tuple(_field(values, "warnings", list)),
    )


def _served(values: Any) -> Served:
    if not isinstance(values, dict):
        raise InputError(f"{values!r} is no adapter; one has a name and a path")
    return Served(_field(values, "name", str), _field(values, "path", str))


def _field(values: Mapping[str, Any], name: str, kind: type, *, optional: bool = False) -> Any:
    """A value of the right kind; whole numbers are numbers too, truth values are not."""
    value = values.get(name)
    if value is None and optional:
        return None
    if isinstance(value, int) and not isinstance(value, bool) and kind is float:
        return float(value)
    if not isinstance(value, kind) or isinstance(value, bool) != (kind is bool):
        raise InputError(f"its {name} is {value!r}, which is no {kind.__name__}")
    return value
