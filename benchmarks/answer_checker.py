"""How well answers are checked: on MATH's own solutions, whose answers are right, and on answers of other problems.

python benchmarks/answer_checker.py --data-dir DATA --out result.json

Three figures: in how many solutions the last box holds what the checker takes for the answer that the data give apart; how
many answers math-verify, without looking whether both are written alike, takes to be equal to themselves, which is how many
it can read; and how many answers of other problems, written otherwise, are accepted. Those last ones may be equal all the
same (1/2 and 0.5), so what was accepted is listed.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from importlib.metadata import version
from pathlib import Path

import torch

from bayeslora.runs.environment import describe_environment
from bayeslora.tasks import Problem
from bayeslora.tasks.boxed import boxed_answer, equal_by_mathematics, same_answer
from bayeslora.tasks.problems import BENCHMARKS

SPLITS = ("train", "validation", "test")


def main() -> None:
    """Measure and write the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", type=Path, default=None)
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    task = next(benchmark for benchmark in BENCHMARKS if benchmark.name == "math").task(given.data_dir)
    problems = [problem for split in SPLITS for problem in task.load(split)]
    start = time.perf_counter()
    refused = [p.id for p in problems if not same_answer(p.answers, boxed_answer(p.solution))]
    unread = [p.id for p in problems if not equal_by_mathematics(p.answers[0], p.answers[0])]
    pairs = others(problems)
    accepted = [(p.id, p.answers[0], q.answers[0]) for p, q in pairs if same_answer(p.answers, q.answers[0])]
    record = {
        "schema": 1,
        "task": "math",
        "problems": len(problems),
        "own_answer_accepted": 1 - len(refused) / len(problems),
        "own_answer_accepted_by_math_verify_alone": 1 - len(unread) / len(problems),
        "pairs_of_other_answers": len(pairs),
        "other_answer_accepted": len(accepted) / len(pairs),
        "refused": refused,
        "refused_by_math_verify_alone": unread,
        "accepted": accepted,
        "seconds": time.perf_counter() - start,
        "math_verify": version("math-verify"),
        "environment": describe_environment(torch.device("cpu")),
    }
    given.out.parent.mkdir(parents=True, exist_ok=True)
    given.out.write_text(json.dumps(record, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    for name in ("own_answer_accepted", "own_answer_accepted_by_math_verify_alone", "other_answer_accepted"):
        print(f"{name}: {record[name]:.4%}")


def others(problems: list[Problem]) -> list[tuple[Problem, Problem]]:
    """Every problem with another one at random whose answer is written otherwise."""
    shuffled = list(problems)
    random.Random(0).shuffle(shuffled)
    return [(p, q) for p, q in zip(problems, shuffled, strict=True) if p.answers[0].split() != q.answers[0].split()]


if __name__ == "__main__":
    main()
