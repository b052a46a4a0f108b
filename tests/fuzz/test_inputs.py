"""Settings, command lines, rows of questions and files of JSON lines that nobody would write: answered, or one clear line."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bayeslora.cli import VERBS
from bayeslora.runs.config import RunConfig
from bayeslora.runs.saved_config import flatten, to_dict
from fuzz.outcomes import fuzzed, names, require_clear, run
from fuzz.test_adapters import json_values
from train.tiny import bayeslora, model_directory, options, question, task_directory, write_task

pytestmark = pytest.mark.system

SETTINGS = sorted(flatten(to_dict(RunConfig(model="", task=""))))
words = (
    st.text(max_size=10)
    | st.integers().map(str)
    | st.floats().map(str)
    | st.sampled_from(["--out", "--help", "-", "--"])
)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("trained") / "run"
    assert bayeslora(*options(out)) == 0
    return out


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("place")


@fuzzed
@given(changes=st.dictionaries(st.sampled_from(SETTINGS) | st.text(max_size=8), json_values, max_size=3))
def test_settings_of_a_run(place: Path, changes: dict[str, object]) -> None:
    """A file of settings for ``train``; nothing is trained, but everything is checked (``--dry-run``)."""
    file = place / "settings.json"
    content = {"model": model_directory(), "task": task_directory(), "rank": 2, "epochs": 1} | changes
    file.write_text(json.dumps(content), encoding="utf-8")
    before = names(place)
    require_clear(*run("train", "--config", file, "--out", place / "run", "--dry-run", "--device", "cpu", "--quiet"))
    assert names(place) == before


@fuzzed
@given(verb=st.sampled_from([*VERBS, "nonsense"]), data=st.data())
def test_command_lines(place: Path, verb: str, data: st.DataObject) -> None:
    """Options and values at random. Verbs that would start long work with no options at all are not given none."""
    options = [f"--{field.name.replace('_', '-')}" for field in fields(VERBS[verb])] if verb in VERBS else ["--x"]
    given_words = data.draw(st.lists(st.sampled_from(options) | words, min_size=1, max_size=5))
    if verb in ("quickstart", "bench", "serve"):
        given_words.append("--no-such-option")
    out, err = run_or_help(verb, *given_words)
    require_clear(out, err)


def run_or_help(*words: str) -> tuple[int, str]:
    try:
        return run(*words)
    except SystemExit as end:  # --help
        return int(end.code or 0), ""


row = st.fixed_dictionaries(
    {},
    optional={
        "id": json_values,
        "question": st.text(max_size=40) | json_values,
        "choices": st.lists(st.text(max_size=12) | json_values, max_size=5) | json_values,
        "answer": st.integers(-2, 6) | st.text(max_size=12) | json_values,
        "passage": st.text(max_size=20) | json_values,
        "bare": json_values,
        "probabilities": st.lists(st.floats(), max_size=4) | json_values,
    },
)
line = row.map(json.dumps) | st.text(max_size=30) | json_values.map(json.dumps)


@fuzzed
@given(lines=st.lists(line | st.just(json.dumps(question(3))), max_size=6), end=st.sampled_from(["\n", "\r\n", ""]))
def test_questions_to_answer(trained: Path, place: Path, lines: list[str], end: str) -> None:
    file = place / "questions.jsonl"
    file.write_bytes((end or "\n").join(lines).encode("utf-8", "surrogatepass") + end.encode())
    (place / "answers.jsonl").unlink(missing_ok=True)
    require_clear(*run("predict", trained, "--input", file, "--output", place / "answers.jsonl", "--force", "--quiet"))
    assert names(place) <= {"questions.jsonl", "answers.jsonl", "settings.json", *PARTIAL}


PARTIAL = {"answers.jsonl.partial", "answers.jsonl.partial.json"}


@fuzzed
@given(rows=st.lists(line, min_size=1, max_size=4), split=st.sampled_from(["train", "validation", "test"]))
def test_questions_to_learn(tmp_path_factory: pytest.TempPathFactory, rows: list[str], split: str) -> None:
    """Rows of one split beside good ones of the others, or the rows alone where all are good; checked without training."""
    folder = tmp_path_factory.mktemp("task")
    task = write_task(folder / "task")
    with (task / f"{split}.jsonl").open("a", encoding="utf-8", errors="surrogatepass") as file:
        file.write("\n".join(rows) + "\n")
    words = ["--model", model_directory(), "--task", task, "--rank", "2", "--out", folder / "run", "--dry-run"]
    require_clear(*run("train", *words, "--device", "cpu", "--quiet"))
    assert names(folder) == {"task", *(f"task/{name}.jsonl" for name in ("train", "validation", "test"))}


@fuzzed
@given(rubbish=st.binary(max_size=200))
def test_rubbish_as_questions(trained: Path, place: Path, rubbish: bytes) -> None:
    file = place / "questions.jsonl"
    file.write_bytes(rubbish)
    require_clear(*run("predict", trained, "--input", file, "--output", place / "answers.jsonl", "--force", "--quiet"))
