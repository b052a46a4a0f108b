"""Problems: how they are asked, where their answers stand, and whether two answers are the same."""

from __future__ import annotations

import importlib.util
import itertools
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bayeslora.errors import InputError
from bayeslora.tasks import Problem, ProblemTask, find_task
from bayeslora.tasks.boxed import boxed_answer, same_answer
from bayeslora.tasks.problems import INSTRUCTION, ask, encode_problem
from train.tiny import END, make_tokenizer

from .cases import DATA, needs_data, write_lines

CHAT = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
SUM = Problem("p", "What is $1+1$?", r"It is $\boxed{2}$.", ("2",))


def failure(action: Callable[[], Any]) -> str:
    with pytest.raises(InputError) as caught:
        action()
    assert "\n" not in str(caught.value)
    return str(caught.value)


def tokenizer(chat: str | None = CHAT) -> Any:
    made = make_tokenizer()
    made.chat_template = chat
    return made


# Answers --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text, answer",
    [
        (r"so $\boxed{2}$.", "2"),
        (r"$\boxed{\frac{1}{2}}$", r"\frac{1}{2}"),
        (r"first $\boxed{1}$, then $\fbox{3}$", "3"),
        (r"$\boxed{\{1, 2\}}$", r"\{1, 2\}"),
        (r"$\boxed 7$", "7"),
        (r"$\boxed{x", None),
        (r"$\boxed{4}$ and $\boxed{never closed", "4"),
        ("no box at all", None),
        (r"an empty one: $\boxed{}$", ""),
        (r"\boxed{ \text{(A)} }", r" \text{(A)} "),
    ],
)
def test_the_answer_is_in_the_last_box(text: str, answer: str | None) -> None:
    assert boxed_answer(text) == answer


@pytest.mark.parametrize(
    "accepted, given",
    [
        ("2", "2"),
        (r"\frac{1}{2}", "0.5"),
        (r"\frac12", "1/2"),
        ("x+1", "1 + x"),
        (r"\sqrt{8}", r"2\sqrt2"),
        ("25", "025"),
        ("(1,2)", "(1, 2)"),
        (r"\text{no}", r"\text{no}"),
        (r"10\%", r"10\%"),
    ],
)
def test_answers_that_are_the_same(accepted: str, given: str) -> None:
    assert same_answer((accepted,), given)


@pytest.mark.parametrize(
    "accepted, given", [("2", "3"), (r"\frac{1}{2}", "2"), ("x+1", "x-1"), ("(1,2)", "(2,1)"), ("2", ""), ("2", "$$}{")]
)
def test_answers_that_are_not(accepted: str, given: str) -> None:
    assert not same_answer((accepted,), given)


def test_any_of_the_accepted_answers_will_do_and_none_is_wrong() -> None:
    assert same_answer(("80", "81"), "81") and same_answer(("80", "81"), "80.0")
    assert not same_answer(("80", "81"), "82") and not same_answer(("80",), None)


def test_a_checker_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert failure(lambda: same_answer(("1/2",), "0.5")) == (
        "checking answers needs math-verify; run: pip install math-verify"
    )


@needs_data
@pytest.mark.system
def test_reference_solutions_are_right_by_the_checker_and_wrong_ones_are_not() -> None:
    """A sample; benchmarks/answer_checker.py measures all of them."""
    problems = find_task("math", DATA).load("test")[::50]
    assert sum(same_answer(p.answers, boxed_answer(p.solution)) for p in problems) == len(problems) == 100
    others = itertools.pairwise(problems)
    assert sum(same_answer(p.answers, q.answers[0]) for p, q in others if p.answers != q.answers) == 0


# Prompts --------------------------------------------------------------------------------------------------------------


def test_a_problem_is_a_message_of_a_chat_with_the_instruction() -> None:
    assert ask(SUM, tokenizer()) == [{"role": "user", "content": f"What is $1+1$?\n\n{INSTRUCTION}"}]
    assert r"\boxed{}" in INSTRUCTION and "step by step" in INSTRUCTION


@pytest.mark.parametrize("chat", [CHAT, None])
def test_prompt_and_solution_are_tokens_of_the_whole(chat: str | None) -> None:
    made = tokenizer(chat)
    encoded = encode_problem(SUM, made)
    whole = f"<user>What is $1+1$?\n\n{INSTRUCTION}<assistant>{SUM.solution}"
    plain = f"Problem: What is $1+1$?\n{INSTRUCTION}\nSolution: {SUM.solution}"
    assert made.decode(encoded.prompt_ids + encoded.target_ids) == (whole if chat else plain)
    assert made.decode(encoded.target_ids).strip() == SUM.solution


def test_only_lessons_have_an_end_and_a_greatest_length() -> None:
    long = Problem("long", "?" * 90, "!", ("1",))
    task = ProblemTask("own", "", lambda split: (SUM, long))
    made = tokenizer()
    assert [text.id for text in task.encode("test", made, 10)] == ["p", "long"]
    assert END not in made.decode(task.encode("test", made, 10)[0].target_ids)
    limit = len(encode_problem(SUM, made)) + 1
    found = task.encode_lessons("train", made, limit)
    [lesson] = found.texts
    assert found.left_out == {f"longer than {limit} tokens": 1} and found.truncated == 0
    assert made.decode(lesson.target_ids) == SUM.solution + END
    assert failure(lambda: task.encode_lessons("train", made, 10)) == (
        "own train: no problem with its solution fits into 10 tokens; use a larger --max-tokens"
    )


# Benchmarks -----------------------------------------------------------------------------------------------------------


def math_rows(count: int = 10) -> list[dict[str, Any]]:
    return [
        {"id": f"m{k}", "problem": f"What is {k}+{k}?", "solution": rf"Add: $\boxed{{{2 * k}}}$."} for k in range(count)
    ]


def aime_rows(count: int = 10, year: int = 1990) -> list[dict[str, Any]]:
    return [{"id": f"a{k}", "problem": f"What is {k}?", "answer": f"{k:03}", "year": year} for k in range(count)]


def test_a_fifth_of_train_is_held_out_whatever_the_ids_are(tmp_path: Path) -> None:
    write_lines(tmp_path / "math/train.jsonl.gz", math_rows(50))
    write_lines(tmp_path / "other/math/train.jsonl.gz", [row | {"id": "x" + row["id"]} for row in math_rows(50)])
    write_lines(tmp_path / "math/test.jsonl", math_rows(3))
    task, other = find_task("math", tmp_path), find_task("math", tmp_path / "other")
    train, held_out = task.load("train"), task.load("validation")
    assert (len(train), len(held_out), len(task.load("test"))) == (40, 10, 3)
    assert {p.text for p in held_out} == {p.text for p in other.load("validation")}
    assert task.load("test")[1] == Problem("m1", "What is 1+1?", r"Add: $\boxed{2}$.", ("2",))


def test_aime_has_its_answer_in_a_box_for_a_solution(tmp_path: Path) -> None:
    two = {"id": "2022-II-8", "problem": "?", "answer": "080 or 081 (both were accepted)", "year": 2022}
    write_lines(tmp_path / "aime/1983_2023.jsonl", [*aime_rows(9), two, *aime_rows(1, 2024)])
    write_lines(tmp_path / "aime/2024.jsonl", aime_rows(2, 2024))
    task = find_task("aime", tmp_path)
    learnt = {p.id: p for p in (*task.load("train"), *task.load("validation"))}
    assert len(learnt) == 10 and learnt["2022-II-8"].answers == ("80", "81")
    assert learnt["a7"] == Problem("a7", "What is 7?", r"The final answer is $\boxed{7}$.", ("7",))
    assert len(task.load("test")) == 2


@pytest.mark.parametrize(
    "task, file, row",
    [
        ("math", "math/test.jsonl", {"id": "x", "problem": "?", "solution": "no box"}),
        ("math", "math/test.jsonl", {"id": "x", "problem": "?"}),
        ("aime", "aime/2024.jsonl", {"id": "x", "problem": "?", "answer": "none", "year": 2024}),
    ],
)
def test_rows_that_are_no_problems(task: str, file: str, row: dict[str, Any], tmp_path: Path) -> None:
    path = write_lines(tmp_path / file, [row])
    message = failure(lambda: find_task(task, tmp_path).load("test"))
    assert message.startswith(f"{path}, line 1: is no problem with an answer (") and message.endswith(
        "get the data again"
    )


HUB = {
    "EleutherAI/hendrycks_math": {"problem": "P", "solution": r"\boxed{3}", "level": "Level 1", "type": "Algebra"},
    "gneubig/aime-1983-2024": {"ID": "1983-I-1", "Year": 1983, "Question": "P", "Answer": "3", "Part": None},
    "HuggingFaceH4/aime_2024": {"id": 60, "problem": "P", "answer": "003", "solution": "long", "year": "2024"},
}


@pytest.mark.parametrize(
    "name, rows, source", [("math", 7, "EleutherAI/hendrycks_math"), ("aime", 1, "HuggingFaceH4/aime_2024")]
)
def test_test_splits_from_the_hub(name: str, rows: int, source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def load_dataset(name: str, config: str | None, split: str) -> list[dict[str, Any]]:
        asked.append(name)
        return [HUB[name]]

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset, __spec__="a module"))
    problems = find_task(name).load("test")
    assert asked == [source] * rows and len({p.id for p in problems}) == rows
    assert all(p.text == "P" and p.answers == ("3",) for p in problems)
    if name == "aime":
        assert len((*find_task(name).load("train"), *find_task(name).load("validation"))) == 1


@pytest.mark.parametrize("name", ["math", "aime"])
def test_without_a_network_the_hub_fails_in_one_line(name: str) -> None:
    assert "cannot be loaded from the hub (" in failure(lambda: find_task(name).load("test"))


@needs_data
def test_sizes_as_published() -> None:
    math, aime = find_task("math", DATA), find_task("aime", DATA)
    sizes = [[len(task.load(split)) for split in ("train", "validation", "test")] for task in (math, aime)]
    assert sizes == [[6000, 1500, 5000], [735, 184, 30]]
    assert not {p.text for p in math.load("train")} & {p.text for p in math.load("validation")}
