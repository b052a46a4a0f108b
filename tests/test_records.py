"""Scripts that read the records of studies: bad input is one line and exit status 2."""

from __future__ import annotations

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
        (["openbookqa.json", "openbookqa-1280.json"], "has openbookqa, as has a record before it"),
        (["nowhere.json"], "no such file"),
        (["histories.json"], "is not as bayeslora wrote it"),
    ],
    ids=["unknown task", "a task twice", "no file", "another file"],
)
def test_records_that_cannot_be_shown(
    script: str, given: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [RECORDS / word if word.endswith(".json") else word for word in given]
    assert ends_with(script, *words) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"{script}.py: ") and told in line


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
