"""The quickstart's figures."""

from __future__ import annotations

import json
from statistics import mean
from typing import Any

from documents import ROOT, read, report, text_of


def test_figures_of_the_readme() -> None:
    results = [
        json.loads(file.read_text()) for file in sorted((ROOT / "benchmarks/results/quickstart").glob("seed-*.json"))
    ]
    for title, method in (("LoRA", "lora"), ("Bayesian-LoRA", "bayesian-lora")):
        row = [
            mean(result[method]["metrics"][metric] for result in results)
            for metric in ("acc", "confidence", "nll", "ece", "distance_to_truth")
        ]
        line = f"| {title} | " + " | ".join(f"{value:.3f}" for value in row) + " |"
        assert line in text_of("README.md")


def test_figures_of_the_quickstart() -> None:
    page = report("quickstart")
    names = ("acc", "nll", "ece", "distance_to_truth")

    def cells(result: Any) -> str:
        values = [result["metrics"][name] for name in names] + [
            result["calibrated"]["metrics"][name] for name in names[1:]
        ]
        return " | ".join(f"{value:.3f}" for value in values)

    for seed in range(3):
        ours, published = read(f"quickstart/seed-{seed}.json"), read(f"quickstart/inducing/seed-{seed}.json")
        for method, result in ours.items():
            assert f"| {seed} | `{method}` | {cells(result)} |" in page
            assert result["environment"]["commit"].startswith("25b880c")
        assert f"| {seed} | {cells(published['bayesian-lora'])} |" in page

    rows: dict[str, list[str]] = {}
    for run in read("quickstart/validation.json")["runs"]:
        shown = [run[name] for name in ("expected_nll", "expected_acc", "confidence", "distance_to_truth")]
        key = json.dumps([run["method"], run["preset"], run["settings"]])
        rows[key] = [*rows.get(key, []), *(f"{value:.3f}" for value in shown)]
    for found in rows.values():
        columns = [", ".join(found[column::4]) for column in range(4)]
        assert " | ".join(columns) in page
