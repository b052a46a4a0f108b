"""The search for learning rates and epochs: what is tried, what is chosen, and what is told about it."""

from __future__ import annotations

import math
import shutil
from pathlib import Path

import pytest

from bayeslora.atomic_files import write_json
from bayeslora.errors import InputError
from bayeslora.progress import Silent
from bayeslora.studies import worker
from bayeslora.studies.compare import _Comparison, compare
from bayeslora.studies.comparison import Trial
from bayeslora.studies.execution import Execution
from bayeslora.studies.plan import path_below, run_path
from bayeslora.studies.runner import Runner
from bayeslora.studies.search import (
    _validation_nll,
    best_trial,
    next_trial,
    search_jobs,
    searched_pairs,
    trials_of,
)
from studies.test_compare import quick as quick
from studies.test_compare import study
from studies.test_compare import undrawn as undrawn
from tiers import some
from train.tiny import read_json, task_directory

pytestmark = pytest.mark.usefixtures("undrawn")


class Told(Silent):
    def __init__(self):
        self.lines = []

    def say(self, text):
        self.lines.append(text)


def searched(out, monkeypatch, nlls, **changes):
    """A comparison of LoRA whose validation NLLs are these by factor, and what it told; others fail."""
    runs, train = [], worker.train

    def counted(config, path, *args, **kwargs):
        if "search" in path.parts:
            runs.append(float(path.parent.name.removeprefix("rate-")))
            if runs[-1] not in nlls:
                raise ZeroDivisionError("division by zero\nand more")
        return train(config, path, *args, **kwargs)

    def read(path):
        return nlls.get(float(path.parent.name.removeprefix("rate-")), math.inf)

    monkeypatch.setattr(worker, "train", counted)
    monkeypatch.setattr("bayeslora.studies.search._validation_nll", read)
    told = Told()
    compared = compare(
        study(**({"methods": ("lora",), "seeds": (0,), "search_seeds": (0,)} | changes)), out, Execution(report=told)
    )
    return compared, read_json(out / "table.json"), runs, [line for line in told.lines if "validation nll" in line]


def test_lora_is_trained_even_if_only_others_that_stand_on_it_are_shown():
    shown = study(methods=("temperature",), rate_factors=(0.5, 2.0), search_seeds=(0,))
    jobs = search_jobs(shown, Path("out"), dict.fromkeys(searched_pairs(shown), trials_of(shown)))
    found = [(job.config.method, job.config.training.learning_rate) for job in jobs]
    assert found == [("lora", 3.5e-4), ("lora", 1.4e-3)]


def test_a_trial_that_is_known_is_taken_without_a_search(tmp_path, monkeypatch):
    changes = {"rate_factors": (0.5, 2.0), "trials": {"lora": "0.25:3"}}
    _, record, runs, lines = searched(tmp_path, monkeypatch, {}, **changes)
    assert not runs and not lines and not record["rate_search"]
    assert record["chosen_rate_factors"] == {"task/lora": 0.25} and record["chosen_epochs"] == {"task/lora": 3}
    config = read_json(tmp_path / "runs" / "task" / "lora" / "rate-0.25-epochs-3" / "seed-0" / "config.json")
    assert config["training"]["learning_rate"] == 0.25 * 7e-4 and config["training"]["epochs"] == 3


@pytest.mark.parametrize("trial", ["fast", "1:two", "0:1", "1:0", "-1"])
def test_a_trial_that_is_no_trial_is_refused(trial):
    with pytest.raises(InputError, match="trial"):
        study(methods=("lora",), trials={"lora": trial})


def test_a_trial_of_a_method_that_is_not_compared_is_refused():
    with pytest.raises(InputError, match="trials has 'blob', which is none of the methods: temperature"):
        study(methods=("temperature",), trials={"lora": "1", "blob": "1:2"})


@pytest.mark.parametrize(
    ("method", "advice"),
    [
        ("lroa", r"unknown method 'lroa' \(did you mean 'lora'\?\)"),
        ("laplace", "'laplace', .* of its own; leave it out"),
    ],
)
def test_a_trial_that_no_run_would_use_is_refused(method, advice):
    with pytest.raises(InputError, match=advice):
        study(methods=("all",), trials={"lora": "1", method: "1:2"})


def test_every_factor_is_tried_with_every_number_of_epochs_and_seed_without_the_test_split():
    shown = study(methods=("lora",), rate_factors=(0.5, 2.0), search_epochs=(1, 4), search_seeds=(3, 5), seeds=(0,))
    jobs = search_jobs(shown, Path("out"), dict.fromkeys(searched_pairs(shown), trials_of(shown)))
    assert {job.config.report_split for job in jobs} == {"validation"}
    tried = [(it.training.learning_rate, it.training.epochs, it.seed) for it in (job.config for job in jobs)]
    assert tried == [(rate, epochs, seed) for epochs in (1, 4) for rate in (3.5e-4, 1.4e-3) for seed in (3, 5)]
    assert len({job.path for job in jobs}) == len(jobs)
    assert all(job.path.is_relative_to("out/search/task/lora") for job in jobs)


def test_the_mean_over_the_seeds_decides_and_the_chosen_epochs_are_used(tmp_path, monkeypatch):
    nlls = {(1.0, 1): (0.9, 0.5), (1.0, 2): (0.6, 0.7), (3.0, 1): (0.1, math.inf), (3.0, 2): (1.0, 1.0)}
    place = {
        path_below(tmp_path / "study/search", task_directory(), "lora", Trial(*trial), seed): nll
        for trial, both in nlls.items()
        for seed, nll in enumerate(both)
    }
    monkeypatch.setattr("bayeslora.studies.search._validation_nll", place.__getitem__)
    given = study(methods=("lora",), rate_factors=(1.0, 3.0), search_epochs=(1, 2), seeds=(0,))
    compared = compare(given, tmp_path / "study")
    record = read_json(tmp_path / "study" / "table.json")
    assert record["chosen_rate_factors"] == {"task/lora": 1.0} and record["chosen_epochs"] == {"task/lora": 2}
    assert record["rate_search"]["task/lora"] == {
        "1, epochs 1": 0.7,
        "3, epochs 1": None,
        "1, epochs 2": pytest.approx(0.65),
        "3, epochs 2": 1.0,
    }
    path = run_path(tmp_path / "study", task_directory(), "lora", Trial(1.0, 2), 0)
    assert read_json(path / "config.json")["training"]["epochs"] == 2 and (path / "result.json").exists()
    assert "(mean of 2 seeds) among factors of its learning rate: ×1, ×3 with 1, 2 epochs." in compared.text


@pytest.mark.parametrize("methods", [("lora",), ("lora", "bbb")])
def test_the_table_says_what_was_searched_before_and_what_was_searched_now(tmp_path, methods):
    given = study(methods=methods, rate_factors=(1.0, 3.0), seeds=(0,), trials={"lora": "0.5:2"})
    head = _Comparison(given, tmp_path, Runner(Execution()))._head([])
    assert "Searched before: lora ×0.5, epochs 2." in head
    assert ("Chosen for every task and other trained method" in head) == ("bbb" in methods)


def test_the_factor_with_the_least_validation_nll_is_used(tmp_path):
    searching = study(methods=("lora", "temperature"), rate_factors=(1.0, 30.0), seeds=(0,), search_seeds=(0,))
    compare(searching, tmp_path / "study")
    record = read_json(tmp_path / "study" / "table.json")
    chosen, nll = record["chosen_rate_factors"]["task/lora"], {}
    for factor in (1.0, 30.0):
        tried = path_below(tmp_path / "study/search", task_directory(), "lora", Trial(factor), 0)
        result = read_json(tried / "result.json")
        nll[factor] = min(it["validation"]["nll"] for it in result["history"])
    assert chosen == min(nll, key=nll.get)
    assert record["rate_search"] == {"task/lora": {"1": nll[1.0], "30": nll[30.0]}}
    path = run_path(tmp_path / "study", task_directory(), "temperature", Trial(chosen), 0)
    assert read_json(path / "config.json")["training"]["learning_rate"] == pytest.approx(7e-4 * chosen)


@pytest.mark.parametrize(("patience", "nll"), [(2, 0.7), (0, 0.8)], ids=["the best", "the last"])
def test_a_run_is_judged_by_the_state_that_it_has_kept(patience, nll, tmp_path):
    seen = [{"validation": {"nll": it}} for it in (0.9, 0.7, 0.8)]
    write_json(
        tmp_path / "result.json", {"config": {"training": {"patience": patience}}, "metrics": {}, "history": seen}
    )
    assert _validation_nll(tmp_path) == nll
    assert _validation_nll(tmp_path / "nothing") == math.inf


@pytest.mark.parametrize(
    ("nlls", "best", "beyond"),
    [
        ({0.5: 3, 1: 2, 2: 1}, 2, 4),
        ({0.5: 1, 1: 2, 2: 3}, 0.5, 0.25),
        ({0.5: 2, 1: 1, 2: 3}, 1, None),
        ({2: 1, 0.3: 3, 1: 2}, 2, 4),
        ({0.3: 1, 1: 2}, 0.3, 0.09),
        ({0.5: 2, 1: 1, 2: math.inf}, 1, None),
        ({0.5: 1, 1: 1, 2: 1}, 1, None),
        ({1: math.inf, 2: math.inf}, 1, None),
    ],
)
def test_which_factor_is_the_best_and_which_lies_beyond_it(nlls, best, beyond):
    trials = {Trial(factor): nll for factor, nll in nlls.items()}
    assert best_trial(trials) == Trial(best)
    found = next_trial(trials)
    assert (found and found.factor) == (beyond if beyond is None else pytest.approx(beyond))


def test_the_search_goes_on_with_the_epochs_of_the_best():
    """The factor of 4 was tried with other epochs only."""
    tried = {(1.0, 1): 3.0, (2.0, 1): 2.0, (4.0, 1): 4.0, (1.0, 2): 2.0, (2.0, 2): 1.0}
    assert next_trial({Trial(*trial): nll for trial, nll in tried.items()}) == Trial(4.0, 2)


@pytest.mark.parametrize(
    ("nlls", "tried", "chosen", "said"),
    some(
        [
            ({0.5: 3, 1: 2, 2: 1, 4: 0.5, 8: 0.7}, [0.5, 1, 2, 4, 8], 4, "chosen: ×4"),
            (
                {0.5: 3, 1: 2, 2: 1, 4: 0.5, 8: 0.4, 16: 0.3},
                [0.5, 1, 2, 4, 8],
                8,
                "chosen: ×8, the largest factor that was tried",
            ),
            ({0.5: 1, 1: 2, 2: 3, 0.25: 1.5}, [0.5, 1, 2, 0.25], 0.5, "chosen: ×0.5"),
            ({0.5: 2, 1: 1, 2: 3}, [0.5, 1, 2], 1, "chosen: ×1"),
            ({0.5: 3, 1: 2, 2: 1}, [0.5, 1, 2, 4], 2, "chosen: ×2"),
        ],
        lambda case: case[-1] not in ("chosen: ×4", "chosen: ×1", "chosen: ×0.5"),
    ),
    ids=["two steps", "as far as told", "below", "between", "failed"],
)
def test_the_search_goes_on_beyond_an_end(nlls, tried, chosen, said, tmp_path, monkeypatch):
    compared, record, runs, told = searched(
        tmp_path / "study", monkeypatch, nlls, rate_factors=(0.5, 1.0, 2.0), rates_beyond=2
    )
    assert runs == tried and record["chosen_rate_factors"] == {"task/lora": chosen}
    assert record["rate_search"]["task/lora"] == {f"{f:g}": nlls.get(f) for f in sorted(tried)}
    assert len(told) == 1 and told[0].endswith(said)
    assert len(compared.failures) == (4 in runs and 4 not in nlls)


def test_without_being_told_so_the_search_does_not(tmp_path, monkeypatch):
    nlls = {0.5: 3, 1: 2, 2: 1}
    _, record, runs, told = searched(tmp_path / "study", monkeypatch, nlls, rate_factors=(0.5, 1.0, 2.0))
    assert runs == [0.5, 1, 2] and record["chosen_rate_factors"] == {"task/lora": 2}
    assert told == [
        "task/lora: validation nll ×0.5: 3.0000, ×1: 2.0000, ×2: 1.0000; chosen: ×2, the largest factor that was tried"
    ]


def test_a_search_run_that_fails_is_told_and_is_not_chosen(tmp_path, monkeypatch):
    compared, record, _, told = searched(tmp_path / "study", monkeypatch, {30: 1.0}, rate_factors=(1.0, 30.0))
    assert record["chosen_rate_factors"] == {"task/lora": 30.0} and record["rate_search"]["task/lora"]["1"] is None
    assert compared.failures == {"task, lora ×1, seed 0": "ZeroDivisionError: division by zero"}
    assert told == ["task/lora: validation nll ×1: failed, ×30: 1.0000; chosen: ×30"]


def test_without_workers_the_search_is_that_of_the_table(tmp_path, monkeypatch):
    """Of its runs one has failed, and the others were removed."""
    out, train = tmp_path / "study", worker.train

    def failing(config, path, *args, **kwargs):
        return 1 / 0 if "rate-1" in path.parts and "search" in path.parts else train(config, path, *args, **kwargs)

    monkeypatch.setattr(worker, "train", failing)
    given = study(methods=("lora",), rate_factors=(1.0, 30.0), seeds=(0,), search_seeds=(0,))
    sections, record = compare(given, out).sections, read_json(out / "table.json")
    assert record["chosen_rate_factors"] == {"task/lora": 30.0} and record["rate_search"]["task/lora"]["1"] is None
    shutil.rmtree(out / "search")
    assert compare(given, out, Execution(workers=0)).sections == sections
    shown = read_json(out / "table.json")
    assert [shown[name] for name in ("chosen_rate_factors", "rate_search")] == [
        record[name] for name in ("chosen_rate_factors", "rate_search")
    ]


@pytest.mark.parametrize(
    "table",
    [
        None,
        '{"study": {"methods": ["lora"]}}',
        '{"study": {"methods": ["lora"], "search_seeds": [1]}, "rate_search": {"task/lora": {"1": 0.5}}}',
    ],
)
def test_without_workers_nothing_is_shown_before_the_search_is_done(table, tmp_path):
    """Not even what a table says of other seeds."""
    if table is not None:
        (tmp_path / "table.json").write_text(table, encoding="utf-8")
    given = study(methods=("lora",), rate_factors=(1.0, 30.0), seeds=(0,), search_seeds=(0,))
    with pytest.raises(
        InputError, match=r"the search is not done, as it lacks task/lora ×1; .* to choose with --trials"
    ):
        compare(given, tmp_path, Execution(workers=0))
    assert {path.name for path in tmp_path.iterdir()} - {".lock"} == (set() if table is None else {"table.json"})
