"""Problems with worked solutions: MATH and AIME, with a chain-of-thought prompt in the model's chat template.

Training and evaluation use the tokens of the solution after the problem. AIME has answers but no solutions: its solution
is one sentence with the boxed answer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from bayeslora.errors import InputError
from bayeslora.tasks.base import SplitName
from bayeslora.tasks.benchmark import HELD_OUT
from bayeslora.tasks.boxed import boxed_answer
from bayeslora.tasks.encode import beginning_ids, continuation_ids, plain_ids
from bayeslora.tasks.rows import divide
from bayeslora.tasks.sources import HubPlace, HubRow, Source, check_data_dir, read_source
from bayeslora.tasks.tokens import EncodedText, Lessons, TokenTask

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

INSTRUCTION = r"Reason step by step, and write the final answer in \boxed{}."
"""The chain-of-thought prompt, appended to every problem."""

Messages = Sequence[Mapping[str, str]]


@dataclass(frozen=True, slots=True)
class Problem:
    """One problem.

    Attributes:
        id: its name in predictions.
        text: the problem.
        solution: worked solution with the boxed answer.
        answers: accepted answers, in LaTeX.
    """

    id: str
    text: str
    solution: str
    answers: tuple[str, ...]


@dataclass(frozen=True)
class ProblemTask(TokenTask[tuple[Problem, ...]]):
    """A named set of problems."""

    kind: ClassVar[str] = "problems"

    def encode(self, split: str, tokenizer: PreTrainedTokenizerBase, max_tokens: int) -> list[EncodedText]:
        """Encode problems as prompts and solutions as targets, all of them whole, regardless of ``max_tokens``."""
        return [encode_problem(problem, tokenizer) for problem in self.load(split)]

    def encode_lessons(self, split: str, tokenizer: PreTrainedTokenizerBase, max_tokens: int) -> Lessons:
        """Encode for training: without those longer than ``max_tokens``, and with the end token, so that the model learns to
        stop."""
        ending = [] if tokenizer.eos_token_id is None else [int(tokenizer.eos_token_id)]
        lessons = [encode_problem(problem, tokenizer, ending) for problem in self.load(split)]
        kept = [lesson for lesson in lessons if len(lesson) <= max_tokens]
        if not kept:
            raise InputError(
                f"{self.name} {split}: no problem with its solution fits into {max_tokens} tokens; use a larger --max-tokens"
            )
        left_out = len(lessons) - len(kept)
        return Lessons(kept, {f"longer than {max_tokens} tokens": left_out} if left_out else {})


def ask(problem: Problem, tokenizer: PreTrainedTokenizerBase) -> str | Messages:
    """The prompt: a chat message, or plain text if the tokenizer has no chat template."""
    if tokenizer.chat_template is None:
        return f"Problem: {problem.text}\n{INSTRUCTION}\nSolution:"
    return [{"role": "user", "content": f"{problem.text}\n\n{INSTRUCTION}"}]


def encode_problem(problem: Problem, tokenizer: PreTrainedTokenizerBase, ending: Sequence[int] = ()) -> EncodedText:
    """Tokens of the prompt, as ``generate`` makes them, and of the solution after it."""
    prompt = ask(problem, tokenizer)
    if isinstance(prompt, str):
        given = beginning_ids(tokenizer) + plain_ids(prompt, tokenizer)
        solution = continuation_ids(f" {problem.solution}", tokenizer)
    else:
        written = tokenizer.apply_chat_template(list(prompt), tokenize=False, add_generation_prompt=True)
        given = plain_ids(str(written), tokenizer)
        solution = continuation_ids(problem.solution, tokenizer)
    return EncodedText(problem.id, given, [*solution, *ending])


# The benchmarks -------------------------------------------------------------------------------------------------------

SUBJECTS = (
    "algebra",
    "counting_and_probability",
    "geometry",
    "intermediate_algebra",
    "number_theory",
    "prealgebra",
    "precalculus",
)


@dataclass(frozen=True)
class Problems:
    """Definition of a benchmark. There is no official validation split: a fixed 20 % of train is held out.

    Attributes:
        name: of the task.
        description: in one line.
        train: source of train.
        test: source of test.
        hub_rows: functions that map rows of the two into the fields of the local files.
        read: makes a problem from the fields.
        learns_from: whether a row of train may be used in training.
    """

    name: str
    description: str
    train: Source
    test: Source
    hub_rows: tuple[HubRow, HubRow]
    read: Callable[[Mapping[str, Any]], Problem]
    learns_from: Callable[[Mapping[str, Any]], bool] = lambda values: True

    def task(self, data_dir: Path | None) -> ProblemTask:
        """The task, read from the data directory or else from the hub."""
        checked = None if data_dir is None else check_data_dir(data_dir)
        train = cache(lambda: self._read(self.train, checked, self.hub_rows[0], self.learns_from))

        def split(name: SplitName) -> tuple[Problem, ...]:
            if name == "test":
                return self._read(self.test, checked, self.hub_rows[1], lambda values: True)
            held_out, rest = divide(train(), (HELD_OUT, 1 - HELD_OUT), _key)
            return rest if name == "train" else held_out

        return ProblemTask(self.name, self.description, split)

    def _read(
        self, source: Source, data_dir: Path | None, hub_row: HubRow, wanted: Callable[[Mapping[str, Any]], bool]
    ) -> tuple[Problem, ...]:
        problems = []
        for row in read_source(source, data_dir, hub_row):
            try:
                if wanted(row.values):
                    problems.append(self.read(row.values))
            except (KeyError, TypeError, ValueError) as error:
                raise InputError(
                    f"{row.origin}: is no problem with an answer ({error!r}); get the data again"
                ) from error
        return tuple(problems)


def _key(problem: Problem) -> str:
    """Key that does not depend on the source of the data, so that the same problems are held out."""
    return " ".join(problem.text.split())


def read_math(values: Mapping[str, Any]) -> Problem:
    """A row of MATH. Without a separate answer, the last boxed one of its solution is used."""
    solution = str(values["solution"])
    answer = values.get("answer")
    if answer is None:
        answer = boxed_answer(solution)
    if answer is None:
        raise ValueError("no answer in a box")
    return Problem(str(values["id"]), str(values["problem"]), solution, (str(answer),))


def read_aime(values: Mapping[str, Any]) -> Problem:
    """A row of AIME. Answers are numbers from 0 to 999, some with leading zeros; in one case two are accepted."""
    answers = tuple(str(int(word)) for word in str(values["answer"]).split() if word.isdigit())
    if not answers:
        raise ValueError("no number as answer")
    solution = rf"The final answer is $\boxed{{{answers[0]}}}$."
    return Problem(str(values["id"]), str(values["problem"]), solution, answers)


def _math_row(row: Mapping[str, Any], place: HubPlace) -> dict[str, Any]:
    """A row of ``EleutherAI/hendrycks_math``, which has no ids."""
    return {
        "id": f"{place.split}/{place.config}/{place.index}",
        "problem": row["problem"],
        "solution": row["solution"],
    }


def _aime_row(row: Mapping[str, Any], place: HubPlace) -> dict[str, Any]:
    """A row of ``gneubig/aime-1983-2024``."""
    return {"id": row["ID"], "problem": row["Question"], "answer": row["Answer"], "year": row["Year"]}


def _aime_2024_row(row: Mapping[str, Any], place: HubPlace) -> dict[str, Any]:
    """A row of ``HuggingFaceH4/aime_2024``."""
    return {"id": f"2024-{row['id']}", "problem": row["problem"], "answer": row["answer"], "year": 2024}


BENCHMARKS = (
    Problems(
        "math",
        "MATH: competition mathematics with worked solutions, 7,500 training problems of which 20 % are held out",
        Source("math/train", "EleutherAI/hendrycks_math", SUBJECTS, "train"),
        Source("math/test", "EleutherAI/hendrycks_math", SUBJECTS, "test"),
        (_math_row, _math_row),
        read_math,
    ),
    Problems(
        "aime",
        "AIME: 919 problems of 1983-2023 with their answers, of which 20 % are held out; test: the 30 of 2024",
        Source("aime/1983_2023", "gneubig/aime-1983-2024", (None,), "train"),
        Source("aime/2024", "HuggingFaceH4/aime_2024", (None,), "train"),
        (_aime_row, _aime_2024_row),
        read_aime,
        learns_from=lambda values: int(values["year"]) <= 2023,
    ),
)
