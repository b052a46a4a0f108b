"""How long a single prediction takes from the shell, beside the imports that every such program needs.

python benchmarks/start_time.py RUN --calls 5 --out start.json

Processes are started in turns, after one round that is not counted; times are wall clock, from start to end of a process. In each
round a prediction starts a server that keeps the model in memory (``--stay``), the next one asks it, and the server is ended.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import torch
from records import command

from bayeslora.atomic_files import write_json
from bayeslora.errors import InputError
from bayeslora.number_checks import check_count
from bayeslora.runs.environment import describe_environment

QUESTION = ["--question", "Which of these is a number?", "--choice", "seven", "--choice", "blue"]


def seconds(words: list[str], environment: dict[str, str]) -> float:
    """How long a process takes."""
    begun = time.perf_counter()
    done = subprocess.run([sys.executable, *words], check=False, capture_output=True, text=True, env=environment)
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise InputError(f"{' '.join(words)} failed: {reason}")
    return time.perf_counter() - begun


@contextmanager
def own_servers(run: Path) -> Iterator[dict[str, str]]:
    """An environment in which processes see no servers but those that they start, which end with the block."""
    with TemporaryDirectory() as place:
        environment = {**os.environ, "XDG_RUNTIME_DIR": place}
        try:
            yield environment
        finally:
            stop = [sys.executable, "-m", "bayeslora", "serve", str(run), "--stop"]
            subprocess.run(stop, check=False, capture_output=True, env=environment)


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="a trained run on questions, of a Llama model")
    parser.add_argument("--calls", type=int, default=5)
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    check_count("calls", given.calls)
    predict = ["-m", "bayeslora", "predict", str(given.run), *QUESTION, "--device", "cpu", "--quiet"]
    processes = {
        "import torch": ["-c", "import torch"],
        "import the model class": ["-c", "from transformers import LlamaForCausalLM"],
        "predict": predict,
        "predict, which starts a server": [*predict, "--stay", "5"],
        "predict, with the model in memory": predict,
    }
    found: dict[str, list[float]] = {name: [] for name in processes}
    for turn in range(given.calls + 1):
        with own_servers(given.run) as environment:
            for name, words in processes.items():
                spent = seconds(words, environment)
                if turn:
                    found[name].append(spent)
    rows = {name: {"median": median(it), "least": min(it), "most": max(it)} for name, it in found.items()}
    described = describe_environment(torch.device("cpu"))
    write_json(given.out, {"schema": 1, "seconds": rows, "calls": given.calls, "environment": described})
    for name, row in rows.items():
        print(f"{name}: {row['median']:.1f} s ({row['least']:.1f} to {row['most']:.1f})")


if __name__ == "__main__":
    command(main)
