"""Scripts that read the records of studies: bad input is one line and exit status 2."""

from __future__ import annotations

import importlib
import json
import runpy
import sys
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parent.parent / "benchmarks"
RECORDS = SCRIPTS / "results/table"


def ends_with(script: str, *given: object) -> int | str | None:
    """The exit status of a script."""
    path = SCRIPTS / f"{script}.py"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", [str(path), *map(str, given)])
        patch.syspath_prepend(path.parent)
        with pytest.raises(SystemExit) as end:
            runpy.run_path(str(path), run_name="__main__")
    return end.value.code


@pytest.mark.parametrize("script", ["across", "sections"])
@pytest.mark.parametrize(
    ("given", "told"),
    [
        (["openbookqa.json", "--section", "openbokqa"], "did you mean 'openbookqa'?"),
        (["openbookqa.json", "openbookqa-1280.json"], "has seeds that a record before it has"),
        (["nowhere.json"], "no such file"),
        (["histories.json"], "is not as bayeslora wrote it"),
    ],
    ids=["unknown task", "a seed twice", "no file", "another file"],
)
def test_records_that_cannot_be_shown(
    script: str, given: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [RECORDS / word if word.endswith(".json") else word for word in given]
    assert ends_with(script, *words) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"{script}.py: ") and told in line


def test_records_with_different_seeds_are_put_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A method that only one of them has keeps its own seeds, and the best is tied where it is in both."""
    monkeypatch.syspath_prepend(SCRIPTS)
    whole = json.loads((RECORDS / "openbookqa.json").read_text(encoding="utf-8"))
    paths = []
    for seeds in ({0, 2}, {1}):
        part = json.loads(json.dumps(whole))
        for method, row in part["sections"]["openbookqa"].items():
            row["runs"] = [run for run in row["runs"] if run["seed"] in seeds]
            row["ties_best"] = {"nll": method == "lora", "acc": 1 in seeds}
        if 1 in seeds:
            del part["sections"]["openbookqa"]["blob"]
        paths.append(tmp_path / f"{len(seeds)}.json")
        paths[-1].write_text(json.dumps(part), encoding="utf-8")
    found = importlib.import_module("records").read_sections(paths)["openbookqa"]
    assert list(found) == list(whole["sections"]["openbookqa"])
    assert [run["seed"] for run in found["lora"]["runs"]] == [0, 2, 1]
    assert [run["seed"] for run in found["blob"]["runs"]] == [0, 2]
    assert found["lora"]["ties_best"] == {"nll": True, "acc": False}


@pytest.mark.parametrize(
    ("task", "told"),
    [("mmlu-law", "no learning rate was chosen for lora on mmlu-law"), ("openbookqa", "is not complete")],
)
def test_studies_without_the_runs_that_are_asked_for(
    task: str, told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record = json.loads((RECORDS / "openbookqa.json").read_text(encoding="utf-8"))
    (tmp_path / "table.json").write_text(json.dumps(record), encoding="utf-8")
    assert ends_with("selective", tmp_path, "--task", task, "--out", tmp_path / "result.json") == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert told in line and not (tmp_path / "result.json").exists()


def write_study(folder: Path, rates: list[str]) -> dict[str, list[dict[str, float]]]:
    """A study with a run of LoRA on OpenBookQA at each of the rates, whose histories are those of a record; their NLLs."""
    record = json.loads((RECORDS / "openbookqa.json").read_text(encoding="utf-8"))
    folder.mkdir()
    told = {}
    for rate, run in zip(rates, record["sections"]["openbookqa"]["lora"]["runs"], strict=False):
        place = folder / f"runs/openbookqa/lora/rate-{rate}/seed-0"
        place.mkdir(parents=True)
        (place / "result.json").write_text(json.dumps({"history": run["history"]}), encoding="utf-8")
        told[f"openbookqa/lora/rate-{rate}/seed-0"] = [
            {"train_nll": it["train_nll"], "validation_nll": it["validation"]["nll"]} for it in run["history"]
        ]
    (folder / "table.json").write_text(json.dumps(record), encoding="utf-8")
    return told


def test_histories_are_those_of_the_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told, out = write_study(tmp_path / "study", ["2", "0.5", "10"]), tmp_path / "histories.json"
    monkeypatch.setattr(sys, "argv", ["histories.py", str(tmp_path / "study"), "--methods", "lora", "--out", str(out)])
    monkeypatch.syspath_prepend(SCRIPTS)
    runpy.run_path(str(SCRIPTS / "histories.py"), run_name="__main__")
    runs = json.loads(out.read_text(encoding="utf-8"))["runs"]
    assert [name.split("/")[2] for name in runs] == ["rate-0.5", "rate-2", "rate-10"]
    for name, epochs in runs.items():
        assert [it.pop("epoch") for it in epochs] == list(range(1, len(epochs) + 1))
        assert epochs == [pytest.approx(it, abs=5e-5) for it in told[name]]


def test_histories_that_cannot_be_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    study, out = tmp_path / "study", tmp_path / "histories.json"
    write_study(study, ["1"])
    rest = ["--out", out, "--methods"]
    cases = {
        "has openbookqa/lora/rate-1/seed-0": [study, study, *rest, "lora"],
        "no runs of blob with seed 0": [study, *rest, "blob"],
        "no such file": [tmp_path / "nowhere", *rest, "lora"],
    }
    for told, given in cases.items():
        assert ends_with("histories", *given) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert told in line and not out.exists()


def test_a_task_of_two_studies_gets_no_temperature(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    study, out = tmp_path / "study", tmp_path / "tempered.json"
    write_study(study, [])
    assert ends_with("tempered", study, study, "--out", out) == 2
    assert "has openbookqa, as has a study before it" in capsys.readouterr().err and not out.exists()


def test_tables_of_some_seeds_have_their_runs_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(SCRIPTS)
    runs = [{"seed": 0, "metrics": {"nll": 1.0}}, {"seed": 1, "metrics": {"nll": 3.0}}]
    given = {"task": {"both": {"runs": runs, "ties_best": {"nll": True}}, "one": {"runs": runs[1:]}}}
    assert importlib.import_module("across").of_seeds(given, [0]) == {"task": {"both": {"runs": runs[:1]}}}


def test_means_of_tasks_with_more_seeds_than_others_have(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(SCRIPTS)
    across = importlib.import_module("across")

    def runs(*values: float) -> dict[str, object]:
        return {"runs": [{"seed": seed, "metrics": {"nll": value}} for seed, value in enumerate(values)]}

    two, one = {"lora": runs(1.0, 2.0), "blob": runs(1.0, 1.2)}, {"lora": runs(3.0), "blob": runs(4.0)}
    columns = [across.KNOWN["nll"]]
    cells = {line.split(" | ")[0]: line for line in across.mean_table({"a": two, "b": one}, columns).splitlines()}
    assert "2.250" in cells["| lora"] and "2.550" in cells["| blob"] and "±" not in "".join(cells.values())
    assert "1.500 ± 0.707" in across.mean_table({"a": two}, columns)
    plain = across.mean_table({"a": two}, columns, deviations=False)
    assert "1.500" in plain and "±" not in plain
    turned = {name: {"runs": record["runs"][::-1]} for name, record in two.items()}
    assert "1.500 ± 0.707" in across.mean_table({"a": two, "b": turned}, columns), "seeds are paired by their numbers"
    later = {name: {"runs": [{**run, "seed": run["seed"] + 1} for run in it["runs"]]} for name, it in two.items()}
    assert "1.500" in (other := across.mean_table({"a": two, "b": later}, columns)) and "±" not in other


def test_seeds_that_are_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert ends_with("across", SCRIPTS / "results/main/five-tasks/seeds-0-1.json", "--seeds", "7") == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("across.py: ") and "has one of the seeds [7]; there are [0, 1]" in line


@pytest.mark.parametrize(("calls", "told"), [("0", "calls is 0"), ("1", "failed: no message")])
def test_start_times_of_what_cannot_be_started(
    calls: str, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "executable", "false")  # every process fails at once
    assert ends_with("start_time", tmp_path / "nowhere", "--calls", calls, "--out", tmp_path / "out.json") == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("start_time.py: ") and told in line
    assert not (tmp_path / "out.json").exists()
