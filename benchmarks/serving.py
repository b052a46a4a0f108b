"""Probabilities of a served export beside those of the run it was made from.

bayeslora export RUN --samples 2 --out EXPORT     # prints the command that serves it; run that
python benchmarks/serving.py RUN EXPORT http://127.0.0.1:8000 --engine "vllm 0.32.0" --out result.json
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import numpy as np
import torch

from bayeslora import load_run
from bayeslora.export.manifest import read_manifest
from bayeslora.remote import RemoteModel
from bayeslora.runs.environment import describe_environment
from bayeslora.tasks import load_task


def main() -> None:
    """Ask both and write how far they are apart."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("export", type=Path)
    parser.add_argument("url")
    parser.add_argument("--engine", required=True, help="name and version of the server")
    parser.add_argument("--questions", type=int, default=5)
    parser.add_argument("--data-dir", type=Path, default=None)
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    manifest = read_manifest(given.export)
    run = load_run(given.run, samples=len(manifest.adapters))
    items = load_task(run.config.task, given.data_dir).load("test").items[: given.questions]
    local = run.predict(items)
    start = time.perf_counter()
    served = RemoteModel(given.url, given.export).predict(items)
    seconds = time.perf_counter() - start
    draws = local.draws
    assert draws is not None
    record = {
        "schema": 1,
        "engine": given.engine,
        "task": run.config.task,
        "questions": len(items),
        "adapters": len(manifest.adapters),
        "adapts_head": manifest.adapts_head,
        "largest_difference": float(np.abs(local.probabilities - served.probabilities).max()),
        "largest_difference_between_draws": float(np.abs(draws[0] - draws[-1]).max()),
        "same_choices": bool((local.choices == served.choices).all()),
        "seconds": seconds,
        "environment": describe_environment(torch.device("cpu")),
    }
    given.out.parent.mkdir(parents=True, exist_ok=True)
    given.out.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    print(json.dumps(record, indent=2))


if __name__ == "__main__":
    main()
