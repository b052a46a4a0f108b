"""Which kernels the time of a prediction goes to: PEFT's LoRA on as many tokens, and ours with N draws.

python benchmarks/where_time_goes.py --model llama2-7b --inducing 9 --batch 8x128 --samples 4 --out profile.json

Kernels are told apart by their names: products, attention, everything else. PEFT's LoRA is also profiled on N times the
rows, which is the arithmetic that N exact draws need.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from bayeslora.atomic_files import write_json
from bayeslora.bench.actions import Predict
from bayeslora.bench.config import LORA, BenchConfig, parse_batch
from bayeslora.bench.subjects import Subjects
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
    """Milliseconds on the device per call by kind of kernel, and the number of kernels."""
    for _ in range(3):
        action()
    on_gpu = device.type == "cuda"
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
    return {name: round(value, 3) for name, value in found.items()}


def main() -> None:
    """Profile, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--inducing", type=int, default=None)
    parser.add_argument("--batch", default="8x128")
    parser.add_argument("--samples", type=int, default=4)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    config = BenchConfig(model=given.model, inducing=given.inducing, batches=(given.batch,), samples=(given.samples,))
    subjects = Subjects(config, given.device)
    rows, length = parse_batch(given.batch)
    stock, ours = subjects.make(LORA).eval(), subjects.make("bayesian-lora").eval()
    few, many = subjects.tokens(rows, length), subjects.tokens(rows * given.samples, length)
    actions: dict[str, Callable[[], Any]] = {
        f"{LORA}, {given.batch}": Predict(stock, few, 0, "all"),
        f"{LORA}, {rows * given.samples}x{length}": Predict(stock, many, 0, "all"),
        f"bayesian-lora, N={given.samples}, {given.batch}": Predict(ours, few, given.samples, "all"),
    }
    found = {name: profiled(action, subjects.device) for name, action in actions.items()}
    for name, figures in found.items():
        print(f"{name}: " + ", ".join(f"{kind} {value:g}" for kind, value in figures.items()))
    write_json(
        given.out,
        {
            "schema": 1,
            "unit": "milliseconds on the device per prediction",
            "config": vars(given) | {"out": str(given.out)},
            "environment": describe_environment(subjects.device),
            "rows": found,
        },
    )


if __name__ == "__main__":
    main()
