"""Settings of a run, with non-default values marked, and its environment."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from bayeslora.errors import InputError
from bayeslora.report.blocks import Columns, Fact, Facts, Note, Section
from bayeslora.runs.config import RunConfig, resolve
from bayeslora.runs.saved_config import to_dict

_TITLES = {
    "": "run",
    "data": "data",
    "loading": "base model",
    "adapter": "adapter",
    "adapter.settings": "posterior",
    "training": "training",
    "training.rate_multipliers": "relative learning rates",
    "prediction": "prediction",
}


def run_settings(config: Mapping[str, Any]) -> Section:
    """All settings of a run, in groups."""
    given = ("model", "task", "method", "preset")
    try:
        usual = to_dict(resolve(RunConfig(**{name: config[name] for name in given})))
    except InputError:  # unknown method
        usual = None
    return settings_section(config, usual, given)


def settings_section(values: Mapping[str, Any], usual: Mapping[str, Any] | None, given: tuple[str, ...]) -> Section:
    """A tree of settings, in groups.

    Args:
        values: the settings.
        usual: their defaults, if known.
        given: names of settings without defaults.
    """
    defaults = None if usual is None else _leaves(usual)
    groups = []
    for path, leaves in _groups(values):
        group = [_fact(_join(path, name), name, value, defaults, given) for name, value in leaves.items()]
        if group:
            groups.append(Facts(_title(path, values), group))
    known = "● marks what is not the default;" if usual else "This version does not know the defaults;"
    return Section(
        "Settings",
        [
            Note(f"All settings that the result depends on. {known} — is not set, or left to the method."),
            Columns(groups),
        ],
    )


def environment_section(environment: Mapping[str, Any], more: Mapping[str, Any]) -> Section:
    """Versions, machine and device, and additional entries."""
    machine = {name: value for name, value in environment.items() if name != "packages"}
    groups = [Facts("made with", _facts(machine | dict(more)))]
    if environment.get("packages"):
        groups.append(Facts("packages", _facts(environment["packages"])))
    return Section("Environment", [Columns(groups)])


def facts(title: str, values: Mapping[str, Any]) -> Facts:
    """Names and values under a heading."""
    return Facts(title, _facts(values))


def shown(value: Any) -> str:
    """Format a setting for display."""
    if value is None or value == [] or value == {}:
        return "—"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, list | tuple):
        return ", ".join(map(shown, value))
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {shown(it)}" for name, it in value.items())
    return str(value)


def _facts(values: Mapping[str, Any]) -> list[Fact]:
    return [Fact(name.replace("_", " "), shown(value)) for name, value in values.items()]


def _title(path: str, values: Mapping[str, Any]) -> str:
    """Title of a group of settings; a search also has those of its runs."""
    if "run" not in values:
        return _TITLES.get(path, path)
    return _TITLES.get(path.removeprefix("run").removeprefix("."), path) if path else "search"


def _fact(path: str, name: str, value: Any, usual: Mapping[str, Any] | None, given: tuple[str, ...]) -> Fact:
    marked = usual is not None and path not in given and shown(usual.get(path)) != shown(value)
    note = f"default {shown(usual.get(path))}" if usual is not None and marked else ""
    return Fact(name.replace("_", " "), shown(value), note, marked)


def _leaves(values: Mapping[str, Any]) -> dict[str, Any]:
    return {_join(path, name): value for path, leaves in _groups(values) for name, value in leaves.items()}


def _groups(values: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """Leaves of the tree, grouped by the path of their parent."""
    yield path, {name: value for name, value in values.items() if not isinstance(value, Mapping)}
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from _groups(value, _join(path, name))


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name
