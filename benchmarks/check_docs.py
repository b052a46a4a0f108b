"""Figures in the documentation and the reports are those of the records: ``make check-docs``, or

python -m pytest benchmarks/check_docs.py
"""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import re
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import mean, median
from typing import Any

import pytest

from bayeslora.studies.ablations import ABLATIONS

ROOT = Path(__file__).parent.parent
REPORTS = ROOT / "benchmarks/reports"


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
        assert line in (ROOT / "README.md").read_text(encoding="utf-8")


def test_figures_of_the_quickstart() -> None:
    page = (REPORTS / "quickstart.md").read_text(encoding="utf-8")
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


def printed_by(script: str, *given: object) -> str:
    """What a script of the benchmarks prints, without a process of its own."""
    path, printed = ROOT / "benchmarks" / f"{script}.py", io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(printed):
        patch.chdir(ROOT)
        patch.setattr(sys, "argv", [str(path), *map(str, given)])
        patch.syspath_prepend(path.parent)
        runpy.run_path(str(path), run_name="__main__")
    return printed.getvalue().strip()


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
    page = (REPORTS / "comparison.md").read_text(encoding="utf-8")
    printed = printed_by("across", *(ROOT / "benchmarks/results" / name for name in records), "--section", *tasks)
    titled = zip(*[iter(printed.split("\n\n"))] * 2, strict=True)
    tables = {title.strip("*").split()[0]: table for title, table in titled}
    assert len(tables) == 3 and all(tables[metric] in page for metric in metrics)


def test_the_figure_of_the_comparison_has_every_method_on_every_task(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    across, drawn = importlib.import_module("across"), {}
    monkeypatch.setattr(across, "scatter_figure", lambda sections, path: drawn.update(sections))
    sections = across.read_sections([ROOT / "benchmarks/results" / name for name in TABLE], SIX)
    across.draw(sections, Path("figure.png"))
    assert list(drawn) == SIX and all(len(rows) == 14 for rows in drawn.values())
    for task, rows in drawn.items():
        for method, row in rows.items():
            runs = [run["metrics"] for run in sections[task][method]["runs"]]
            assert {name: cell.values for name, cell in row.items()} == {
                name: tuple(run[name] for run in runs) for name in ("acc", "ece")
            }


SHIFTS = [
    f"openbookqa → {to}" for to in ("arc-challenge", "arc-easy", "mmlu-cs", "mmlu-eng", "mmlu-law", "mmlu-health")
]
LARGER_SHIFT = "shift/openbookqa-1.5b.json"
ALL_OF_SHIFT = ["nll", "ece", "acc", "aurc", "shift_auroc_epistemic", "shift_auroc_entropy"]


@pytest.mark.parametrize(
    ("page", "script", "given", "count"),
    [
        ("shift", "across", ["shift/openbookqa.json", "--section", *SHIFTS, "--metrics", *ALL_OF_SHIFT], 6),
        ("shift", "sections", ["shift/openbookqa.json", "--section", "openbookqa"], 1),
        (
            "shift-qwen",
            "across",
            [LARGER_SHIFT, "--section", *SHIFTS, "--metrics", *ALL_OF_SHIFT, "shift_auroc_distance"],
            7,
        ),
        ("shift-qwen", "sections", [LARGER_SHIFT, "--section", "openbookqa"], 1),
        ("wikitext2", "sections", ["wikitext2/table.json"], 2),
        ("wikitext2", "sections", ["wikitext2/one-draw.json"], 2),
        ("math", "sections", ["math/table.json", "math/aime.json"], 3),
        (
            "comparison",
            "smoothed",
            ["--off", *TABLE, "--on", "smoothing/arc-easy.json", "smoothing/openbookqa.json", "smoothing/cut.json"],
            3,
        ),
    ],
    ids=[
        "shifts",
        "what was learnt before them",
        "shifts, 1.5B",
        "before them, 1.5B",
        "text",
        "text, one draw",
        "mathematics",
        "smoothing",
    ],
)
def test_tables_of_the_studies(page: str, script: str, given: list[str], count: int) -> None:
    text = (REPORTS / f"{page}.md").read_text(encoding="utf-8")
    words = [f"benchmarks/results/{word}" if word.endswith(".json") else word for word in given]
    tables = printed_by(script, *words).split("\n\n")[1::2]
    assert len(tables) == count and all(table in text for table in tables)


@pytest.mark.parametrize("model", ["qwen2.5-1.5b", "llama2-7b"])
def test_training_beside_trl(model: str) -> None:
    page = (REPORTS / "performance.md").read_text(encoding="utf-8")
    for row in json.loads((ROOT / f"benchmarks/results/trl/{model}.json").read_text(encoding="utf-8"))["rows"]:
        speed, memory = (f"{row[name]:.2f}" for name in ("speed", "memory"))
        shown = (
            f"{row['tokens_per_second']:,.0f}",
            speed,
            f"{row['peak_gib']:.1f}",
            memory,
            f"{row['last_losses']:.3f}",
        )
        assert " | ".join(shown) in page


@pytest.mark.parametrize("task", ["arc-easy", "arc-challenge"])
def test_quality_of_late_draws(task: str) -> None:
    column = {"arc-easy": 3, "arc-challenge": 4}[task]
    page = (REPORTS / "performance.md").read_text(encoding="utf-8")
    table = page.split("| draws differ in | time, from the table above |")[1].split("\n\n")[0]
    shown = [line.split("|")[column].strip() for line in table.splitlines()[2:]]
    record = json.loads((ROOT / f"benchmarks/results/frontier/{task}.json").read_text(encoding="utf-8"))
    mean, *others = (f"{row['validation_nll']:.3f}" for row in record["rows"])
    assert shown == [*others[:4], mean, *others[4:]]


@pytest.mark.parametrize("run", ["quickstart", "quickstart-default"])
def test_late_draws_of_the_quickstart(run: str) -> None:
    page = (REPORTS / "draws.md").read_text(encoding="utf-8")
    for row in json.loads((ROOT / f"benchmarks/results/frontier/{run}.json").read_text(encoding="utf-8"))["rows"]:
        figures = [f"{row[name]:.3f}" for name in ("validation_nll", "nll", "ece", "epistemic")]
        assert " | ".join((f"{row['scale']:g}", *figures, f"{row['cost']:.2f}")) in page


def test_pairs_of_draws_and_draws_of_the_linearised_model() -> None:
    page = (REPORTS / "draws.md").read_text(encoding="utf-8")
    draws, line, default = (
        json.loads((ROOT / f"benchmarks/results/draws/{name}.json").read_text(encoding="utf-8"))["rows"]
        for name in ("quickstart", "linearised", "linearised-default")
    )
    for count in (2, 4, 8):
        errors = [f"{row['rmse']:.3f}" for row in draws if row["samples"] == count]
        assert f"| {count} | {' | '.join(errors)} |" in page
    for row in (*line, *default):
        quality = [f"{row[name]:.3f}" for name in ("nll_sampled", "nll_linearised", "mean_error")]
        times = [f"{row[name]:.1f}" for name in ("time_sampled", "time_linearised")]
        assert f"| {row['draws']} | {' | '.join(quality + times)} |" in page


@pytest.mark.parametrize("records", [TABLE, BEYOND], ids=["all", "other rates"])
def test_mean_ranks(records: list[str]) -> None:
    paths = [ROOT / "benchmarks/results" / name for name in records]
    assert printed_by("across", *paths, "--ranks") in (REPORTS / "comparison.md").read_text(encoding="utf-8")


MADE_OF_LORA = ("deep-ensemble", "temperature", "tfb", "laplace", "laplace-last-layer")
"""Methods without a learning rate of their own."""


def read_section(name: str, task: str) -> dict[str, dict[str, float]]:
    """Metrics of every method, mean over seeds."""
    record = json.loads((ROOT / "benchmarks/results" / name).read_text(encoding="utf-8"))
    return {
        method: {metric: mean(run["metrics"][metric] for run in it["runs"]) for metric in ("acc", "nll")}
        for method, it in record["sections"][task].items()
    }


def mean_nlls(*names: str) -> dict[tuple[str, str], tuple[float, float]]:
    """NLL over the seeds and the factor of the learning rate, by task and method."""
    found: dict[tuple[str, str], tuple[float, float]] = {}
    for name in names:
        record = json.loads((ROOT / "benchmarks/results" / name).read_text(encoding="utf-8"))
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
        record = json.loads((ROOT / "benchmarks/results" / name).read_text(encoding="utf-8"))
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
    studies = [
        json.loads((ROOT / "benchmarks/results" / name).read_text())
        for name in ("shift/openbookqa.json", RUN_TWICE[-1])
    ]
    assert [f"{it['rate_search']['openbookqa/bayesian-lora']['2']:.3f}" for it in studies] == ["1.218", "1.264"]


def test_how_training_goes_on() -> None:
    runs = json.loads((ROOT / "benchmarks/results/table/histories.json").read_text(encoding="utf-8"))["runs"]

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


@pytest.mark.parametrize("task", ["arc-easy", "arc-challenge"])
def test_figures_of_answering_only_when_sure(task: str) -> None:
    page = (REPORTS / "selective.md").read_text(encoding="utf-8")
    record = json.loads((ROOT / f"benchmarks/results/selective/{task}.json").read_text(encoding="utf-8"))
    for method, figures in record["rows"].items():
        shown = [[f"{100 * it[key]:.1f}" for key in ("value", "low", "high")] for it in figures.values()]
        assert f"| `{method}` | " + " | ".join(f"{v} ({low} to {high})" for v, low, high in shown) + " |" in page


TASKS = ("obqa", "arcc", "arce", "wino")
SHOWN = ("nll", "tempered_nll", "acc", "ece")


def test_figures_of_what_did_not_help() -> None:
    page = (REPORTS / "width-and-components.md").read_text(encoding="utf-8")
    table = page.split("## What did not help")[1].split("\n\n")[2].replace("**", "")
    record = json.loads((ROOT / "benchmarks/results/average/validation.json").read_text(encoding="utf-8"))
    names = {"base": "default", "average": "average", "both": "average, eight draws per step"}
    kinds = {"": lambda row: min(row["validation_nll"]), ", scaled": lambda row: row["nll"]}
    for ending, nll in kinds.items():
        for variant, name in names.items():
            cells = []
            for task in ("arc-easy", "arc-challenge", "openbookqa"):
                rows = [row for row in record["rows"] if (row["variant"], row["task"]) == (variant, task)]
                cells.append(f"{mean(map(nll, rows)):.3f}" if rows else "")
            assert f"| {name}{ending} | {' | '.join(cells)} |".replace("|  |", "| |") in table


def means_of(record: dict[str, Any], variant: str, tasks: Sequence[str] = TASKS) -> str | None:
    """The row of a variant, if it was run on all tasks."""
    rows = [[row for row in record["rows"] if (row["variant"], row["task"]) == (variant, task)] for task in tasks]
    if not all(rows):
        return None
    means = {key: mean(mean(row[key] for row in of_task) for of_task in rows) for key in SHOWN}
    cells = [f"{mean(row['nll'] for row in of_task):.3f}" for of_task in rows]
    cells += [f"{means['nll']:.3f}", f"{means['tempered_nll']:.3f}"]
    cells += [f"{100 * means['acc']:.1f}", f"{100 * means['ece']:.1f}"]
    return f"| {variant} | {' | '.join(cells)} |"


def test_figures_of_several_components() -> None:
    page = (REPORTS / "width-and-components.md").read_text(encoding="utf-8").split("## Several components")[1]
    tables = [part.replace("**", "") for part in page.split("\n\n") if part.startswith("| | OpenBookQA")]
    folder = ROOT / "benchmarks/results/components"
    search, earlier = (json.loads((folder / name).read_text("utf-8")) for name in ("search.json", "validation.json"))
    known = {means_of(search, variant) for variant in search["variants"]}
    assert len(tables[0].splitlines()) > 15 and set(tables[0].splitlines()[2:]) <= known
    for method in (
        "lora",
        "blob",
        "swag",
        "deep-ensemble",
        "mc-dropout",
        "adalora",
        "c-lora",
        "bbb",
        "lora-plus",
        "ivon",
    ):
        rows = [row for row in known if row is not None and row.startswith(f"| {method},")]
        assert min(rows, key=lambda row: float(row.split("|")[6])) in tables[0]  # the best of each
    assert all((means_of(earlier, variant) or "") in tables[1] for variant in earlier["variants"])
    best = [row["validation_nll"] for row in earlier["rows"] if row["variant"] == "4 components, width 0.03"]
    assert (sum(nlls[-1] == min(nlls) for nlls in best), len(best)) == (7, 8)


def test_figures_of_the_width_on_a_small_model() -> None:
    page = (REPORTS / "width-and-components.md").read_text("utf-8").split("## The width on a small model")[1]
    record = read("components/widths-smollm2.json")
    rows = [means_of(record, variant, TASKS[:3]) for variant in record["variants"]]
    assert len(rows) == 9 and "\n".join(map(str, rows)) in page


def test_figures_of_newer_methods() -> None:
    page = (REPORTS / "comparison.md").read_text("utf-8").split("## Newer methods, and the current default")[1]
    record = ROOT / "benchmarks/results/table/smollm2-new.json"
    assert printed_by("across", record, "--means") in page
    assert printed_by("across", record, "--metrics", "nll", "calibrated_nll", "acc") in page


def test_tables_of_the_ablations() -> None:
    page = (REPORTS / "ablations.md").read_text(encoding="utf-8")
    printed = printed_by("ablated", *sorted((ROOT / "benchmarks/results/ablations").glob("*.json")))
    tables = printed.split("\n\n")[1::2]
    assert len(tables) == len(ABLATIONS) and all(table in page for table in tables)


MAIN_SEEDS = ("seeds-0-1", "seed-2", "winogrande-seed-2", "ensembles-seed-2")


def runs_of(record: str, task: str, method: str) -> list[dict[str, Any]]:
    """A method's runs on a task, if the record has them."""
    runs: list[dict[str, Any]] = read(record)["sections"].get(task, {}).get(method, {}).get("runs", [])
    return runs


def test_tables_of_the_reports() -> None:
    main, metrics = ROOT / "benchmarks/results/main", ("--metrics", "nll", "calibrated_nll", "ece", "acc")
    names = (*MAIN_SEEDS, "ivon")
    records = [main / f"{name}.json" for name in names]
    sixth = [main / f"{name}.json" for name in ("boolq-seed-0", "boolq-seed-1", "boolq-seed-2", "ivon-boolq")]
    page = (REPORTS / "main-table.md").read_text(encoding="utf-8")
    assert printed_by("across", *records, "--means") in page
    assert printed_by("across", *records, "--seeds", "0", "1", "2", *metrics) in page
    assert printed_by("across", records[0], *metrics) in page
    assert printed_by("across", *sixth, "--means") in page
    assert printed_by("across", *records, *sixth, "--means") in page
    means = printed_by("across", *records, *sixth, "--means", "--no-deviations")
    results = (ROOT / "docs/results.md").read_text(encoding="utf-8")
    assert "\n".join(means.splitlines()[:10]) in results
    pooled = json.loads((main / "curves.json").read_text(encoding="utf-8"))["methods"]
    for method, found in pooled.items():
        raw, after = found["raw"], found["calibrated"]
        figures = f"{100 * raw['ece']:.1f} % | {100 * after['ece']:.1f} % | {raw['aurc']:.3f}"
        assert f"| {method} | {figures} |" in page and raw["answers"] == 13_164
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert "\n".join(means.splitlines()[:6]) in readme
    answers = (REPORTS / "free-answers.md").read_text(encoding="utf-8")
    rows = json.loads((ROOT / "benchmarks/results/rivals/arc-easy.json").read_text(encoding="utf-8"))["rows"]
    shown = [line for line in answers.splitlines() if line.startswith("|")][2:]
    assert len(shown) == len(rows) > 40
    for row in rows:
        cells = (row["model"], row["sequences"], f"{1000 * row['seconds']:.1f}", f"{row['auroc']:.3f}")
        found = [
            line
            for line in shown
            if row["score"] in line and f"| {cells[0]} | {cells[1]} | {cells[2]} | {cells[3]} " in line
        ]
        assert found, row["score"]


def test_training_that_nothing_stops() -> None:
    page = (REPORTS / "main-table.md").read_text(encoding="utf-8")
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


def test_figures_of_the_search() -> None:
    page = (REPORTS / "tuning.md").read_text(encoding="utf-8")
    record = json.loads((ROOT / "benchmarks/results/tune/arc-easy-tuned.json").read_text(encoding="utf-8"))
    for trial in record["front"]:
        found = trial["outcomes"]
        name = f"{trial['number']}, chosen" if trial["number"] == record["chosen"]["number"] else trial["number"]
        rate, figures = trial["values"]["learning_rate"], (100 * found["ece"], found["nll"], 100 * found["acc"])
        assert re.search(
            rf"\| {name} \| {rate:.4f} \| [\d.]+ \| {figures[0]:.1f} % \| {figures[1]:.3f} \| {figures[2]:.1f} % \|",
            page,
        )


def read(name: str) -> Any:
    """A record in ``benchmarks/results``."""
    return json.loads((ROOT / "benchmarks/results" / name).read_text(encoding="utf-8"))


def test_start_times() -> None:
    page = (REPORTS / "performance.md").read_text(encoding="utf-8").split("## One prediction from the shell")[1]
    for row in read("start/smollm2-cpu.json")["seconds"].values():
        shown = page.split("## ")[0].replace("**", "")
        assert f"| {row['median']:.1f} ({row['least']:.1f} to {row['most']:.1f}) |" in shown


@pytest.mark.parametrize(
    ("what", "row"),
    [
        ("redraw 1x128", "| fresh draws in every prediction, 1×128 tokens |"),
        ("cold 1x128", "| load the adapter, draw, predict, 1×128 tokens |"),
    ],
)
def test_fresh_draws(what: str, row: str) -> None:
    page = (REPORTS / "performance.md").read_text(encoding="utf-8")
    (line,) = [it for it in page.splitlines() if it.startswith(row)]
    rows = read("bench/llama2-7b-fresh.json")["rows"]
    (ratio,) = [it["ratio"] for it in rows if (it["what"], it["who"]) == (what, "bayesian-lora, N=4")]
    middle, low, high = ratio
    assert f"| {middle:.2f} ({low:.2f} to {high:.2f}) |" in line


def test_eight_bits_and_compiling() -> None:
    page = (REPORTS / "performance.md").read_text(encoding="utf-8")
    rows = read("bench/llama2-7b-eight-bits.json")["rows"]
    for way, shown in (("float8", "8-bit floats (e4m3)"), ("int8", "8-bit integers"), ("compiled", "compiled")):
        cells = []
        for who in ("peft lora", "bayesian-lora, N=4"):
            row = rows[f"{who}, {way}"]
            middle, low, high = (f"{value:.2f}" for value in row["ratio"])
            cells.append(f"{row['milliseconds']:.1f} ms, {middle} ({low} to {high})")
        assert f"| {shown} | {' | '.join(cells)} |" in page.replace("**", "")
    for row in read("bench/llama2-7b-eight-bits-compiled.json")["rows"].values():
        assert f"{row['ratio'][0]:.2f}" in page
    found: dict[str, dict[str, Any]] = {}
    for row in read("frontier/arc-challenge-eight-bits.json")["rows"]:
        if row["samples"] == 4:
            found.setdefault(row["products"], {})[row["split"]] = row
    for way, shown in (("as it is", "as it is"), ("float8", "8-bit floats"), ("int8", "8-bit integers")):
        validation, test = found[way]["validation"], found[way]["test"]
        cells = [
            f"{validation['nll']:.3f}",
            f"{test['nll']:.3f}",
            f"{100 * test['acc']:.1f}",
            f"{100 * test['ece']:.1f}",
        ]
        if way != "as it is":
            cells += [f"{test['mean_difference']:.3f}", f"{100 * test['other_answers']:.1f} %"]
        assert f"| {shown} | {' | '.join(cells)} |" in page


def test_growth() -> None:
    """Nothing grows faster than with the size itself, and launches do not grow with the layers."""
    page = (REPORTS / "performance.md").read_text(encoding="utf-8").split("## Growth")[1].split("\n## ")[0]
    rows = read("bench/qwen2.5-1.5b-growth.json")["rows"]

    def found(axis: str, who: str) -> dict[int, dict[str, Any]]:
        mine = [it for it in rows if it["who"] == who and it["what"].startswith(f"growth {axis} ")]
        return {int(it["what"].split()[-1]): it for it in mine}

    draws, components = found("draws", "bayesian-lora, predict"), "bayesian-lora, {}".format
    assert ", ".join(f"{draws[n]['ratio'][0]:.2f}" for n in (4, 8)) + f" and {draws[16]['ratio'][0]:.2f}" in page
    step, asked = (found("components", components(kind)) for kind in ("train", "predict"))
    assert f"{step[8]['ratio'][0]:.2f} and {asked[8]['ratio'][0]:.2f} of LoRA's, with one" in page
    assert f"with one {step[1]['ratio'][0]:.2f} and {asked[1]['ratio'][0]:.2f}" in page
    operators = {
        axis: {n: it["figures"]["operators"] for n, it in found(axis, components("train")).items()} for axis in AXES
    }
    assert set(operators["layers"].values()) == set(operators["draws"].values()) == {697.0}
    assert operators["components"][1] == 532.0 and operators["rank"][64] == 1003.0
    shares = [
        it["figures"]["bytes"] / found(axis, "peft lora, train")[n]["figures"]["bytes"]
        for axis in AXES
        for n, it in found(axis, components("train")).items()
    ]
    assert f"{min(shares):.2f} to {max(shares):.2f} of LoRA's" in page


AXES = ("layers", "rank", "rows", "draws", "components")


@pytest.mark.parametrize("name", ["qwen2.5-1.5b", "smollm2"])
def test_figures_of_a_server_under_load(name: str) -> None:
    page, found = (ROOT / "docs/serving.md").read_text(encoding="utf-8"), read(f"serve/{name}-16-clients.json")
    texts = found["texts"]
    measured = [found["one_at_a_time"], found["together"], texts["one_at_a_time"], texts["together"]]
    rates = [it["requests_per_second"] for it in measured]
    assert f"| answers per second | {' | '.join(f'{rate:.1f}' for rate in rates)} |" in page
    assert f"{found['speedup']:.1f} times as many questions and {texts['speedup']:.1f} times as many texts" in page
    for quantile, words in ((50, "median"), (95, "95th percentile")):
        seconds = [it[f"latency_p{quantile}_seconds"] for it in measured]
        rows = [row for row in page.splitlines() if row.startswith(f"| latency, {words} ")]
        assert sum(matches(row, seconds) for row in rows) == 1


def matches(row: str, seconds: Sequence[float]) -> bool:
    """Whether the cells of a row are these seconds, rounded."""
    told = re.findall(r"([\d.]+) s", row)
    return [f"{it:.{len(cell.split('.')[1])}f}" for it, cell in zip(seconds, told, strict=True)] == told


def test_figures_of_the_harness_on_a_gpu() -> None:
    page, found = (REPORTS / "lm-eval.md").read_text(encoding="utf-8"), read("harness/arc-easy-1.5b.json")
    rates, ratios = found["questions/s"], found["ratio"]
    assert f"| {rates['lm-eval, one pass']:,.0f} | 1.00 |" in page
    for who in ("one pass", "N=1", "N=4"):
        assert f"| {rates[f'ours, {who}']:,.0f} | {ratios[f'ours, {who}']:.2f} |" in page
    assert f"{100 * found['same_answers']:.1f} % of the questions" in page


@pytest.mark.parametrize(
    "page", [f"docs/{page}.md" for page in ("results", "performance", "choosing", "prediction", "faq")]
)
def test_measured_figures_are_in_reports(page: str) -> None:
    reports = "".join(report.read_text(encoding="utf-8") for report in REPORTS.glob("*.md"))
    text = re.sub(r"```.*?```|`[^`]*`", "", (ROOT / page).read_text(encoding="utf-8"), flags=re.DOTALL)
    told = set(re.findall(r"(?<![\w.-])\d+\.\d+(?![\w.-]*[a-zA-Z])", text))
    known = set(re.findall(r"\d+\.\d+", reports))
    assert told <= known, told - known
