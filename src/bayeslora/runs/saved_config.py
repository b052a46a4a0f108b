"""Settings of a run as plain values: to and from dictionaries, upgrades of earlier files, differences between two runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from typing import Any

from bayeslora.errors import InputError, did_you_mean
from bayeslora.runs.config import RunConfig
from bayeslora.type_checks import check_kinds


def to_dict(config: Any) -> Any:
    """Convert a tree of dataclasses to JSON-compatible values."""
    if is_dataclass(config) and not isinstance(config, type):
        return {name: to_dict(getattr(config, name)) for name in _names(type(config))}
    if isinstance(config, Mapping):
        return {name: to_dict(value) for name, value in config.items()}
    return list(config) if isinstance(config, tuple) else config


def from_dict(values: Mapping[str, Any]) -> RunConfig:
    """Restore a run from :func:`to_dict`; unknown names are refused."""
    parts = {f.name: f.default_factory for f in fields(RunConfig) if is_dataclass(f.default_factory)}
    tree: dict[str, Any] = {}
    for name, value in without_trust(values).items():
        _check_name(name, _names(RunConfig))
        tree[name] = _part(parts[name], value) if name in parts else _plain(value)
    for name in ("model", "task"):
        if name not in tree:
            raise InputError(f"setting {name!r} is missing; give it")
    check_kinds(RunConfig, tree)
    return RunConfig(**tree)


def from_flat(values: Mapping[str, Any]) -> RunConfig:
    """A run from settings by their names alone, as on the command line; unknown names are refused."""
    kinds: dict[str, Any] = {f.name: f.default_factory for f in fields(RunConfig) if is_dataclass(f.default_factory)}
    parts = {name: _names(kind) for name, kind in kinds.items()}
    known = [
        *(name for name in _names(RunConfig) if name not in parts),
        *(it for names in parts.values() for it in names),
    ]
    for name in values:
        _check_name(name, known)
    tree: dict[str, Any] = {name: values[name] for name in _names(RunConfig) if name in values}
    for part, names in parts.items():
        tree[part] = {name: values[name] for name in names if name in values}
    return from_dict(tree)


def without_trust(values: Mapping[str, Any]) -> dict[str, Any]:
    """Settings without ``trust_remote_code``, which earlier versions saved: a file must not decide whether code is run."""
    kept = {name: value for name, value in values.items() if name != "trust_remote_code"}
    loading = kept.get("loading")
    if isinstance(loading, Mapping):
        kept["loading"] = {name: value for name, value in loading.items() if name != "trust_remote_code"}
    return kept


FORMER_POSTERIORS = {"bayesian-lora": "inducing"}
"""Posteriors of runs that were saved before it was a setting, where that of the method is another now."""


def saved_run(values: Mapping[str, Any]) -> RunConfig:
    """Read a resolved run saved by this version or an earlier one: settings that it lacks get their defaults, and those that a
    method decides get the value that all methods had before."""
    from bayeslora.methods.base import COMMON
    from bayeslora.methods.registry import ALL

    config = _never_calibrated(_checkpoint_ensemble(from_dict(values)), values)
    later = {name: value for name, value in COMMON.items() if getattr(config.training, name) is None}
    own = ALL[config.method].posterior_name if config.method in ALL else None
    adapter = replace(config.adapter, posterior=config.adapter.posterior or FORMER_POSTERIORS.get(config.method, own))
    return replace(config, adapter=adapter, training=replace(config.training, **later))


def _never_calibrated(config: RunConfig, values: Mapping[str, Any]) -> RunConfig:
    """Upgrade runs of versions that did not calibrate."""
    if "calibrate" in values.get("prediction", {}):
        return config
    return replace(config, prediction=replace(config.prediction, calibrate="none"))


def _checkpoint_ensemble(config: RunConfig) -> RunConfig:
    """Upgrade a checkpoint ensemble of earlier versions, whose snapshots were settings of its posterior."""
    kept = {name: config.adapter.settings[name] for name in ("snapshots", "members") if name in config.adapter.settings}
    if config.method != "checkpoint-ensemble" or not kept:
        return config
    return replace(config, adapter=replace(config.adapter, settings={}), training=replace(config.training, **kept))


def differences(mine: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """Differences between two dictionaries of :func:`to_dict`, one line each."""
    left, right = flatten(mine), flatten(other)
    names = [*left, *(name for name in right if name not in left)]
    return [
        f"{name} is {_said(right.get(name))} there and {_said(left.get(name))} here"
        for name in names
        if left.get(name) != right.get(name)
    ]


def _said(value: Any) -> str:
    return "not set" if value is None else repr(value)


def flatten(values: Mapping[str, Any]) -> dict[str, Any]:
    """The leaves of the tree by their names, which are unique. Settings and multipliers stay dictionaries."""
    flat: dict[str, Any] = {}
    for name, value in values.items():
        nested = isinstance(value, Mapping) and name in {f.name for f in fields(RunConfig)}
        flat.update(value if nested else {name: value})
    return flat


def _part(kind: Any, values: Any) -> Any:
    if not isinstance(values, Mapping):
        raise InputError(f"settings of {kind.__name__} are {values!r}; give a JSON object")
    for name in values:
        _check_name(name, _names(kind))
    check_kinds(kind, values)
    return kind(**{name: _plain(value) for name, value in values.items()})


def _plain(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _check_name(name: str, known: Sequence[str]) -> None:
    if name not in known:
        raise InputError(f"unknown setting {name!r}{did_you_mean(name, known)}; choose {', '.join(known)}")


def _names(kind: type) -> list[str]:
    return [f.name for f in fields(kind)]
