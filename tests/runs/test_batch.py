"""Files of questions: in order, some at a time, with bad lines among them, interrupted and gone on with."""

from __future__ import annotations

import csv
import gzip
import json
import os
import shutil
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bayeslora import load_run
from bayeslora.errors import InputError
from bayeslora.runs import batch
from bayeslora.runs.answer_file import AnswerFile, read_answers
from bayeslora.runs.trained import TrainedModel
from tasks.cases import write_lines
from train.tiny import bayeslora, finished, model_directory, question

BAD = {
    "no json": "is not valid JSON",
    "[]": "is a JSON list",
    '{"question": "x?"}': "no choices",
    '{"question": "x?", "choices": "ab"}': "choices",
    '{"question": "x?", "choices": ["a", ""]}': "empty choice",
    '{"question": "x?", "choices": ["a", " a"]}': "two choices are equal: 'a'; give each once",
    '{"question": "x?", "choices": ["a"]}': "fewer than 2 choices",
    json.dumps({"question": "x?", "choices": [f"c{k}" for k in range(1000)]}): "more than 26 choices need 'labels'",
    json.dumps({"question": "long " * 2000, "choices": ["a", "b"]}): "tokens",
}


@pytest.fixture(scope="module")
def trained() -> Path:
    return finished()


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


@pytest.mark.parametrize("kind", ["jsonl", "csv"])
def test_fields_have_the_names_of_the_training_data(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str
) -> None:
    run = tmp_path / "run"
    shutil.copytree(trained, run)
    config = json.loads((run / "config.json").read_text())
    config["data"]["columns"] = {"question": "query", "choices": "options", "answer": "key"}
    (run / "config.json").write_text(json.dumps(config))
    asked, file = question(1), tmp_path / f"questions.{kind}"
    if kind == "jsonl":
        rows = [{"query": asked["question"], "options": asked["choices"]}, asked]  # with their names, and with ours
        write_lines(file, rows)
    else:
        with file.open("w", newline="") as opened:
            csv.writer(opened).writerows([("query", "options"), (asked["question"], json.dumps(asked["choices"]))])
    assert bayeslora("predict", run, "--input", file) == 0
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    alone = load_run(trained).ask(asked["question"], asked["choices"])
    for answer in found:
        assert answer["choices"] == asked["choices"]
        assert answer["probabilities"] == pytest.approx(alone.probabilities)


def test_lines_are_answered_in_their_order(trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [question(1), question(2, answer=None), {"question": "Wer?", "choices": ["ich", "dü", "er", "sie"]}]
    file = write_lines(tmp_path / "questions.jsonl", rows)
    assert bayeslora("predict", trained, "--input", file) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["line"] for line in lines] == [1, 2, 3]
    assert [line["id"] for line in lines[:2]] == ["q1", "q2"] and lines[2]["id"]
    assert [line["choices"] for line in lines] == [row["choices"] for row in rows]
    alone = load_run(trained).ask(rows[2]["question"], rows[2]["choices"])
    assert lines[2]["probabilities"] == pytest.approx(alone.probabilities)  # whatever stands beside it
    packed = tmp_path / "packed.jsonl.gz"
    packed.write_bytes(gzip.compress(file.read_bytes()))
    assert bayeslora("predict", trained, "--input", packed, "--output", tmp_path / "out.jsonl") == 0
    assert lines_of(tmp_path / "out.jsonl") == lines


def test_bad_lines_cost_no_other(trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = write_lines(tmp_path / "questions.jsonl", [question(1), *BAD, question(2)])
    assert bayeslora("predict", trained, "--input", file, "--output", tmp_path / "out.jsonl") == 1
    *_, last = capsys.readouterr().err.splitlines()
    assert last == f"bayeslora: {file}: {len(BAD)} of {len(BAD) + 2} lines could not be answered; their answers say why"
    lines = lines_of(tmp_path / "out.jsonl")
    assert [line["line"] for line in lines] == list(range(1, len(BAD) + 3))
    assert "answer" in lines[0] and "answer" in lines[-1]
    for line, reason in zip(lines[1:-1], BAD.values(), strict=True):
        assert line["error"].startswith(f"{file}, line {line['line']}: ") and reason in line["error"]


def test_many_choices_with_labels_are_one_question(trained: Path, tmp_path: Path) -> None:
    many = {"question": "x?", "choices": [f"c{k}" for k in range(40)], "labels": [f"L{k}" for k in range(40)]}
    file = write_lines(tmp_path / "questions.jsonl", [many])
    assert bayeslora("predict", trained, "--input", file, "--output", tmp_path / "out.jsonl", "--quiet") in (0, 1)
    (line,) = lines_of(tmp_path / "out.jsonl")
    assert sum(line["probabilities"]) == pytest.approx(1) if "error" not in line else "tokens" in line["error"]


def test_where_the_answers_are_is_told_to_people_alone(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, out = write_lines(tmp_path / "questions.jsonl", [question(1), question(2)]), tmp_path / "out.jsonl"
    for option, said in (("--force", f"2 answers: {out}\n"), ("--json", ""), ("--quiet", "")):
        assert bayeslora("predict", trained, "--input", file, "--output", out, "--force", option) == 0
        assert capsys.readouterr().out == said


def test_a_long_question_is_answered_as_it_is_alone(trained: Path, tmp_path: Path) -> None:
    """It has no passage to truncate, and fits the model's context."""
    run = load_run(trained)
    short = replace(run, config=replace(run.config, data=replace(run.config.data, max_tokens=48)))
    long = {"question": f"Is it {'very ' * 30}even?", "choices": ["yes", "no"]}
    (answer,) = batch.answer_file(short, write_lines(tmp_path / "questions.jsonl", [long]), 0.9)
    assert answer["probabilities"] == pytest.approx(short.ask(**long).probabilities)


def test_few_lines_are_in_memory_at_a_time(trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = write_lines(tmp_path / "questions.jsonl", [question(k) for k in range(7)])
    asked: list[int] = []
    predict = TrainedModel.predict
    monkeypatch.setattr(batch, "CHUNK", 3)
    monkeypatch.setattr(TrainedModel, "predict", lambda self, items: asked.append(len(items)) or predict(self, items))
    answers = batch.answer_file(load_run(trained), file, 0.9)
    next(answers)
    assert asked == [3]
    assert len(list(answers)) == 6 and asked == [3, 3, 1]


def test_a_run_that_cannot_be_loaded_leaves_no_file_behind(trained: Path, tmp_path: Path) -> None:
    broken = shutil.copytree(trained, tmp_path / "run")
    (broken / "adapter" / "adapter_model.safetensors").write_bytes(b"damaged")
    file = write_lines(tmp_path / "questions.jsonl", [question(1)])
    assert bayeslora("predict", broken, "--input", file, "--output", tmp_path / "out.jsonl") == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["questions.jsonl", "run"]


def test_rows_of_a_table_are_named_by_their_place_in_the_file(trained: Path, tmp_path: Path) -> None:
    text = 'question,choices\n"Is it\neven?","[""yes"", ""no""]"\nx?,"[""a""]"\n'
    (tmp_path / "questions.csv").write_text(text, encoding="utf-8")
    assert bayeslora("predict", trained, "--input", tmp_path / "questions.csv", "--output", tmp_path / "out.jsonl") == 1
    good, bad = lines_of(tmp_path / "out.jsonl")
    assert (good["line"], bad["line"]) == (3, 4)
    assert bad["error"].startswith(
        f"{tmp_path}/questions.csv, line 4: the question cannot be used: fewer than 2 choices"
    )


def test_it_goes_on_where_it_was_interrupted(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write_lines(tmp_path / "questions.jsonl", [question(1), "no json", *(question(k) for k in range(2, 8))])
    words = ("predict", trained, "--input", file, "--quiet", "--output")
    monkeypatch.setattr(batch, "CHUNK", 2)
    assert bayeslora(*words, tmp_path / "whole.jsonl") == 1
    predict, asked = TrainedModel.predict, []

    def dying(self: TrainedModel, items: Any) -> Any:
        asked.append(len(items))
        if len(asked) == 3:
            raise OSError("power failure")
        return predict(self, items)

    monkeypatch.setattr(TrainedModel, "predict", dying)
    out = tmp_path / "out.jsonl"
    assert bayeslora(*words, out) == 1 and not out.exists()
    partial = tmp_path / "out.jsonl.partial"
    assert len(lines_of(partial)) == 4
    with partial.open("a") as torn:
        torn.write('{"line": 5, "id": "q')
    assert bayeslora(*words, out, "--samples", "1") == 2
    assert "holds answers made with other settings; remove it, or use --force" in capsys.readouterr().err
    for other in (("--model", model_directory()), ("--raw",)):
        assert bayeslora(*words, out, *other) == 2 and "made with other settings" in capsys.readouterr().err
    calibration, times = trained / "adapter" / "calibration.json", (file.stat().st_atime_ns, file.stat().st_mtime_ns)
    calibration.write_text('{"temperature": 2.0}')
    assert bayeslora(*words, out) == 2 and "made with other settings" in capsys.readouterr().err
    calibration.unlink()
    os.utime(file)
    assert bayeslora(*words, out) == 2 and "made with other settings" in capsys.readouterr().err
    os.utime(file, ns=times)
    asked.extend([0, 0, 0])
    assert bayeslora(*words, out) == 1  # a line failed, in the first part
    assert out.read_bytes() == (tmp_path / "whole.jsonl").read_bytes()
    assert sorted(path.name for path in tmp_path.glob("out*")) == ["out.jsonl"]
    assert bayeslora(*words, out) == 2 and "exists already" in capsys.readouterr().err
    assert bayeslora(*words, out, "--force") == 1


@pytest.mark.parametrize("skip", [0, 1, 2, 3, 6, 7])
def test_lines_that_are_answered_together_are_so_again(
    skip: int, trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A GPU answers several chunks at once, and may be interrupted between them."""
    file = write_lines(tmp_path / "questions.jsonl", [question(k) for k in range(7)])
    run, predict, asked = load_run(trained), TrainedModel.predict, []
    monkeypatch.setattr(batch, "CHUNK", 3)
    whole = list(batch.answer_file(run, file, 0.9))
    monkeypatch.setattr(
        TrainedModel, "predict", lambda self, items: asked.append([it.id for it in items]) or predict(self, items)
    )
    assert list(batch.answer_file(run, file, 0.9, skip=skip)) == whole[skip:]
    groups = [["q0", "q1", "q2"], ["q3", "q4", "q5"], ["q6"]]
    assert asked == groups[skip // 3 :]


def test_progress_is_that_of_the_whole_file(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write_lines(tmp_path / "questions.jsonl", [question(k) for k in range(8)])
    monkeypatch.setattr(batch, "CHUNK", 1)
    assert bayeslora("predict", trained, "--input", file, "--output", tmp_path / "out.jsonl") == 0
    assert capsys.readouterr().err.splitlines() == [f"predicting: {percent} %" for percent in (0, 25, 50, 75, 100)]


@pytest.mark.parametrize("content", ["", "\n\n"])
def test_a_file_without_questions(
    content: str, trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, out = tmp_path / "questions.jsonl", tmp_path / "out.jsonl"
    file.write_text(content)
    assert bayeslora("predict", trained, "--input", file) == 2
    assert "holds no questions" in capsys.readouterr().err
    assert bayeslora("predict", trained, "--input", file, "--output", out) == 2
    assert "holds no questions" in capsys.readouterr().err and not list(tmp_path.glob("out*"))
    out.write_text("earlier answers")
    assert bayeslora("predict", trained, "--input", file, "--output", out, "--force") == 2
    assert out.read_text() == "earlier answers" and len(list(tmp_path.glob("out*"))) == 1


@pytest.mark.parametrize("name, reason", [(".", "is a directory"), ("questions.jsonl", "is the file of questions")])
def test_answers_need_a_file_of_their_own(
    name: str, reason: str, trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Told before anything is answered, also with ``--force``."""
    file = write_lines(tmp_path / "questions.jsonl", [question(1)])
    before = file.read_bytes()
    assert bayeslora("predict", trained, "--input", file, "--output", tmp_path / name, "--force") == 2
    assert f"{tmp_path / name}: {reason}" in capsys.readouterr().err
    assert file.read_bytes() == before and [path.name for path in tmp_path.iterdir()] == ["questions.jsonl"]


@pytest.mark.parametrize("damage", [b"\0\0\n", b"5\n", b"\xff\n", b"[" * 100_000 + b"\n"])
def test_a_damaged_file_of_answers_is_not_gone_on_with(damage: bytes, tmp_path: Path) -> None:
    path = tmp_path / "answers.jsonl"
    with suppress(KeyboardInterrupt), AnswerFile(path, {}, force=False) as out:
        out.write({"answer": 1})
        raise KeyboardInterrupt
    partial = tmp_path / "answers.jsonl.partial"
    partial.write_bytes(partial.read_bytes() + damage)
    with pytest.raises(InputError, match=r"answers\.jsonl\.partial: is damaged; remove it, or use --force"):
        AnswerFile(path, {}, force=False).__enter__()
    with AnswerFile(path, {}, force=True) as out:
        assert out.done == 0


@pytest.mark.parametrize(("chunk", "kept"), [(1, 5), (2, 4), (3, 3), (6, 0)])
def test_of_a_group_that_was_computed_together_all_answers_are_kept_or_none(
    chunk: int, kept: int, tmp_path: Path
) -> None:
    """The line that was being written when the process ended is lost in any case."""
    path = tmp_path / "answers.jsonl"
    with suppress(KeyboardInterrupt), AnswerFile(path, {}, chunk=chunk, force=False) as out:
        for number in range(5):
            out.write({"answer": number} if number else {"error": "no answer"})
        out._file.write(b'{"ans')
        raise KeyboardInterrupt
    with AnswerFile(path, {}, chunk=chunk, force=False) as out:
        assert (out.done, out.failed) == (kept, min(kept, 1))
        for number in range(out.done, 6):
            out.write({"answer": number} if number else {"error": "no answer"})
    assert [answer.get("answer") for answer in read_answers(path)] == [None, 1, 2, 3, 4, 5]


def test_answers_may_hold_separators_of_lines(tmp_path: Path) -> None:
    """A text may hold what Unicode takes for the end of a line; JSON escapes the line feed alone."""
    path, answers = tmp_path / "answers.jsonl", [{"answer": f"a{end}b"} for end in "\u2028\u2029\x85\x0b\x1c\r\n"]
    with AnswerFile(path, {}, force=False) as out:
        for answer in answers:
            out.write(answer)
    assert read_answers(path) == answers
