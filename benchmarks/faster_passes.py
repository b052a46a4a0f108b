"""What eight bits and ``torch.compile`` save of a prediction with several draws, and what eight bits cost in quality.

python benchmarks/faster_passes.py --model llama2-7b --batch 8x128 --samples 4 --out times.json
python benchmarks/faster_passes.py --run RUN --data-dir DATA --out quality.json

Times are relative to one pass of PEFT's LoRA as it is, in turns in one process. In eight bits, every frozen linear layer but
the output head rounds its weight and its input by rows (see ``eight_bit.py``). The decoder is compiled as a whole. Quality is
that of a run's mean and of its draws on its validation and test questions.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
from eight_bit import EightBits
from records import command
from torch import nn

from bayeslora import load_run
from bayeslora.atomic_files import write_json
from bayeslora.bench.actions import Predict
from bayeslora.bench.config import LORA, BenchConfig, parse_batch
from bayeslora.bench.subjects import Subjects
from bayeslora.bench.timing import time_in_turns
from bayeslora.predict.questions.predictions import Predictions
from bayeslora.predict.questions.scorer import Scorer
from bayeslora.runs.environment import describe_environment
from bayeslora.runs.predictors import make_predictor
from bayeslora.tasks import load_task

WAYS = ("as it is", "float8", "int8", "compiled", "compiled, float8", "compiled, int8")


def changed(model: Any, bits: EightBits | None, compiled: bool) -> Any:
    """The model, in eight bits from now on, or with its decoder compiled."""
    if bits is not None:
        bits.put_into(model)
    if compiled:
        found: nn.Module = model.base_model.model.get_decoder()
        found.compile(dynamic=False)
    return model


def time_passes(given: argparse.Namespace) -> dict[str, Any]:
    """Times of a pass of LoRA, and of draws, in all ways."""
    config = BenchConfig(
        model=given.model, batches=(given.batch,), samples=(given.samples,), targets=tuple(given.targets)
    )
    subjects = Subjects(config, given.device)
    ids = subjects.tokens(*parse_batch(given.batch))
    torch._dynamo.config.recompile_limit = 8 * len(WAYS)  # every model is one more form of the same code
    formats = {name: EightBits(name) for name in ("float8", "int8")}
    actions: dict[str, Callable[[], Any]] = {}
    failed: dict[str, str] = {}
    exact: dict[str, Any] = {}
    errors: dict[str, float] = {}
    for way in given.ways:
        bits = next((form for name, form in formats.items() if way.endswith(name)), None)
        for who, samples in ((LORA, 0), ("bayesian-lora", given.samples)):
            name = who if who == LORA else f"{who}, N={samples}"
            label = f"{name}, {way}"
            began = time.perf_counter()
            try:
                model = changed(subjects.make(who).eval(), bits, way.startswith("compiled"))
                action = Predict(model, ids, samples, "all")
                logits = [action().float() for _ in range(3)][-1]
                logits = logits - logits.mean(-1, keepdim=True)  # averages of draws are log-probabilities
                errors[label] = float((logits - exact.setdefault(name, logits)).norm() / exact[name].norm())
            except Exception as error:
                failed[label] = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"[:300]
                print(f"{label}: {failed[label]}", flush=True)
                continue
            actions[label] = action
            print(f"{label}: ready after {time.perf_counter() - began:.1f} s", flush=True)
    timings = time_in_turns(actions, subjects.device, repeats=given.repeats, warmup=2)
    base = timings[f"{LORA}, as it is"]
    rows = {
        name: {"milliseconds": 1000 * timing.median, "ratio": timing.ratio_to(base), "logits_apart": errors[name]}
        for name, timing in timings.items()
    }
    for name, row in rows.items():
        middle, low, high = row["ratio"]
        print(f"{name}: {row['milliseconds']:.1f} ms, {middle:.2f} ({low:.2f} to {high:.2f}), apart {errors[name]:.2g}")
    return {"rows": rows, "failed": failed, "environment": describe_environment(subjects.device)}


def measure_quality(given: argparse.Namespace) -> dict[str, Any]:
    """NLL, accuracy and differences of answers with eight bits, of a run's validation and test questions."""
    run = load_run(given.run, raw=True)
    predictor = make_predictor(Scorer(run.model, run.loaded.tokenizer.pad_token_id or 0), run.loaded, run.config)
    rows = []
    for split in ("validation", "test"):
        items = load_task(run.config.task, given.data_dir).load(split).items[: given.questions]
        encoded = predictor.encode(items)
        for samples in (0, given.samples):
            exact: Predictions | None = None
            for way in ("as it is", "float8", "int8"):
                inside = nullcontext() if way == "as it is" else EightBits(way).of(run.model)
                with inside:
                    found = predictor.with_draws(samples=samples)(items, encoded)
                exact = found if exact is None else exact
                row = {"split": split, "samples": samples, "products": way, "questions": len(items)}
                metrics = found.metrics()
                row |= {name: metrics[name] for name in ("nll", "acc", "ece")}
                row |= differences(exact, found)
                rows.append(row)
                print(row, flush=True)
    return {"task": run.config.task, "rows": rows, "environment": describe_environment(predictor.scorer.device)}


def differences(exact: Predictions, found: Predictions) -> dict[str, float]:
    """How far the probabilities of options lie apart, and the share of questions with another answer."""
    apart = np.abs(exact.probabilities - found.probabilities)
    return {
        "mean_difference": float(apart.max(axis=1).mean()),
        "largest_difference": float(apart.max()),
        "other_answers": float((exact.choices != found.choices).mean()),
    }


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--batch", default="8x128")
    parser.add_argument("--samples", type=int, default=4)
    parser.add_argument("--targets", nargs="+", default=["q_proj", "k_proj", "v_proj", "o_proj"])
    parser.add_argument("--ways", nargs="+", default=list(WAYS), choices=WAYS)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--run", type=Path, default=None, help="quality of this run instead of times")
    parser.add_argument("--data-dir", type=Path, default=None)
    parser.add_argument("--questions", type=int, default=None, help="of each split; all by default")
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    torch.set_grad_enabled(False)
    found = time_passes(given) if given.run is None else measure_quality(given)
    config = {name: str(value) if isinstance(value, Path) else value for name, value in vars(given).items()}
    write_json(given.out, {"schema": 1, "config": config, **found})


if __name__ == "__main__":
    command(main)
