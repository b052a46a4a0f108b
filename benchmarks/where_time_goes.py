"""Which kernels the time of a prediction or of a training step goes to: PEFT's LoRA on as many tokens, and ours.

python benchmarks/where_time_goes.py --model llama2-7b --inducing 9 --batch 8x128 --samples 4 --out profile.json
python benchmarks/where_time_goes.py --train --model qwen2.5-1.5b --batch 8x512 --targets q_proj v_proj --out profile.json

Kernels are told apart by their names: products, attention, everything else. ``wall`` is the time without the profiler: where it
is much more than the sum of the others, the device waits for the host. PEFT's LoRA is also profiled on N times the rows, which
is the arithmetic that N exact draws need. Training steps are
profiled as they are and with lean layers, as in ``bayeslora train``.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from bayeslora.adapter.lean_layers import LeanLayers
from bayeslora.atomic_files import write_json
from bayeslora.bench.actions import Predict, TrainStep
from bayeslora.bench.config import LORA, BenchConfig, parse_batch
from bayeslora.bench.subjects import Subjects
from bayeslora.bench.timing import time_in_turns
from bayeslora.runs.environment import describe_environment

KINDS = {
    "products": ("gemm", "gemv", "cutlass", "nvjet", "splitk", "xmma", "mm"),
    "attention": ("flash", "fmha", "attention", "sdpa"),
}
ROUNDS = 5


def kind_of(kernel: str) -> str:
    """What a kernel does, by its name."""
    name = kernel.lower()
    for kind in ("attention", "products"):
        if any(part in name for part in KINDS[kind]):
            return kind
    return "everything else"


def profiled(action: Callable[[], object], device: torch.device) -> dict[str, float]:
    """Milliseconds on the device per call by kind of kernel, the number of kernels, and milliseconds in all."""
    for _ in range(3):
        action()
    on_gpu = device.type == "cuda"
    (timing,) = time_in_turns({"action": action}, device, repeats=ROUNDS, warmup=1).values()
    with profile(activities=[ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU]) as seen:
        for _ in range(ROUNDS):
            action()
        if on_gpu:
            torch.cuda.synchronize(device)
    found = {"products": 0.0, "attention": 0.0, "everything else": 0.0, "kernels": 0.0}
    for event in seen.key_averages():
        spent = event.self_device_time_total if on_gpu else event.self_cpu_time_total
        found[kind_of(event.key)] += spent / 1000 / ROUNDS
        found["kernels"] += event.count / ROUNDS
    return {name: round(value, 3) for name, value in {**found, "wall": 1000 * timing.median}.items()}


def predictions(given: argparse.Namespace, subjects: Subjects) -> dict[str, Callable[[], Any]]:
    """Predictions to profile, by name."""
    rows, length = parse_batch(given.batch)
    stock, ours = subjects.make(LORA).eval(), subjects.make("bayesian-lora").eval()
    few, many = subjects.tokens(rows, length), subjects.tokens(rows * given.samples, length)
    return {
        f"{LORA}, {given.batch}": Predict(stock, few, 0, "all"),
        f"{LORA}, {rows * given.samples}x{length}": Predict(stock, many, 0, "all"),
        f"bayesian-lora, N={given.samples}, {given.batch}": Predict(ours, few, given.samples, "all"),
    }


def training_steps(given: argparse.Namespace, subjects: Subjects) -> dict[str, Callable[[], Any]]:
    """Training steps to profile, by name."""
    tokens = subjects.tokens(*parse_batch(given.batch))
    found: dict[str, Callable[[], Any]] = {}
    for name in (LORA, "lora", "bayesian-lora"):
        model = subjects.make(name).train()
        step, lean = TrainStep(model, tokens, name != LORA), LeanLayers(model)

        def with_lean_layers(step: TrainStep = step, lean: LeanLayers = lean) -> None:
            with lean:
                step()

        found[name] = step
        found[f"{name}, lean layers"] = with_lean_layers
    return found


def main() -> None:
    """Profile, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--inducing", type=int, default=None)
    parser.add_argument("--batch", default="8x128")
    parser.add_argument("--samples", type=int, default=4)
    parser.add_argument("--targets", nargs="+", default=list(BenchConfig.targets))
    parser.add_argument("--train", action="store_true", help="training steps instead of predictions")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    config = BenchConfig(
        model=given.model,
        inducing=given.inducing,
        batches=(given.batch,),
        samples=(given.samples,),
        targets=tuple(given.targets),
    )
    subjects = Subjects(config, given.device)
    actions = (training_steps if given.train else predictions)(given, subjects)
    found = {name: profiled(action, subjects.device) for name, action in actions.items()}
    for name, figures in found.items():
        print(f"{name}: " + ", ".join(f"{kind} {value:g}" for kind, value in figures.items()))
    write_json(
        given.out,
        {
            "schema": 1,
            "unit": f"milliseconds on the device per {'training step' if given.train else 'prediction'}",
            "config": vars(given) | {"out": str(given.out)},
            "environment": describe_environment(subjects.device),
            "rows": found,
        },
    )


if __name__ == "__main__":
    main()
