"""Comparisons on text and problems: the table against the files of the runs, the reference of every seed, bad input."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bayeslora.errors import InputError
from bayeslora.methods import METHODS
from bayeslora.predict.tokens.predictor import read_token_predictions
from bayeslora.studies.compare import compare
from bayeslora.studies.comparison import OWN, Comparison
from bayeslora.studies.execution import Execution
from bayeslora.studies.plan import plan, run_path
from bayeslora.studies.search import searched_pairs
from bayeslora.train import AdapterConfig, DataConfig, PredictionConfig, TrainingConfig
from tasks.cases import write_lines
from train.tiny import model_directory, read_json, task_directory

METHOD_NAMES = ("zero-shot", "lora", "temperature", "bbb")


def study(**changes: Any) -> Comparison:
    settings: dict[str, Any] = {
        "model": model_directory(),
        "methods": METHOD_NAMES,
        "seeds": (0, 1),
        "data": DataConfig(max_tokens=48),
        "adapter": AdapterConfig(rank=2, targets=("q_proj",)),
        "training": TrainingConfig(epochs=1, batch_size=6),
        "prediction": PredictionConfig(samples=2, max_new_tokens=3),
    }
    return Comparison(**(settings | changes))


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A text, and problems."""
    folder = tmp_path_factory.mktemp("place")
    for split, lines in (("train", 12), ("validation", 6), ("test", 6)):
        (folder / "text").mkdir(exist_ok=True)
        (folder / "text" / f"{split}.txt").write_text("".join(f"{split} {k} and {k * k} .\n" for k in range(lines)))
    for split, count in (("train", 10), ("test", 3)):
        rows = [{"id": f"{split}-{k}", "problem": f"{k}?", "solution": rf"$\boxed{{{k}}}$"} for k in range(count)]
        write_lines(folder / f"math/{split}.jsonl", rows)
    return folder


@pytest.fixture(scope="module")
def done(place: Path) -> Path:
    """A comparison on text, with a shift to problems; not to be changed."""
    compare(study(tasks=(str(place / "text"),), shift=("math",)), place / "out", Execution(data_dir=place))
    return place / "out"


def test_the_table_is_made_of_the_files_of_the_runs(done: Path, place: Path) -> None:
    sections = read_json(done / "table.json")["sections"]
    assert list(sections) == ["text, validation", "text, test", "text → math"]
    for split in ("validation", "test"):
        assert list(sections[f"text, {split}"]) == list(METHOD_NAMES)
        for method, row in sections[f"text, {split}"].items():
            for run in row["runs"]:
                path, lora = (
                    run_path(done, str(place / "text"), name, OWN, run["seed"]) / f"tokens-{split}.safetensors"
                    for name in (method, "lora")
                )
                kept, reference = read_token_predictions(path), read_token_predictions(lora)
                some = kept.scores.subset(reference.uncertain)
                assert run["metrics"]["nll"] == pytest.approx(kept.scores.nll)
                assert run["metrics"]["uncertain_nll"] == pytest.approx(some.nll)
                assert run["metrics"]["uncertain_ece"] == pytest.approx(some.ece())
    values = [run["metrics"]["brier"] for run in sections["text, test"]["bbb"]["runs"]]
    text = (done / "table.md").read_text(encoding="utf-8")
    assert "†" not in text
    assert f"{np.mean(values):.3f} ± {np.std(values, ddof=1):.3f}" in text
    assert "the uncertain tokens are the 5% with the highest entropy under the lora run of the seed" in text
    assert r"\begin{tabular}" in (done / "table.tex").read_text(encoding="utf-8")


def test_problems_are_a_section_of_their_own(done: Path) -> None:
    section = read_json(done / "table.json")["sections"]["text → math"]
    for row in section.values():
        for run in row["runs"]:
            assert run["metrics"]["acc"] == 0.0 and run["metrics"]["cot_nll"] > 0
    assert "| method | ACC ↑ | CoT-NLL ↓ | CoT-ECE ↓ |" in (done / "table.md").read_text(encoding="utf-8")


def test_a_second_call_makes_no_run_anew(done: Path, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bayeslora.studies.worker.train", None)
    before = read_json(done / "table.json")["sections"]
    again = compare(study(tasks=(str(place / "text"),), shift=("math",)), done, Execution(data_dir=place))
    assert read_json(done / "table.json")["sections"] == before and not again.failures


def test_without_a_lora_uncertain_tokens_are_a_gap(place: Path, tmp_path: Path) -> None:
    compared = compare(study(tasks=(str(place / "text"),), methods=("zero-shot",), seeds=(0,)), tmp_path / "out")
    row = compared.sections["text, test"]["zero-shot"]
    assert "nll" in row and "uncertain_nll" not in row and "—" in compared.text


def test_methods_that_need_options_are_left_out_of_all_and_refused_by_name(place: Path, tmp_path: Path) -> None:
    text = str(place / "text")
    everything = study(tasks=(text,), methods=("all",)).method_names
    assert set(METHODS) - set(everything) == {"tfb", "laplace", "laplace-last-layer"}
    assert study(tasks=(task_directory(),), methods=("all",)).method_names == tuple(METHODS)
    with pytest.raises(InputError, match=r"method 'tfb' is made from questions with options, and task 'text' has none"):
        compare(study(tasks=(text,), methods=("lora", "tfb")), tmp_path / "out")


def test_zero_shot_stands_on_no_lora() -> None:
    only = study(tasks=("math",), methods=("zero-shot",), rate_factors=(0.5, 2.0))
    assert searched_pairs(only) == []
    assert [job.config.method for job in plan(only, Path("out"), {})] == ["zero-shot"] * 2
