"""Prompts and options of real rows, to the letter. The rows are quoted here, so no data are needed."""

from __future__ import annotations

from typing import Any

import pytest

from bayeslora.tasks import Prompt, continuations
from bayeslora.tasks.boolq import read_boolq
from bayeslora.tasks.choices import read_choices
from bayeslora.tasks.encode import prompt_of
from bayeslora.tasks.winogrande import read_winogrande

ARC_EASY = {
    "id": "MCAS_2007_8_5189",
    "question": "Lichens are symbiotic organisms made of green algae and fungi. What do the green algae supply to the fungi "
    "in this symbiotic relationship?",
    "choices": ["carbon dioxide", "food", "protection", "water"],
    "labels": ["A", "B", "C", "D"],
    "answer": "B",
}
ARC_NUMBERS = {
    "id": "NYSEDREGENTS_2006_8_10",
    "question": "Rocks are classified as igneous, metamorphic, or sedimentary according to",
    "choices": ["their color", "their shape", "how they formed", "the minerals they contain"],
    "labels": ["1", "2", "3", "4"],
    "answer": "3",
}
OPENBOOKQA = {
    "id": "7-980",
    "question": "The sun is responsible for",
    "choices": [
        "puppies learning new tricks",
        "children growing up and getting old",
        "flowers wilting in a vase",
        "plants sprouting, blooming and wilting",
    ],
    "labels": ["A", "B", "C", "D"],
    "answer": "D",
}
MMLU = {
    "id": "electrical_engineering/test/0",
    "subject": "electrical_engineering",
    "question": "The Barkhausen criterion for an oscillator",
    "choices": [
        "Loop gain should be unity",
        "Loop gain should be less than unity",
        "The phase of a feedback signal with respect to input should be 0° or 360°",
        "Both A and C",
    ],
    "labels": ["A", "B", "C", "D"],
    "answer": "D",
}
BOOLQ = {
    "id": "train-6081",
    "title": "Andrea Gail",
    "passage": "All six of the crew were lost at sea.",
    "question": "were there any survivors on the andrea gail",
    "answer": False,
}
WINOGRANDE = {
    "id": "3QHITW7OYO7Q6B6ISU2UMJB84ZLAQE-2",
    "sentence": "Ian volunteered to eat Dennis's menudo after already having a bowl because _ despised eating intestine.",
    "option1": "Ian",
    "option2": "Dennis",
    "answer": "2",
}

CHOICES = [
    (
        ARC_EASY,
        "Question: Lichens are symbiotic organisms made of green algae and fungi. What do the green algae supply to the "
        "fungi in this symbiotic relationship?\nOptions:\nA. carbon dioxide\nB. food\nC. protection\nD. water\nAnswer:",
        (" carbon dioxide", " food", " protection", " water"),
        1,
    ),
    (
        ARC_NUMBERS,
        "Question: Rocks are classified as igneous, metamorphic, or sedimentary according to\nOptions:\n1. their color\n"
        "2. their shape\n3. how they formed\n4. the minerals they contain\nAnswer:",
        (" their color", " their shape", " how they formed", " the minerals they contain"),
        2,
    ),
    (
        OPENBOOKQA,
        "Question: The sun is responsible for\nOptions:\nA. puppies learning new tricks\nB. children growing up and "
        "getting old\nC. flowers wilting in a vase\nD. plants sprouting, blooming and wilting\nAnswer:",
        (
            " puppies learning new tricks",
            " children growing up and getting old",
            " flowers wilting in a vase",
            " plants sprouting, blooming and wilting",
        ),
        3,
    ),
    (
        MMLU,
        "Question: The Barkhausen criterion for an oscillator\nOptions:\nA. Loop gain should be unity\nB. Loop gain should "
        "be less than unity\nC. The phase of a feedback signal with respect to input should be 0° or 360°\n"
        "D. Both A and C\nAnswer:",
        (
            " Loop gain should be unity",
            " Loop gain should be less than unity",
            " The phase of a feedback signal with respect to input should be 0° or 360°",
            " Both A and C",
        ),
        3,
    ),
]


@pytest.mark.parametrize("row, prompt, options, gold", CHOICES, ids=[str(case[0]["id"]) for case in CHOICES])
def test_multiple_choice(row: dict[str, Any], prompt: str, options: tuple[str, ...], gold: int) -> None:
    item = read_choices(row).item
    assert item.prompt == Prompt(prompt)
    assert (item.id, item.options, item.labels, item.gold) == (row["id"], options, tuple(row["labels"]), gold)
    assert continuations(item, "letter") == tuple(f" {label}" for label in row["labels"])
    assert continuations(item, "text") == options


@pytest.mark.parametrize("answer, gold", [(True, 0), (False, 1)])
def test_boolq(answer: bool, gold: int) -> None:
    item = read_boolq(BOOLQ | {"answer": answer}).item
    assert item.prompt == Prompt(
        "Passage:",
        " All six of the crew were lost at sea.",
        "\nQuestion: were there any survivors on the andrea gail\nAnswer:",
    )
    assert item.prompt.text == (
        "Passage: All six of the crew were lost at sea.\nQuestion: were there any survivors on the andrea gail\nAnswer:"
    )
    assert (item.id, item.options, item.labels, item.gold) == ("train-6081", (" Yes", " No"), ("A", "B"), gold)
    assert continuations(item, "letter") == (" A", " B")
    assert prompt_of(item, "text") == item.prompt
    assert prompt_of(item, "letter") == Prompt(
        "Passage:",
        " All six of the crew were lost at sea.",
        "\nQuestion: were there any survivors on the andrea gail\nOptions:\nA. Yes\nB. No\nAnswer:",
    )


def test_winogrande() -> None:
    item = read_winogrande(WINOGRANDE).item
    assert item.prompt == Prompt("Ian volunteered to eat Dennis's menudo after already having a bowl because")
    assert item.options == (" Ian despised eating intestine.", " Dennis despised eating intestine.")
    assert (item.id, item.labels, item.gold) == (WINOGRANDE["id"], ("A", "B"), 1)
    assert continuations(item, "letter") == (" A", " B")
    assert prompt_of(item, "text") == item.prompt
    assert prompt_of(item, "letter") == Prompt(
        "Question: Which option fills the blank? Ian volunteered to eat Dennis's menudo after already having a bowl because _ "
        "despised eating intestine.\nOptions:\nA. Ian\nB. Dennis\nAnswer:"
    )


def test_fields_are_normalised_in_the_prompt() -> None:
    row = {"question": "What’s  “it”\n?", "choices": [" a–b ", "c"], "labels": ["A", "B"], "answer": "A"}
    item = read_choices(row).item
    assert item.prompt.text == 'Question: What\'s "it" ?\nOptions:\nA. a-b\nB. c\nAnswer:'
    assert item.options == (" a-b", " c")
