"""Own data: files of all kinds, shapes by their fields, columns, splits, and the hub."""

from __future__ import annotations

import csv
import json
import math
import tracemalloc
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as parquet
import pytest

from bayeslora.tasks import SPLITS, AnswerTask, OwnFormat, Task, find_task, load_task, require_gold
from bayeslora.tasks.answers import answer_f1, as_number, exact_match, same_free_answer
from bayeslora.tasks.conversations import ConversationTask
from bayeslora.tasks.labelled import labelled_item
from bayeslora.tasks.tables import read_table
from bayeslora.tasks.text import DocumentTask
from train.tiny import make_tokenizer

from .cases import failure, own_row, write_lines


def chat(number: int = 0) -> dict[str, Any]:
    said = [("user", f"What is {number}?"), ("assistant", f"A number: {number}.")]
    return {"messages": [{"role": role, "content": content} for role, content in said]}


def labelled(number: int = 0, **changes: Any) -> dict[str, Any]:
    return {"text": f"film {number}", "label": ["good", "bad", "so-so"][number % 3]} | changes


def write_csv(path: Path, rows: list[dict[str, Any]]) -> Path:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(
            {name: json.dumps(value) if isinstance(value, list) else value for name, value in row.items()}
            for row in rows
        )
    return path


def write_any(path: Path, rows: list[dict[str, Any]]) -> Path:
    if path.suffix == ".csv":
        return write_csv(path, rows)
    if path.suffix == ".parquet":
        parquet.write_table(pa.Table.from_pylist(rows), path)
        return path
    return write_lines(path, rows)


# Size -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("divided", [True, False])
@pytest.mark.parametrize(
    "fields",
    [
        ("text",),
        *(pytest.param(it, marks=pytest.mark.system) for it in (("prompt", "completion"), ("question", "answer"))),
    ],
)
def test_training_data_need_not_fit_into_memory(divided: bool, fields: tuple[str, ...], tmp_path: Path) -> None:
    """Four hundred kilobytes of text are read, divided and encoded, and a quarter of that is kept, whatever the shape."""
    rows = [{name: f"{name} {number} " + "word " * (800 // len(fields)) for name in fields} for number in range(100)]
    place = tmp_path / "mine.jsonl"
    if divided:
        place = tmp_path / "mine"
        place.mkdir()
        for split in ("train", "validation"):
            write_lines(place / f"{split}.jsonl", rows[:90] if split == "train" else rows[90:])
    else:
        write_lines(place, rows)
    made = make_tokenizer()
    made("words, so that what the tokenizer keeps is there before")
    tracemalloc.start()
    task = find_task(place)
    count = len(task.load("train"))
    lessons = task.encode_lessons("train", made, 100_000)
    kept, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert count == 90 if divided else 50 < count < 100
    assert sum(map(len, lessons.texts)) > 200 * count
    assert kept < 100_000


# Files ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("suffix", [".jsonl.gz", ".csv", ".parquet"])
@pytest.mark.parametrize("make", [chat, labelled, own_row, lambda k: {"prompt": f'{k}, "and"\n', "completion": " b"}])
def test_the_same_rows_in_every_format_are_the_same_task(suffix: str, make: Any, tmp_path: Path) -> None:
    rows = [make(k) for k in range(20)]
    ours = find_task(write_any(tmp_path / f"mine{suffix}", rows))
    plain = find_task(write_lines(tmp_path / "plain.jsonl", rows))
    assert type(ours) is type(plain)
    for split in ("train", "validation", "test"):
        mine, theirs = list(ours.load(split)), list(plain.load(split))
        assert len(mine) == len(theirs) > 0
        assert {_said(it) for it in mine} == {_said(it) for it in theirs}


def _said(item: Any) -> str:
    return repr({name: getattr(item, name) for name in type(item).__slots__ if name != "id"})


def test_csv_with_quotes_commas_and_line_breaks(tmp_path: Path) -> None:
    path = tmp_path / "mine.csv"
    path.write_text('text,label\n"a, ""b""\nc",good\n\nplain,bad\n', encoding="utf-8")
    assert [(row.values["text"], row.origin) for row in read_table(path)] == [
        ('a, "b"\nc', f"{path}, line 3"),
        ("plain", f"{path}, line 5"),
    ]


def test_cells_of_csv_may_be_long_and_empty(tmp_path: Path) -> None:
    """An empty answer is a missing one under any name of its column; other readers of CSV keep their limit."""
    path, long, limit = tmp_path / "mine.csv", "x" * 200_000, csv.field_size_limit()
    path.write_text(f"question,answer,gold,text\n{long},,,\n", encoding="utf-8")
    assert [row.values for row in read_table(path)] == [{"question": long, "answer": None, "gold": "", "text": ""}]
    (renamed,) = read_table(path, {"answer": "gold"})
    assert renamed.values["gold"] is None and renamed.values["text"] == ""
    assert csv.field_size_limit() == limit


@pytest.mark.parametrize(
    "text, message",
    [
        ("text,label\na,b,c\n", "line 2: has 3 cells under 2 columns"),
        ("text,text\na,b\n", "line 1: a column is named twice"),
        ('text,label\n"a,b\n', "is not valid CSV"),
        ("\n\ntext,label\na\n", "line 4: has 1 cells under 2 columns"),
        ("", "has no rows"),
        ("text,label\n", "has no rows"),
        ("text,label, text \na,b,c\n", "line 1: a column is named twice (text, label, text)"),
        ("text;label\na;b\n", "line 1: the separator is ';'; save the file with commas between the cells"),
        ("text\tlabel\na\tb\n", "line 1: the separator is a tab; save the file with commas between the cells"),
        (
            "text,label\ra,b\r",
            "has a carriage return (CR) outside of quotes, which ends no line; save it with the line ends LF",
        ),
    ],
)
def test_csv_that_cannot_be_read_names_its_line(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "mine.csv"
    path.write_text(text, encoding="utf-8", newline="")
    assert message in (said := failure(lambda: find_task(path))) and str(path) in said


def test_parquet_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "mine.parquet").write_bytes(b"PAR1 and nothing else")
    assert "is not a complete Parquet file" in failure(lambda: find_task(tmp_path / "mine.parquet"))


def test_parquet_without_values_in_python_or_with_a_column_twice(tmp_path: Path) -> None:
    import pyarrow as pa
    from pyarrow import parquet

    path, text = tmp_path / "mine.parquet", pa.array(["a", "b"])
    wrong = {
        "days": pa.array([2**30] * 2, pa.date32()),
        "times": pa.array([0, 1], pa.timestamp("us", tz="No/Where")),
        "bytes": pa.StringArray.from_buffers(2, text.buffers()[1], pa.py_buffer(b"\xff\xfe")),
    }
    for name, column in wrong.items():
        parquet.write_table(pa.table({"text": text, name: column}), path)
        assert f"column '{name}' holds what cannot be read" in failure(lambda: find_task(path))
    parquet.write_table(pa.Table.from_arrays([text] * 2, ["text", "text"]), path)
    assert "a column is named twice (text, text); rename one" in failure(lambda: find_task(path))


def test_csv_may_begin_with_empty_lines(tmp_path: Path) -> None:
    path = tmp_path / "mine.csv"
    path.write_text("\n\r\ntext\n\na\n", encoding="utf-8")
    assert [(row.values, row.origin) for row in read_table(path)] == [({"text": "a"}, f"{path}, line 5")]


# Shapes ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "row, kind",
    [
        (chat(), ConversationTask),
        ({"prompt": "a", "completion": "b"}, ConversationTask),
        ({**chat(), "prompt": "a", "prompt_id": 3}, ConversationTask),
        (own_row(), Task),
        ({"question": "Which?", "choices": ["a", "b"]}, Task),
        (labelled(), Task),
        ({"question": "1+1?", "answer": 2}, AnswerTask),
        ({"text": "All of it.", "url": "here"}, DocumentTask),
    ],
)
def test_shapes_are_known_by_their_fields(row: dict[str, Any], kind: type, tmp_path: Path) -> None:
    assert type(find_task(write_lines(tmp_path / "mine.jsonl", [row]))) is kind


@pytest.mark.parametrize(
    "fields, column, kind, used, left_out",
    [
        (("text", "category"), "category", "running text", "--columns label=category", "--columns label="),
        (("text", "id", "Labels"), "Labels", "running text", "--columns label=Labels", "--columns label="),
        (("text", "my class", "lable"), "lable", "running text", "--columns label=lable", "--columns label="),
        *(
            (
                ("question", name, "answer"),
                name,
                "questions with free answers",
                f"--columns choices={name}",
                "--columns choices=",
            )
            for name in ("options", "choises")
        ),
    ],
)
def test_a_misnamed_column_does_not_make_another_kind_of_task(
    fields: tuple[str, ...], column: str, kind: str, used: str, left_out: str, tmp_path: Path
) -> None:
    path = write_lines(tmp_path / "mine.jsonl", [dict.fromkeys(fields, "x")])
    said = failure(lambda: find_task(path))
    assert said.startswith(f"{path}, line 1: the column {column!r} looks like ") and f"is not used for {kind}; " in said
    assert f" give {used}; to leave it out give {left_out}" in said


def test_a_misnamed_column_does_no_harm_where_it_is_empty_or_the_kind_of_data_is_known(tmp_path: Path) -> None:
    """As of a run that is trained."""
    path = write_lines(tmp_path / "empty.jsonl", [{"question": "x", "answer": "y", "options": None}])
    assert isinstance(find_task(path), AnswerTask)
    path = write_lines(tmp_path / "mine.jsonl", [{"text": "x", "category": "y"}])
    assert isinstance(find_task(path, how=OwnFormat(known=True)), DocumentTask)


def test_what_looks_like_a_label_may_be_left_out_and_other_names_are_kept(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "mine.jsonl", [{"the body": "x", "class": "y"}])
    said = failure(lambda: find_task(path, how=OwnFormat({"text": "the body"})))
    assert "give --columns 'text=the body' label=class; " in said
    assert "to leave it out give --columns 'text=the body' label=" in said
    assert isinstance(find_task(path, how=OwnFormat({"text": "the body", "label": "class"})), Task)
    assert isinstance(find_task(path, how=OwnFormat({"text": "the body", "label": ""})), DocumentTask)
    write_lines(path, [{"text": "x", "label": "y"}])
    assert isinstance(find_task(path, how=OwnFormat({"label": ""})), DocumentTask)


@pytest.mark.parametrize(
    "fields",
    [
        ("messages",),
        ("prompt", "completion"),
        ("question", "choices"),
        ("text", "label"),
        ("question", "answer"),
        ("text",),
    ],
)
def test_other_columns_do_no_harm_and_are_named(fields: tuple[str, ...], tmp_path: Path) -> None:
    others = (
        "source",
        "metadata",
        "explanation",
        "title",
        "level",
        "message",
        "url",
        "language",
        "context",
        "split",
        "score",
    )
    row = dict.fromkeys((*others, "id", *fields), "x")
    task = find_task(write_lines(tmp_path / "mine.jsonl", [row]))
    assert task.description.endswith(f" in {tmp_path}/mine.jsonl; columns not used: {', '.join(others)}")


def test_blanks_around_the_names_of_a_header_mean_nothing(tmp_path: Path) -> None:
    path = tmp_path / "mine.csv"
    path.write_text("text, label\na, b\n", encoding="utf-8")
    task = find_task(path)
    assert isinstance(task, Task) and task.description == f"texts to classify in {path}"


@pytest.mark.parametrize(
    "suffix, advice", [(".tsv", "convert it to CSV with commas"), (".json", "one JSON object per line")]
)
def test_files_that_another_name_does_not_help_are_told_what_does(suffix: str, advice: str, tmp_path: Path) -> None:
    path = tmp_path / f"mine{suffix}"
    path.write_text("x", encoding="utf-8")
    said = failure(lambda: find_task(path))
    assert said.startswith(f"{path}: {suffix} files are not read; ") and advice in said


def test_a_field_is_given_once(tmp_path: Path) -> None:
    path = tmp_path / "mine.jsonl"
    path.write_text('{"text": "a", "label": "x", "label": "y"}\n', encoding="utf-8")
    assert failure(lambda: find_task(path)) == f"{path}, line 1: has the field 'label' twice; keep one of them"
    path.write_text('{"text": "a", "meta": {"x": 1, "x": 2}}\n', encoding="utf-8")  # of a field that is not used
    assert isinstance(find_task(path), DocumentTask)


def test_a_column_may_be_mapped_with_its_blanks(tmp_path: Path) -> None:
    path = tmp_path / "mine.csv"
    path.write_text(" my text, kind\na,b\nc,d\n", encoding="utf-8")
    task = find_task(path, how=OwnFormat({"text": " my text", "label": "kind"}))
    assert isinstance(task, Task) and task.kind == "labels"


def test_fields_that_mean_nothing_are_told_with_what_is_needed(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "mine.jsonl", [{"queston": "1+1?", "target": "2"}])
    said = failure(lambda: find_task(path))
    assert said.startswith(f"{path}, line 1: its fields are queston, target (did you mean 'question'?)")
    assert "prompt and completion" in said and "--columns" in said


def test_columns_have_other_names(tmp_path: Path) -> None:
    rows = [{"query": f"{k}+1?", "target": str(k + 1), "answer": "unused"} for k in range(10)]
    path = write_lines(tmp_path / "mine.jsonl", rows)
    task = find_task(path, how=OwnFormat({"question": "query", "answer": "target"}))
    assert isinstance(task, AnswerTask)
    assert {(it.question, it.answers) for it in task.load("train")} <= {(f"{k}+1?", (str(k + 1),)) for k in range(10)}
    said = failure(lambda: find_task(path, how=OwnFormat({"question": "qery"})))
    assert "has no field 'qery' (did you mean 'query'?); it has query, target, answer; say what its fields are" in said
    assert said.endswith("called with --columns question=NAME")
    write_lines(path, [{"text": "a", "label": "b"}])
    said = failure(lambda: find_task(path, how=OwnFormat({"text": "body", "label": "queue"})))
    assert said.endswith("say what its fields are called with --columns text=text label=label")
    assert "columns names 'qestion' (did you mean 'question'?)" in failure(lambda: OwnFormat({"qestion": "query"}))
    assert "splits names 'dev'" in failure(lambda: OwnFormat(splits={"dev": "x"}))


def test_malformed_rows_are_named_in_evaluation_and_left_out_of_training(tmp_path: Path) -> None:
    bad = {"messages": [{"role": "user", "content": "?"}]}
    whole = write_lines(tmp_path / "mine.jsonl", [chat(0), bad])
    assert failure(lambda: find_task(whole).load("train")) == (
        f"{whole}, line 2: messages have no assistant; correct or remove it"
    )
    write_lines(tmp_path / "parts" / "train.jsonl", [chat(0), bad, chat(0), chat(1)])
    write_any(tmp_path / "parts" / "test.csv", [chat(2)])
    task = find_task(tmp_path / "parts")
    assert len(task.load("train")) == 2 and len(task.load("test")) == 1
    assert task.rows_left_out("train") == {"messages have no assistant": 1, "duplicate": 1}
    assert task.rows_left_out("test") == {}
    assert "has no validation.jsonl" in failure(lambda: task.load("validation"))


# Classification -------------------------------------------------------------------------------------------------------


def test_labels_are_options(tmp_path: Path) -> None:
    task = load_task(write_lines(tmp_path / "mine.jsonl", [labelled(k) for k in range(30)]))
    item = task.train[0]
    assert item.options == (" bad", " good", " so-so") and item.labels == ("A", "B", "C")
    assert item.prompt.head == "Classify the text as one of: bad, good, so-so.\nText:"
    assert item.prompt.tail == "\nLabel:" and item.prompt.passage.startswith(" film ")
    assert item.letter_prompt is not None and "A. bad\nB. good\nC. so-so\nAnswer:" in item.letter_prompt.text
    for it in task.train:
        number = int(it.prompt.passage.rpartition(" ")[2])
        assert it.gold is not None and it.options[it.gold] == f" {labelled(number)['label']}"


def test_numbers_as_labels_are_sorted_by_value(tmp_path: Path) -> None:
    rows = [{"text": f"t{k}", "label": [10, 2, 1][k % 3]} for k in range(30)]
    assert load_task(write_lines(tmp_path / "mine.jsonl", rows)).test[0].options == (" 1", " 2", " 10")
    values = [10, -1, 0.5, -2.5, "nan", "b"]
    rows = [{"text": f"t{k}", "label": values[k % 6]} for k in range(30)]
    expected = (" -2.5", " -1", " 0.5", " 10", " b", " nan")
    assert load_task(write_lines(tmp_path / "mixed.jsonl", rows)).test[0].options == expected


def test_labels_of_a_run_are_the_options_unless_there_are_others(tmp_path: Path) -> None:
    how = OwnFormat(labels=("so-so", "good", "bad"))
    write_lines(tmp_path / "new" / "test.jsonl", [labelled(0, label="good"), labelled(1, label=None)])
    item, unknown = load_task(tmp_path / "new", how=how).test
    assert item.options == (" so-so", " good", " bad") and item.gold == 1 and unknown.gold is None
    write_lines(tmp_path / "other" / "train.jsonl", [labelled(k, label=["good", "new"][k % 2]) for k in range(6)])
    assert load_task(tmp_path / "other", how=how).train[0].options == (" good", " new")


def test_labels_that_look_missing_are_warned_of_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    rows = [labelled(k, label=["good", "bad", "NaN", "N/A", ""][k % 5]) for k in range(50)]
    path = write_csv(tmp_path / "mine.csv", rows)
    task = load_task(path)
    assert all(task.load(split).items for split in SPLITS) and " NaN" in task.test[0].options
    (said,) = caplog.messages
    assert said.startswith(f"{path}: 20 of its labels are NaN or N/A, which becomes a class like any other; ")


def test_many_labels_have_no_letters() -> None:
    item = labelled_item("x", "text", [f"l{k}" for k in range(30)], 3)
    assert item.letter_prompt is None and item.labels[-1] == "29"


def test_labels_that_cannot_be(tmp_path: Path) -> None:
    one = write_lines(tmp_path / "one.jsonl", [labelled(0, label="x")] * 9)
    assert "has 1 label (x); give texts with at least two different labels" in failure(lambda: load_task(one).train)
    write_lines(tmp_path / "parts" / "train.jsonl", [labelled(k) for k in range(6)])
    write_lines(tmp_path / "parts" / "test.jsonl", [labelled(1, label="new")])
    said = failure(lambda: load_task(tmp_path / "parts").test)
    assert "label is not among those of the training data: 'new' of bad, good, so-so" in said
    many = write_lines(tmp_path / "many.jsonl", [labelled(k, label=f"l{k}") for k in range(1001)])
    assert "1001 different labels" in failure(lambda: load_task(many).train)


# Running text ---------------------------------------------------------------------------------------------------------


def test_texts_are_packed_with_the_end_between_them(tmp_path: Path) -> None:
    write_lines(tmp_path / "train.jsonl", [{"text": "one\n two"}, {"text": "three"}])
    task, made = find_task(tmp_path), make_tokenizer()
    blocks = task.encode_lessons("train", made, 8).texts
    ids = [token for block in blocks for token in block.target_ids]
    whole = [token for text in ("one\n two", "three") for token in [*made(text).input_ids, made.eos_token_id]]
    assert ids == whole[1:] and all(len(block) <= 8 for block in blocks) and len(blocks) > 1


# Free answers ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "left, right, same",
    [
        ("The Cat.", "cat", True),
        ("$1,000", "1000", True),
        ("50%", "0.5", True),
        ("2.0", "2", True),
        ("2", "3", False),
        ("two", "2", False),
        ("an apple", "a pear", False),
        ("1e3", "1000", True),
        ("", "the", False),
        ("A", "B", False),
        ("a", "the", False),
        ("vitamin A", "vitamin", False),
        ("vitamin A", "Vitamin a.", True),
        ("C++", "C", False),
        ("C#", "C", False),
        ("-3 degrees", "3 degrees", False),
        ("\u22123 degrees", "-3 degrees", True),
        ("1.5 m", "15 m", False),
        ("1/2 cup", "12 cup", False),
        ("1,000 men", "1000 men", True),
        ("well-known", "wellknown", True),
        ("+", "-", False),
        ("?", "", False),
        ("-$5", "-5", True),
        ("$.50", "0.5", True),
        (".5", "5", False),
        ("7%", "0.07", True),
        ("57.1%", "0.571", True),
        ("it\u2019s", "it's", True),
        ("2,3", "23", False),
        ("3,14", "314", False),
        ("(1,2,3)", "123", False),
        ("1,0000", "10000", False),
        ("12,345,678.9", "12345678.9", True),
        ("10,00,000", "1000000", True),
        ("1,000,000 men", "1000000 men", True),
        ("9449772114007", "9449772114008", False),
        ("12345678901234567890%", "123456789012345678.9", True),
        ("1e400", "2e400", False),
        ("1e-400", "0", False),
        ("0e5", "-0", True),
        (f"1e{10**30}", f"1E{10**30}.", True),
        (f"1e{10**30}", f"2e{10**30}", False),
    ],
)
def test_answers_that_say_the_same(left: str, right: str, same: bool) -> None:
    assert same_free_answer(left, right) is same and same_free_answer(right, left) is same


def test_matches_and_overlap() -> None:
    assert exact_match("Paris!", ["London", "paris"]) and not exact_match("Paris", ["London"])
    assert answer_f1("the red car", ["a red bus"]) == pytest.approx(2 * 1 / 4)
    assert answer_f1("red", ["blue", "red"]) == 1.0 and answer_f1("", ["x"]) == 0.0 and answer_f1("", [""]) == 1.0
    assert as_number("-3.5") == -3.5 and as_number("3 apples") is None and as_number(".") is None


def test_free_answers_are_read_with_all_that_is_accepted(tmp_path: Path) -> None:
    rows = [{"question": f"{k}?", "answer": [str(k), f"+{k}"], "passage": "Here."} for k in range(10)]
    task = find_task(write_lines(tmp_path / "mine.jsonl", rows))
    first = next(iter(task.load("train")))
    assert len(first.answers) == 2 and first.text == f"Here.\n\n{first.question}"
    made = make_tokenizer()
    text = task.encode("test", made, 100)[0]
    asked = task.load("test")[0]
    assert made.decode(text.prompt_ids) == f"Question: Here.\n\n{asked.question}\nAnswer:"
    assert made.decode(text.target_ids) == f" {asked.answers[0]}{made.eos_token}"
    turns = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    made.chat_template = turns + "{% if add_generation_prompt %}<assistant>{% endif %}"
    chatty = task.encode("test", made, 100)[0]
    assert made.decode(chatty.target_ids) == asked.answers[0]
    limited = task.encode_lessons("train", made, len(chatty) - 1)
    assert sum(limited.left_out.values()) + len(limited.texts) == len(task.load("train"))


@pytest.mark.parametrize("empty", ["", " \u200b", [""], None, math.nan])
def test_an_empty_free_answer_is_a_missing_one_in_every_split(empty: Any, tmp_path: Path) -> None:
    made, rows = make_tokenizer(), [{"question": "1?", "answer": ["", "1"]}, {"question": "2?", "answer": empty}]
    for split in ("train", "test"):
        write_lines(tmp_path / f"{split}.jsonl", rows)
    task = find_task(tmp_path)
    for split, encode in (("train", task.encode_lessons), ("test", task.encode)):
        assert failure(lambda split=split, encode=encode: encode(split, made, 99)).startswith(
            f"{tmp_path}/{split}.jsonl, line 2: question "
        )
        assert task.load(split) and next(iter(task.load(split))).answers == ("1",)
    assert task.rows_left_out("train") == {}


def test_what_is_no_label_makes_no_class(tmp_path: Path) -> None:
    rows = [labelled(k) for k in range(9)]
    for wrong in (["good"], {"name": "good"}):
        for split in ("train", "test"):
            write_lines(tmp_path / f"{split}.jsonl", [*rows, labelled(9, label=wrong)])
        task = load_task(tmp_path)
        assert len(task.train) == 9 and task.load("train").counts == {"label is no text or number": 1}
        assert len(task.train[0].options) == 3
        assert failure(lambda task=task: task.test).startswith(
            f"{tmp_path}/test.jsonl, line 10: label is no text or number"
        )
    path = write_lines(tmp_path / "all.jsonl", [labelled(k, label=["good"]) for k in range(9)])
    assert f"has 0 labels ({path}, line 1: label is no text or number: ['good'])" in failure(
        lambda: load_task(path).train
    )
    gap = write_csv(tmp_path / "gap.csv", [labelled(k, label="" if k == 9 else "ab"[k % 2]) for k in range(10)])
    assert sum(item.gold is None for split in SPLITS for item in load_task(gap).load(split)) == 1
    missing = load_task(
        write_lines(tmp_path / "nan.jsonl", [labelled(k, label=math.nan if k == 9 else k % 2) for k in range(10)])
    )
    assert missing.train[0].options == (" 0", " 1")
    items = [item for split in SPLITS for item in missing.load(split)]
    assert "line 10: item " in (said := failure(lambda: require_gold(items))) and "has no answer" in said


def test_rows_that_are_all_left_out_are_told_by_the_reason(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "mine.jsonl", [own_row(k, choices=["yes"], answer=0) for k in range(10)])
    said = failure(lambda: find_task(path).load("train"))
    assert said == (
        f"{path} train: has no questions that can be used (fewer than 2 choices); correct its rows, or give others"
    )


def test_a_text_of_csv_may_look_like_a_list(tmp_path: Path) -> None:
    """Only lists of messages are read as such."""
    said = [{"role": "user", "content": "hi"}]
    path = write_csv(
        tmp_path / "mine.csv", [{"prompt": [3, 1], "completion": "[1, 3]"}, {"prompt": said, "completion": "x"}]
    )
    assert [row.values for row in read_table(path)] == [
        {"prompt": "[3, 1]", "completion": "[1, 3]"},
        {"prompt": said, "completion": "x"},
    ]


def test_a_row_that_cannot_be_used_is_named_by_its_file_and_line(tmp_path: Path) -> None:
    """Also where it is found only when an answer is needed, or when it becomes tokens."""
    made = make_tokenizer()
    rows = {
        "free": [{"question": "1?", "answer": 1}, {"question": "2?", "answer": None}],
        "labels": [{"text": "good", "label": "+"}, {"text": "bad", "label": "-"}, {"text": "so so", "label": None}],
        "chats": [{"messages": [{"role": role, "content": "?"} for role in ("user", "assistant")]}],
    }
    for name, given in rows.items():
        for split in ("train", "test"):
            write_lines(tmp_path / name / f"{split}.jsonl", given)
    free = failure(lambda: find_task(tmp_path / "free").encode("test", made, 99))
    assert free.startswith(f"{tmp_path}/free/test.jsonl, line 2: question ")
    assert "has no answer; training and evaluation need one" in free
    labels = failure(lambda: require_gold(load_task(tmp_path / "labels").test))
    assert labels.startswith(f"{tmp_path}/labels/test.jsonl, line 3: item ")
    assert labels.endswith("add its 'answer' or 'label': 'so so'")
    made.chat_template = "{{ raise_exception('no') }}"
    chats = failure(lambda: find_task(tmp_path / "chats").encode("test", made, 99))
    assert chats.startswith(f"{tmp_path}/chats/test.jsonl, line 1: example ")


def test_items_are_equal_wherever_they_lie(tmp_path: Path) -> None:
    [here], [there] = (
        load_task(write_lines(tmp_path / f"{name}/test.jsonl", [own_row()]).parent).test for name in ("here", "there")
    )
    assert here == there and hash(here) == hash(there) and here.origin != there.origin


# The hub --------------------------------------------------------------------------------------------------------------


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Data sets in place of the hub's, by name and configuration."""
    held: dict[str, Any] = {}

    def load(name: str, config: str | None = None) -> Any:
        if (name, config) not in held:
            raise FileNotFoundError(f"no {name}")
        return datasets.DatasetDict(
            {split: datasets.Dataset.from_list(rows) for split, rows in held[name, config].items()}
        )

    monkeypatch.setattr("datasets.load_dataset", load)
    return held


def test_a_data_set_of_the_hub(hub: dict[str, Any]) -> None:
    hub["org/films", "small"] = {
        "train": [labelled(k) for k in range(20)],
        "validation": [labelled(k) for k in range(30, 36)],
        "test": [labelled(k) for k in range(40, 46)],
    }
    task = load_task("org/films", how=OwnFormat(config="small"))
    assert [len(task.load(split)) for split in ("train", "validation", "test")] == [20, 6, 6]
    assert task.name == "org/films"
    said = failure(lambda: find_task("org/films"))
    assert "cannot be loaded from the hub (no org/films)" in said and "--dataset-config" in said


def test_names_of_classes_are_the_labels(monkeypatch: pytest.MonkeyPatch) -> None:
    features = datasets.Features({"text": datasets.Value("string"), "label": datasets.ClassLabel(names=["neg", "pos"])})
    rows = {"text": [f"t{k}" for k in range(20)], "label": [k % 2 for k in range(20)]}
    table = datasets.Dataset.from_dict(rows, features=features)
    monkeypatch.setattr("datasets.load_dataset", lambda name, config=None: datasets.DatasetDict({"train": table}))
    assert load_task("org/x").test[0].options == (" neg", " pos")


def test_splits_that_a_data_set_lacks(hub: dict[str, Any]) -> None:
    hub["org/one", None] = {"train": [chat(k) for k in range(40)]}
    hub["org/two", None] = {"train_sft": [chat(k) for k in range(40)], "test_sft": [chat(k) for k in range(50, 55)]}
    one = find_task("org/one")
    parts = [{it.turns for it in one.load(split)} for split in ("train", "validation", "test")]
    assert len(set.union(*parts)) == 40 == sum(map(len, parts))
    assert "say which are meant with --dataset-splits, such as train=train_sft" in failure(lambda: find_task("org/two"))
    two = find_task("org/two", how=OwnFormat(splits={"train": "train_sft", "test": "test_sft"}))
    train, validation = ({it.turns for it in two.load(split)} for split in ("train", "validation"))
    assert len(two.load("test")) == 5 and not train & validation and len(train | validation) == 40
    assert 4 <= len(validation) <= 12
    said = failure(lambda: find_task("org/two", how=OwnFormat(splits={"train": "train"})))
    assert said == "there is no split 'train', only train_sft, test_sft; choose one of these"


def test_a_path_that_is_not_there_is_no_name_of_the_hub() -> None:
    assert "no such file or directory" in failure(lambda: find_task("./org/name"))
    assert "no such file or directory" in failure(lambda: find_task("some/where/else"))
    assert "no such file or directory" in failure(lambda: find_task("org/name.jsonl"))
