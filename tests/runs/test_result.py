"""The result of a run as an object and as a file."""

import json
from pathlib import Path

import pytest

from bayeslora.errors import InputError
from bayeslora.runs.directory import RunDirectory
from bayeslora.runs.result import RunResult


def result(**changes):
    return RunResult(**{"config": {"method": "lora"}, "metrics": {"nll": 0.5}, "seed": 3, **changes})


def test_it_is_a_mapping_with_the_entries_that_it_has():
    made = result(found={"temperature": 2.0})
    assert made["metrics"] is made.metrics and made["found"]["temperature"] == 2.0
    assert "history" not in made and made.get("history", "none") == "none" and len(made) == len(list(made))
    with pytest.raises(KeyError):
        made["nothing"]


def test_a_file_gives_the_same_result_in_the_same_order(tmp_path):
    made = result(history=[{"train_nll": 1.0}], stopped_early=False, intervals={"nll": {"low": 0.4, "high": 0.6}})
    place = RunDirectory(tmp_path)
    made.write(place.result)
    saved = json.loads(place.result.read_text(encoding="utf-8"))
    assert list(saved) == list(made) and saved == made == place.read_result()
    assert saved["schema"] == 1 and saved["stopped_early"] is False


def test_a_later_schema_is_refused():
    with pytest.raises(InputError, match=r"was written by a later version \(schema 2\)"):
        RunResult.read({**result(), "schema": 2}, Path("result.json"))


def test_entries_that_are_unknown_are_ignored():
    assert RunResult.read({**result(), "later": 1}, Path("result.json")) == result()


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"metrics": {}}, "it lacks 'config'"),
        ({"config": {}}, "it lacks 'metrics'"),
        ({"config": {}, "metrics": 3}, "metrics is 3"),
        ({"config": {}, "metrics": {}, "history": {}}, "history is {}"),
        ({"config": {}, "metrics": {}, "seed": "one"}, "seed is 'one'"),
        ({"config": {}, "metrics": {}, "split": None}, "split is None"),
    ],
)
def test_a_damaged_file_is_named_with_what_is_wrong(values, message):
    with pytest.raises(InputError, match=r"run/result\.json: is not as bayeslora wrote it") as caught:
        RunResult.read(values, Path("run/result.json"))
    assert message in str(caught.value)


def test_it_shows_its_main_figures_on_one_line():
    config = {"method": "lora", "task": "urns"}
    made = result(config=config, metrics={"nll": 0.5, "acc": 0.75, "mce": 0.2}, calibrated={"metrics": {"nll": 0.45}})
    assert repr(made) == "RunResult(lora on urns, seed 3, test split: acc 0.750, nll 0.500; calibrated: nll 0.450)"


def test_its_metrics_are_a_table():
    made = result(metrics={"acc": 0.75, "mce": 0.2}, intervals={"acc": {"low": 0.7, "high": 0.8}})
    frame = made.to_pandas()
    assert frame.loc["acc"].tolist() == [0.75, 0.7, 0.8] and frame.loc["mce", "value"] == 0.2
    assert frame.loc["mce", ["low", "high"]].isna().all() and "calibrated" not in frame
    after = result(metrics={"acc": 0.75}, calibrated={"metrics": {"acc": 0.8}}).to_pandas()
    assert after.loc["acc", "calibrated"] == 0.8
