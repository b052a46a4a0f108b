"""Verbs that list tasks, methods and models."""

from __future__ import annotations

from dataclasses import dataclass

from bayeslora.cli.common import print_rows


@dataclass(frozen=True)
class Tasks:
    """List the tasks. For your own data, give the path of a file of JSON lines or of text instead of a task's name."""

    json: bool = False
    """Print the list as JSON."""

    def run(self) -> None:
        """One line for each task."""
        from bayeslora.tasks import TASKS

        rows = [{"name": name, "description": make(None).description} for name, make in TASKS.items()]
        print_rows(rows, "{name:{width}}  {description}", as_json=self.json)


@dataclass(frozen=True)
class Methods:
    """List the methods."""

    json: bool = False
    """Print the list as JSON."""

    def run(self) -> None:
        """One line for each method."""
        from bayeslora.methods import METHODS

        rows = [
            {"name": it.name, "description": it.description, "presets": ", ".join(it.presets)}
            for it in METHODS.values()
        ]
        print_rows(rows, "{name:{width}}  {description}  [presets: {presets}]", as_json=self.json)


@dataclass(frozen=True)
class Models:
    """List the built-in models, and whether they are installed."""

    json: bool = False
    """Print the list as JSON."""

    def run(self) -> None:
        """One line for each model."""
        from bayeslora.models.locate import BUILTINS

        rows = [
            {"name": name, "description": it.description, "installed": it.find() is not None, "install": it.install}
            for name, it in BUILTINS.items()
        ]
        if not self.json:
            for row in rows:
                row["state"] = "installed" if row["installed"] else f"not installed; run: {row['install']}"
        print_rows(rows, "{name:{width}}  {description}  [{state}]", as_json=self.json)
