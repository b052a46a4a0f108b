"""Time, memory, and what saving them costs in quality."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import pytest
from documents import read, report, text_of


@pytest.mark.parametrize("model", ["qwen2.5-1.5b", "llama2-7b"])
def test_training_beside_trl(model: str) -> None:
    page = report("performance")
    for row in read(f"trl/{model}.json")["rows"]:
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
    page = report("performance")
    table = page.split("| draws differ in | time, from the table above |")[1].split("\n\n")[0]
    shown = [line.split("|")[column].strip() for line in table.splitlines()[2:]]
    record = read(f"frontier/{task}.json")
    at_mean, *others = (f"{row['validation_nll']:.3f}" for row in record["rows"])
    assert shown == [*others[:4], at_mean, *others[4:]]


@pytest.mark.parametrize("run", ["quickstart", "quickstart-default"])
def test_late_draws_of_the_quickstart(run: str) -> None:
    page = report("draws")
    for row in read(f"frontier/{run}.json")["rows"]:
        figures = [f"{row[name]:.3f}" for name in ("validation_nll", "nll", "ece", "epistemic")]
        assert " | ".join((f"{row['scale']:g}", *figures, f"{row['cost']:.2f}")) in page


def test_pairs_of_draws_and_draws_of_the_linearised_model() -> None:
    page = report("draws")
    draws, line, default = (
        read(f"draws/{name}.json")["rows"] for name in ("quickstart", "linearised", "linearised-default")
    )
    for count in (2, 4, 8):
        errors = [f"{row['rmse']:.3f}" for row in draws if row["samples"] == count]
        assert f"| {count} | {' | '.join(errors)} |" in page
    for row in (*line, *default):
        quality = [f"{row[name]:.3f}" for name in ("nll_sampled", "nll_linearised", "mean_error")]
        times = [f"{row[name]:.1f}" for name in ("time_sampled", "time_linearised")]
        assert f"| {row['draws']} | {' | '.join(quality + times)} |" in page


def test_start_times() -> None:
    page = report("performance").split("## One prediction from the shell")[1]
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
    page = report("performance")
    (line,) = [it for it in page.splitlines() if it.startswith(row)]
    rows = read("bench/llama2-7b-fresh.json")["rows"]
    (ratio,) = [it["ratio"] for it in rows if (it["what"], it["who"]) == (what, "bayesian-lora, N=4")]
    middle, low, high = ratio
    assert f"| {middle:.2f} ({low:.2f} to {high:.2f}) |" in line


def test_eight_bits_and_compiling() -> None:
    page = report("performance")
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


AXES = ("layers", "rank", "rows", "draws", "components")


def test_growth() -> None:
    """Nothing grows faster than with the size itself, and launches do not grow with the layers."""
    page = report("performance").split("## Growth")[1].split("\n## ")[0]
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


@pytest.mark.parametrize("name", ["qwen2.5-1.5b", "smollm2"])
def test_figures_of_a_server_under_load(name: str) -> None:
    page, found = text_of("docs/serving.md"), read(f"serve/{name}-16-clients.json")
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
    page, found = report("lm-eval"), read("harness/arc-easy-1.5b.json")
    rates, ratios = found["questions/s"], found["ratio"]
    assert f"| {rates['lm-eval, one pass']:,.0f} | 1.00 |" in page
    for who in ("one pass", "N=1", "N=4"):
        assert f"| {rates[f'ours, {who}']:,.0f} | {ratios[f'ours, {who}']:.2f} |" in page
    assert f"{100 * found['same_answers']:.1f} % of the questions" in page
