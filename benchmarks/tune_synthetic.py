"""How close the search comes to a front that is known, and to random search with as many trials.

python benchmarks/tune_synthetic.py --out benchmarks/results/tune/synthetic.json
"""

from __future__ import annotations

import argparse
import time
from importlib.metadata import version
from pathlib import Path

import numpy as np
import torch

from bayeslora.atomic_files import write_json
from bayeslora.runs.environment import describe_environment
from bayeslora.tuning.points import sobol
from bayeslora.tuning.propose import History, propose
from bayeslora.tuning.synthetic import ThreeBowls

START = 8


def search(problem: ThreeBowls, trials: int, batch: int, feasibility: str, noise: float, seed: int) -> np.ndarray:
    """The points that are tried; what is seen of them has noise, a share of the front's range."""
    rng = np.random.default_rng(seed)
    x = np.empty((0, problem.dimension))
    y, c = np.empty((0, 3)), np.empty((0, 1))
    new = sobol(problem.dimension, 0, START, seed)
    while True:
        seen = problem.objectives(new)
        seen += noise * np.ptp(problem.front, axis=0) * rng.standard_normal(seen.shape)
        x, y, c = np.vstack([x, new]), np.vstack([y, seen]), np.vstack([c, problem.constraint(new)])
        if len(x) == trials:
            return x
        new = propose(History(x, y, c), min(batch, trials - len(x)), feasibility, seed=1000 * seed + len(x))


def main() -> None:
    """Search with both ways to weigh feasibility, with and without noise, and at random."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--feasibility", choices=("mc", "pof"), nargs="+", default=["mc", "pof"])
    parser.add_argument("--trials", type=int, default=48)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--noises", type=float, nargs="+", default=[0.0])
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    problem = ThreeBowls()
    rows = []
    for noise in given.noises:
        for feasibility in given.feasibility:
            for seed in given.seeds:
                start = time.perf_counter()
                x = search(problem, given.trials, given.batch, feasibility, noise, seed)
                at_random = np.random.default_rng(seed).random(x.shape)
                row = {"noise": noise, "feasibility": feasibility, "seed": seed, "score": problem.score(x)}
                row |= {"random": problem.score(at_random), "sobol": problem.score(sobol(3, 0, len(x), seed))}
                row |= {"after": {str(k): problem.score(x[:k]) for k in range(START, len(x) + 1, given.batch)}}
                row |= {"seconds": time.perf_counter() - start}
                rows.append(row)
                told = ", ".join(f"{name} {row[name]:.4f}" for name in ("score", "random", "sobol"))
                print(f"noise {noise:g}, {feasibility}, seed {seed}: {told} ({row['seconds']:.0f} s)", flush=True)
    given.out.parent.mkdir(parents=True, exist_ok=True)
    record = {
        "schema": 1,
        "problem": {"name": "ThreeBowls", "dimension": problem.dimension, "reference": problem.reference.tolist()},
        "optimum": problem.optimum,
        "trials": given.trials,
        "batch": given.batch,
        "start": START,
        "rows": rows,
        "environment": describe_environment(torch.device("cpu")) | {"botorch": version("botorch")},
    }
    write_json(given.out, record)


if __name__ == "__main__":
    main()
