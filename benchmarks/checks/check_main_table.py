"""The main table, and training without early stopping."""

from __future__ import annotations

from statistics import mean
from typing import Any

from documents import RESULTS, printed_by, read, report, text_of

MAIN_SEEDS = tuple(f"five-tasks/{name}" for name in ("seeds-0-1", "seed-2", "winogrande-seed-2"))


def runs_of(record: str, task: str, method: str) -> list[dict[str, Any]]:
    """A method's runs on a task, if the record has them."""
    runs: list[dict[str, Any]] = read(record)["sections"].get(task, {}).get(method, {}).get("runs", [])
    return runs


def test_the_main_table() -> None:
    page, metrics = report("main-table"), ("--metrics", "nll", "calibrated_nll", "ece", "acc")
    records, sixth = (sorted((RESULTS / "main" / part).glob("*.json")) for part in ("five-tasks", "boolq"))
    assert printed_by("across", *records, "--means") in page
    assert printed_by("across", *records, "--seeds", "0", "1", "2", *metrics) in page
    assert printed_by("across", RESULTS / "main/five-tasks/seeds-0-1.json", *metrics) in page
    assert printed_by("across", *sixth, "--means") in page
    assert printed_by("across", *records, *sixth, "--means") in page
    for fitted in ("laplace", "tfb"):
        pair = (RESULTS / f"main/fitted/{fitted}{ending}.json" for ending in ("", "-boolq"))
        assert printed_by("across", *pair, "--metrics", "nll", "ece") in page
    means = printed_by("across", *records, *sixth, "--means", "--no-deviations")
    assert "\n".join(means.splitlines()[:11]) in text_of("docs/results.md")
    assert "\n".join(means.splitlines()[:6]) in text_of("README.md")
    for method, found in read("main/curves.json")["methods"].items():
        raw, after = found["raw"], found["calibrated"]
        figures = f"{100 * raw['ece']:.1f} % | {100 * after['ece']:.1f} % | {raw['aurc']:.3f}"
        assert f"| {method} | {figures} |" in page and raw["answers"] == 13_164


def test_training_without_early_stopping() -> None:
    page = report("main-table")
    shown = []
    for task in ("arc-challenge", "winogrande-s"):
        for method in ("lora", "blob", "bayesian-lora"):
            records = ([*MAIN_SEEDS], ["unstopped-4"], ["unstopped-8"])
            runs = [
                [run["metrics"] for name in names for run in runs_of(f"main/{name}.json", task, method)]
                for names in records
            ]
            assert [len(of) for of in runs] == [3, 3, 3]
            nll, last = [mean(run["nll"] for run in of) for of in runs], runs[-1]
            ece, acc = (100 * mean(run[name] for run in last) for name in ("ece", "acc"))
            cells = [f"{value:.3f}" for value in nll] + [f"{nll[-1] / min(nll):.2f}", f"{ece:.1f}", f"{acc:.1f}"]
            shown.append(" | ".join([task, method, *cells, f"{mean(run['calibrated_nll'] for run in last):.3f}"]))
    assert all(f"| {row} |" in page for row in shown)
