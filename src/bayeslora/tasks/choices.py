"""Template and rows of multiple-choice questions: ARC, OpenBookQA, MMLU and own data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from bayeslora.tasks.base import Item, Prompt
from bayeslora.tasks.rows import Candidate, Malformed, checked_text, row_id, text_field


def read_choices(values: Mapping[str, Any]) -> Candidate[Item]:
    """A row ``{"id", "question", "choices", "labels", "answer"}`` whose answer is a label."""
    labels = text_list(values, "labels")
    answer = text_field(values, "answer")
    if answer not in labels:
        raise Malformed("answer is not among the labels", f"{answer!r} of {', '.join(labels)}")
    return choice_candidate(
        row_id(values), text_field(values, "question"), text_list(values, "choices"), labels, labels.index(answer)
    )


def choice_candidate(
    name: str, question: str, choices: Sequence[str], labels: Sequence[str], gold: int | None, passage: str = ""
) -> Candidate[Item]:
    """The item of a question whose choices are listed in the prompt, with its flaw, if any."""
    if not choices:
        raise Malformed("no choices")
    if len(labels) != len(choices):
        raise Malformed("labels and choices differ in number", f"{len(labels)} and {len(choices)}")
    if len(set(labels)) != len(labels):
        raise Malformed("a label is repeated", ", ".join(labels))
    prompt = choice_prompt(question, choices, labels, passage)
    item = Item(name, prompt, tuple(f" {choice}" for choice in choices), tuple(labels), gold)
    return Candidate(item, _flaw(question, choices))


def choice_prompt(question: str, choices: Sequence[str], labels: Sequence[str], passage: str = "") -> Prompt:
    """A question, with its choices listed by their labels."""
    asked = f"Question: {question}\n{listed(choices, labels)}"
    return Prompt("Passage:", f" {passage}", f"\n{asked}") if passage else Prompt(asked)


def listed(choices: Sequence[str], labels: Sequence[str]) -> str:
    """The end of a prompt: its choices by their labels."""
    lines = "".join(f"{label}. {choice}\n" for label, choice in zip(labels, choices, strict=True))
    return f"Options:\n{lines}Answer:"


def text_list(values: Mapping[str, Any], name: str) -> list[str]:
    """A field that is a list of texts, normalised."""
    given = values.get(name)
    if given is None:
        raise Malformed(f"no {name}")
    if not isinstance(given, list):
        raise Malformed(f"{name} is no list", repr(given)[:60])
    return [checked_text(text, name) for text in given]


def _flaw(question: str, choices: Sequence[str]) -> str | None:
    if not question:
        return "empty question"
    if len(choices) < 2:
        return "fewer than 2 choices"
    return None if all(choices) else "empty choice"
