"""How runs of comparisons learnt: training and validation NLL after every epoch, at every learning rate that was tried.

python benchmarks/histories.py STUDY [STUDY ...] --methods lora bayesian-lora --out histories.json

STUDY is the directory of `bayeslora compare`; of the tasks in its table the runs with one seed are read.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from records import command

from bayeslora.errors import InputError
from bayeslora.report.reading import checking, read_record


def places(study: Path, methods: Sequence[str], seed: int) -> Iterator[Path]:
    """Results of the runs with a seed, from the smallest learning rate to the largest."""
    with checking(study / "table.json"):
        tasks = read_record(study / "table.json")["study"]["tasks"]
    for task in tasks:
        for method in methods:
            found = (study / "runs" / task / method).glob(f"rate-*/seed-{seed}/result.json")
            yield from sorted(found, key=lambda path: float(path.parts[-3].removeprefix("rate-")))


def epochs(path: Path) -> list[dict[str, Any]]:
    """What is kept of a run."""
    with checking(path):
        return [
            {
                "epoch": it["epoch"],
                "train_nll": round(it["train_nll"], 4),
                "validation_nll": round(it["validation"]["nll"], 4),
            }
            for it in read_record(path)["history"]
        ]


def main() -> None:
    """Read and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("studies", nargs="+", type=Path)
    parser.add_argument("--methods", nargs="+", required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    runs: dict[str, Any] = {}
    for study in given.studies:
        for path in places(study, given.methods, given.seed):
            name = path.parent.relative_to(study / "runs").as_posix()
            if name in runs:
                raise InputError(f"{study}: has {name}, as has a study before it; give one for each task")
            runs[name] = epochs(path)
    if not runs:
        raise InputError(
            f"no runs of {', '.join(given.methods)} with seed {given.seed} in {', '.join(map(str, given.studies))}"
        )
    about = "NLL after every epoch (task/method/learning-rate factor/seed), from the result.json of the runs."
    given.out.write_text(
        json.dumps({"schema": 1, "about": about, "runs": runs}, separators=(",", ":"), ensure_ascii=False) + "\n",
        encoding="utf-8",
    )


if __name__ == "__main__":
    command(main)
