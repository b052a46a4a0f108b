"""Every command that leaves something behind, at its smallest, and what of it must be the same whatever happens on the way."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import safe_open

from models.ggufs import Recipe, tiny_model
from tasks.cases import write_lines
from train.tiny import bayeslora, contents, model_directory, options, outcome, question, read_json, task_directory

SMALL = ("--rank", 2, "--targets", "q_proj", "--epochs", 1, "--batch-size", 6, "--samples", 2)


@dataclass(frozen=True)
class Sources:
    """What commands read."""

    run: Path
    gguf: Path
    questions: Path

    @classmethod
    def make(cls, folder: Path) -> Sources:
        made = cls(folder / "run", folder / "tiny.gguf", folder / "questions.jsonl")
        assert bayeslora(*options(made.run)) == 0
        Recipe().write(tiny_model("llama"), made.gguf)
        write_lines(made.questions, [question(number) for number in range(600)])
        return made


@dataclass(frozen=True)
class Command:
    """A command line that writes to a place, and what it leaves there."""

    words: Callable[[Sources, Path], list[object]]
    outcome: Callable[[Path], Any]
    appears_whole: bool = False  # and is not written over


def _train(sources: Sources, out: Path) -> list[object]:
    return [*options(out), "--checkpoint-seconds", 0]


def _study(verb: str, *more: object) -> Callable[[Sources, Path], list[object]]:
    def words(sources: Sources, out: Path) -> list[object]:
        return [verb, "--model", model_directory(), "--out", out, "--quiet", *SMALL, *more]

    return words


def _table(out: Path) -> Any:
    runs = sorted((out / "runs").rglob("predictions.jsonl.gz"))
    table = (out / "table.md").read_text(encoding="utf-8")
    return table, [(str(run.relative_to(out)), run.read_bytes()) for run in runs]


def _trials(out: Path) -> Any:
    trials = read_json(out / "trials.json")["trials"]
    for trial in trials:
        trial["outcomes"] = {name: it for name, it in trial["outcomes"].items() if "seconds" not in name}
    return trials


COMMANDS = {
    "train": Command(_train, outcome),
    "compare": Command(
        _study("compare", "--tasks", task_directory(), "--methods", "lora", "temperature", "--seeds", 0), _table
    ),
    "tune": Command(
        _study(
            "tune",
            "--task",
            task_directory(),
            "--method",
            "lora",
            "--search",
            "learning_rate=1e-3:1e-1:log",
            "--trials",
            3,
            "--start",
            3,
            "--q",
            1,
        ),
        _trials,
    ),
    "convert": Command(lambda sources, out: ["convert", sources.gguf, out, "--quiet"], contents, appears_whole=True),
    "export": Command(
        lambda sources, out: ["export", sources.run, "--samples", 3, "--out", out, "--quiet"],
        lambda out: {name: it for name, it in contents(out).items() if name != "manifest.json"},
        appears_whole=True,
    ),
    "predict": Command(
        lambda sources, out: ["predict", sources.run, "--input", sources.questions, "--output", out, "--quiet"],
        Path.read_bytes,
        appears_whole=True,
    ),
}


def require_whole(place: Path) -> None:
    """Every file below a place that bears its final name can be read to its end."""
    files = [path for path in (place.rglob("*") if place.is_dir() else [place]) if path.is_file()]
    for path in files:
        if any("partial" in part for part in path.parts):
            continue
        if path.suffix == ".json":
            json.loads(path.read_text(encoding="utf-8"))
        elif path.suffix == ".gz":
            gzip.decompress(path.read_bytes())
        elif path.suffix == ".safetensors":
            with safe_open(path, "np") as file:
                for name in file.keys():  # noqa: SIM118
                    file.get_tensor(name)
