"""The comparison on a small model."""

from __future__ import annotations

import importlib
from pathlib import Path
from statistics import mean, median

import pytest
from documents import RESULTS, ROOT, printed_by, read, report

TABLE = ["table/arc-easy.json", "table/openbookqa.json", "table/cut.json"]

BEYOND = ["table/beyond/arc-easy.json", "table/beyond/openbookqa.json", "table/beyond/cut.json"]

SIX = ["arc-easy", "arc-challenge", "openbookqa", "winogrande-s", "winogrande-m", "boolq"]


@pytest.mark.parametrize(
    ("records", "tasks", "metrics"),
    [
        (TABLE, SIX, ["ACC", "NLL", "ECE"]),
        (["table/tempered.json"], SIX, ["NLL"]),
        (BEYOND, SIX, ["NLL"]),
        (["letters/table.json"], [], ["ACC", "NLL", "ECE"]),
    ],
    ids=["all", "tempered", "other rates", "letters"],
)
def test_tables_of_the_comparison(records: list[str], tasks: list[str], metrics: list[str]) -> None:
    page = report("comparison")
    printed = printed_by("across", *(RESULTS / name for name in records), "--section", *tasks)
    titled = zip(*[iter(printed.split("\n\n"))] * 2, strict=True)
    tables = {title.strip("*").split()[0]: table for title, table in titled}
    assert len(tables) == 3 and all(tables[metric] in page for metric in metrics)


def test_the_figure_of_the_comparison_has_every_method_on_every_task(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    across, drawn = importlib.import_module("across"), {}
    monkeypatch.setattr(across, "scatter_figure", lambda sections, path: drawn.update(sections))
    sections = across.read_sections([RESULTS / name for name in TABLE], SIX)
    across.draw(sections, Path("figure.png"))
    assert list(drawn) == SIX and all(len(rows) == 14 for rows in drawn.values())
    for task, rows in drawn.items():
        for method, row in rows.items():
            runs = [run["metrics"] for run in sections[task][method]["runs"]]
            assert {name: cell.values for name, cell in row.items()} == {
                name: tuple(run[name] for run in runs) for name in ("acc", "ece")
            }


@pytest.mark.parametrize("records", [TABLE, BEYOND], ids=["all", "other rates"])
def test_mean_ranks(records: list[str]) -> None:
    paths = [RESULTS / name for name in records]
    assert printed_by("across", *paths, "--ranks") in report("comparison")


MADE_OF_LORA = ("deep-ensemble", "temperature", "tfb", "laplace", "laplace-last-layer")
"""Methods without a learning rate of their own."""


def read_section(name: str, task: str) -> dict[str, dict[str, float]]:
    """Metrics of every method, mean over seeds."""
    record = read(name)
    return {
        method: {metric: mean(run["metrics"][metric] for run in it["runs"]) for metric in ("acc", "nll")}
        for method, it in record["sections"][task].items()
    }


def mean_nlls(*names: str) -> dict[tuple[str, str], tuple[float, float]]:
    """NLL over the seeds and the factor of the learning rate, by task and method."""
    found: dict[tuple[str, str], tuple[float, float]] = {}
    for name in names:
        record = read(name)
        chosen = record["chosen_rate_factors"]
        for task, section in record["sections"].items():
            for method, it in section.items():
                if it["runs"]:
                    nll = mean(run["metrics"]["nll"] for run in it["runs"])
                    found[task, method] = nll, chosen.get(f"{task}/{method}", chosen[f"{task}/lora"])
    return found


RUN_TWICE = ["table/arc-easy.json", "table/cut.json", "table/openbookqa-1280.json"]


def test_what_was_run_twice_came_out_alike() -> None:
    now = mean_nlls(*RUN_TWICE)
    before = mean_nlls("table/before/arc-easy.json", "table/before/cut.json")
    same, other = {}, {}
    for key in now.keys() & before.keys():
        if not key[1].startswith("laplace"):
            (same if now[key][1] == before[key][1] else other)[key] = abs(now[key][0] - before[key][0])
    assert len(same) > 50
    assert [key for key, far in same.items() if far > 0.005] == [("arc-challenge", "c-lora")]
    assert max(other, key=other.__getitem__) == ("arc-easy", "blob") and f"{max(other.values()):.3f}" == "0.031"


def best_of_runs(*names: str) -> dict[tuple[str, str, int, float], float]:
    """The best validation NLL of every trained run, by task, method, seed and factor of the learning rate."""
    found = {}
    for name in names:
        record = read(name)
        for pair, factor in record["chosen_rate_factors"].items():
            task, method = pair.split("/")
            for run in record["sections"][task][method]["runs"]:
                nlls = [epoch["validation"]["nll"] for epoch in run["history"] if "validation" in epoch]
                found[task, method, run["seed"], factor] = min(nlls)
    return found


def test_how_well_runs_repeat() -> None:
    now, before = best_of_runs(*RUN_TWICE), best_of_runs("table/before/arc-easy.json", "table/before/cut.json")
    apart: dict[str, list[float]] = {}
    for key in now.keys() & before.keys():
        apart.setdefault(key[1], []).append(abs(now[key] - before[key]))
    middle = {method: f"{median(far):.3f}" for method, far in apart.items()}
    assert middle.pop("bayesian-lora") == "0.006"
    assert len(middle) == 8 and set(middle.values()) == {"0.001", "0.002", "0.003"}
    assert [f"{max(apart[method]):.2f}" for method in ("lora", "blob")] == ["0.04", "0.04"]
    studies = [read(name) for name in ("shift/openbookqa.json", RUN_TWICE[-1])]
    assert [f"{it['rate_search']['openbookqa/bayesian-lora']['2']:.3f}" for it in studies] == ["1.218", "1.264"]


def test_how_training_goes_on() -> None:
    runs = read("table/histories.json")["runs"]

    def nlls(task: str, method: str, rate: str, kind: str) -> list[float]:
        return [epoch[f"{kind}_nll"] for epoch in runs[f"{task}/{method}/rate-{rate}/seed-0"]]

    found = [nlls("openbookqa", method, "2", "validation") for method in ("lora", "bayesian-lora")]
    assert [(f"{it[-1]:.2f}", f"{min(it):.2f}", len(it)) for it in found] == [("1.46", "1.09", 4), ("1.12", "1.07", 4)]
    pairs = [(method, task) for task in ("boolq", "winogrande-m") for method in ("bayesian-lora", "lora")]
    ends = [f"{nlls(task, method, '1', 'train')[-1]:.2f}" for method, task in pairs]
    assert ends == ["0.63", "0.57", "0.72", "0.60"]


def test_what_rates_beyond_those_tried_change() -> None:
    first, then = mean_nlls(*TABLE), mean_nlls(*BEYOND)
    searched = {key for key in first if key[1] not in MADE_OF_LORA}
    moved = {key for key in searched if first[key][1] != then[key][1]}
    assert len(searched) == 54 and sum(first[key][1] in (0.5, 2) for key in searched) == 42
    assert len(moved) == 18 and {then[key][1] for key in moved} == {4}
    assert sum(then[key][0] < first[key][0] for key in moved) == 12
    assert [method for _, method in moved].count("adalora") == 5
    assert not any(method == "bayesian-lora" for _, method in moved)


def test_what_fewer_questions_cost() -> None:
    many, few = (read_section(f"table/{name}.json", "openbookqa") for name in ("openbookqa", "openbookqa-1280"))
    assert list(many) == list(few) and len(many) == 14
    lost = {method: 100 * (many[method]["acc"] - few[method]["acc"]) for method in many}
    assert f"{min(lost.values()):.0f} to {max(lost.values()):.0f}" == "9 to 11"
    assert max(lost, key=lost.__getitem__) == "bayesian-lora"
    gained = [few[method]["nll"] - many[method]["nll"] for method in many]
    assert f"{min(gained):.2f} to {max(gained):.2f}" == "0.15 to 0.27"


def test_figures_of_newer_methods() -> None:
    page = report("comparison").split("## Newer methods, and the current default")[1]
    record = ROOT / "benchmarks/results/table/smollm2-new.json"
    assert printed_by("across", record, "--means") in page
    assert printed_by("across", record, "--metrics", "nll", "calibrated_nll", "acc") in page
