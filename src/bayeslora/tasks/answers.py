"""Questions with a short free answer, which the model writes itself: rows of ``question`` and ``answer``.

``answer`` is a text or a number, or a list of answers that are all accepted, of which the first is learnt. An empty answer is
none.
"""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from typing import TYPE_CHECKING, Any, ClassVar

from bayeslora.errors import InputError
from bayeslora.tasks.base import FromRow
from bayeslora.tasks.conversations import Completion, Conversation, encode_example, truncate
from bayeslora.tasks.rows import Candidate, Malformed, checked_text, is_missing, normalise, row_id, text_field
from bayeslora.tasks.token_store import TokenStore
from bayeslora.tasks.tokens import EncodedText, Lessons, TokenTask

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

INSTRUCTION = "Answer briefly, with the answer alone."


@dataclass(frozen=True, slots=True)
class FreeQuestion(FromRow):
    """A question with a free answer.

    Attributes:
        question: the text.
        answers: accepted answers, the first of which is learnt; none if they are not known.
        passage: a text that the question is about.
    """

    question: str
    answers: tuple[str, ...] = ()
    passage: str = ""

    @property
    def text(self) -> str:
        """Passage and question."""
        return f"{self.passage}\n\n{self.question}" if self.passage else self.question


@dataclass(frozen=True)
class AnswerTask(TokenTask[Collection[FreeQuestion]]):
    """A named set of questions with free answers."""

    kind: ClassVar[str] = "answers"

    def encode(self, split: str, tokenizer: PreTrainedTokenizerBase, max_tokens: int) -> list[EncodedText]:
        """Questions as prompts and their first answers as targets, all of them whole."""
        return [encode_answer(question, tokenizer) for question in self.load(split)]

    def encode_lessons(self, split: str, tokenizer: PreTrainedTokenizerBase, max_tokens: int) -> Lessons:
        """The same, without those longer than ``max_tokens``."""
        left_out = Counter[str]()

        def lessons() -> Iterator[EncodedText]:
            for question in self.load(split):
                text = encode_answer(question, tokenizer)
                if len(truncate(text, max_tokens)) < len(text):
                    left_out[f"longer than {max_tokens} tokens"] += 1
                else:
                    yield text

        return Lessons(TokenStore(lessons()), left_out)


def read_free_answer(values: Mapping[str, Any]) -> Candidate[FreeQuestion]:
    """A row of ``question`` and ``answer``, with any of ``passage`` and ``id``."""
    given = values.get("answer")
    listed = given if isinstance(given, list) else [] if is_missing(given) else [given]
    answers = (
        str(it) if isinstance(it, (int, float)) and not isinstance(it, bool) else checked_text(it, "answer")
        for it in listed
    )
    said = tuple(filter(None, answers))
    passage = text_field(values, "passage") if values.get("passage") is not None else ""
    question = text_field(values, "question")
    if isinstance(given, list) and not given:
        raise Malformed("answer is an empty list")
    return Candidate(FreeQuestion(row_id(values), question, said, passage), None if question else "empty question")


def answer_key(question: FreeQuestion) -> str:
    """What a question asks: equal questions stay in one split."""
    return repr((question.passage, question.question))


def ask_freely(question: FreeQuestion, tokenizer: PreTrainedTokenizerBase) -> str | list[dict[str, str]]:
    """The prompt: a chat message, or plain text if the tokenizer has no chat template."""
    if tokenizer.chat_template is None:
        return f"Question: {question.text}\nAnswer:"
    return [{"role": "user", "content": f"{question.text}\n\n{INSTRUCTION}"}]


def only_question(prompt: str | Sequence[Mapping[str, Any]]) -> str | None:
    """The question of a prompt that is a text, or a chat of one user's message; ``None`` for any other chat."""
    if isinstance(prompt, str):
        return prompt
    content = prompt[0].get("content") if len(prompt) == 1 and prompt[0].get("role") == "user" else None
    return content if isinstance(content, str) else None


def encode_answer(question: FreeQuestion, tokenizer: PreTrainedTokenizerBase) -> EncodedText:
    """Tokens of the prompt, as ``generate`` makes them, and of the first answer with its end."""
    if not question.answers:
        raise InputError(
            f"{question.named('question')} has no answer; training and evaluation need one, so add 'answer' to it: "
            f"{question.question[:60]!r}"
        )
    prompt, answer = ask_freely(question, tokenizer), question.answers[0]
    if isinstance(prompt, str):
        [text] = encode_example(Completion(question.id, prompt, f" {answer}", origin=question.origin), tokenizer)
        return text
    turns = (*((message["role"], message["content"]) for message in prompt), ("assistant", answer))
    [text] = encode_example(Conversation(question.id, turns, origin=question.origin), tokenizer)
    return text


# When two answers are the same ----------------------------------------------------------------------------------------

_ARTICLES = re.compile(r"\b(a|an|the)\b(?=\s+\S)")
"""Articles stand before a word; ``A`` alone, or in ``vitamin A``, is none."""

_GROUPS = r"(?:,\d{2,3})*,\d{3}(?!\d)"
"""Digits after thousands separators, as in ``1,000,000`` or ``10,00,000``. Other commas separate numbers, or are decimal ones."""

_NUMBER = re.compile(rf"[-+]?(?:\d{{1,3}}{_GROUPS}|\d+|(?=\.))(?:\.\d+)?(?:[eE][-+]?\d+)?%?")
_CURRENCY = re.compile(r"^([-+]?)[$€£]\s*")

_MEANT = re.compile(
    r"(?<!\w)-(?=[$€£]?\.?\d)"  # minus
    r"|(?<=\d)[./](?=\d)|(?<!\w)(?<!\.)\.(?=\d)"  # decimal point and fraction
    rf"|(?<=\d)(?!{_GROUPS}),(?=\d)"  # what separates numbers
    r"|(?<=\w)[+#]+"  # C++, C#
)
_IGNORED = re.compile(f"({_MEANT.pattern})|[{re.escape(string.punctuation)}]")


def normalise_answer(text: str) -> str:
    """An answer without case, punctuation, articles and surplus space, as SQuAD compares answers.

    What gives a number its value (``-3``, ``1.5``, ``1/2``) or is part of a name (``C++``) is kept, and so is a text of
    punctuation alone.
    """
    lower = normalise(text.lower())
    bare = _IGNORED.sub(lambda match: match[1] or "", lower)
    return " ".join(_ARTICLES.sub(" ", bare).split()) or lower


def as_number(text: str) -> Decimal | None:
    """The exact value of an answer that is a number, perhaps with a currency, a unit of per cent or thousands separators."""
    bare = _CURRENCY.sub(r"\1", normalise(text)).rstrip("$€£. ")
    if not _NUMBER.fullmatch(bare):
        return None
    digits, _, power = bare.rstrip("%").replace(",", "").lower().partition("e")
    try:
        return Decimal(f"{digits}e{int(power or 0) - 2 * bare.endswith('%')}")
    except (ValueError, InvalidOperation):  # its power of ten is beyond all bounds
        return None


def same_free_answer(left: str, right: str) -> bool:
    """Whether two answers say the same: equal numbers, or equal texts after normalisation."""
    a, b = as_number(left), as_number(right)
    if a is not None and b is not None:
        return a == b
    return normalise_answer(left) == normalise_answer(right)


def exact_match(answer: str, accepted: Sequence[str]) -> bool:
    """Whether an answer is one of those accepted."""
    return any(same_free_answer(answer, it) for it in accepted)


def answer_f1(answer: str, accepted: Sequence[str]) -> float:
    """Largest overlap in words with an accepted answer: the harmonic mean of precision and recall."""
    return max((_f1(normalise_answer(answer).split(), normalise_answer(it).split()) for it in accepted), default=0.0)


def _f1(left: Sequence[str], right: Sequence[str]) -> float:
    if not left or not right:
        return float(left == right)
    common = sum((Counter(left) & Counter(right)).values())
    return 2.0 * common / (len(left) + len(right))
