"""Conversations and completions to learn from: the loss counts what the assistant says, and nothing else.

A row has ``messages``, or ``prompt`` and ``completion``, as in TRL. Messages are written with the model's chat template. The
assistant's part of a text begins where a generation prompt ends and includes the end of the turn, so that a model learns to
stop there. ``prompt`` and ``completion`` may be messages too; as plain texts they follow each other without a template. The
template also gets the ``tools`` of a row with messages.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any, ClassVar

from bayeslora.errors import InputError, first_line
from bayeslora.tasks.base import FromRow
from bayeslora.tasks.encode import beginning_ids, continuation_ids, plain_ids
from bayeslora.tasks.rows import Candidate, Malformed, is_missing, row_id, whole_characters
from bayeslora.tasks.token_store import TokenStore
from bayeslora.tasks.tokens import EncodedText, Lessons, TokenTask

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

ROLES = ("system", "user", "assistant", "tool", "developer")
SHAREGPT = {"human": "user", "gpt": "assistant", "system": "system", "tool": "tool"}
"""Our names of the roles in ``{"from": ..., "value": ...}``."""

Turn = tuple[str, str]
"""Role and content of a message."""


@dataclass(frozen=True, slots=True)
class Conversation(FromRow):
    """Messages to learn from.

    Attributes:
        turns: its messages.
        first: index of the first message that may be learnt; those before it are only read.
        skipped: indices of messages after it that are only read, too.
        tools: JSON of a list of schemas of tools that the template describes, if there are any.
    """

    turns: tuple[Turn, ...]
    first: int = 0
    skipped: tuple[int, ...] = ()
    tools: str = ""

    @property
    def learnt(self) -> list[int]:
        """Indices of the assistant's messages that are learnt. One that opens the conversation answers nothing."""
        first = max(self.first, 1)
        return [
            k for k, (role, _) in enumerate(self.turns) if role == "assistant" and k >= first and k not in self.skipped
        ]


@dataclass(frozen=True, slots=True)
class Completion(FromRow):
    """A plain text and how it goes on."""

    prompt: str
    completion: str


Example = Conversation | Completion


@dataclass(frozen=True)
class ConversationTask(TokenTask[Collection[Example]]):
    """A named set of conversations or completions."""

    kind: ClassVar[str] = "conversations"

    def encode(self, split: str, tokenizer: PreTrainedTokenizerBase, max_tokens: int) -> list[EncodedText]:
        """All of them whole, regardless of ``max_tokens``."""
        return [text for example in self.load(split) for text in encode_example(example, tokenizer)]

    def encode_lessons(self, split: str, tokenizer: PreTrainedTokenizerBase, max_tokens: int) -> Lessons:
        """Texts of at most ``max_tokens``: the end of longer ones is cut off, and those that say nothing to learn before it
        are left out."""
        left_out, truncated = Counter[str](), Counter[str]()

        def lessons() -> Iterator[EncodedText]:
            for example in self.load(split):
                for whole in encode_example(example, tokenizer):
                    text = truncate(whole, max_tokens)
                    if text.terms == 0:
                        left_out[f"no answer within {max_tokens} tokens"] += 1
                        continue
                    truncated["texts"] += len(text) < len(whole)
                    yield text

        texts = TokenStore(lessons())
        if not texts:
            raise InputError(
                f"{self.name} {split}: no example has an answer within {max_tokens} tokens; use a larger --max-tokens"
            )
        return Lessons(texts, left_out, truncated["texts"])


def read_conversation(values: Mapping[str, Any]) -> Candidate[Example]:
    """A row with ``messages``, in OpenAI's format or in ShareGPT's."""
    values = {**values, "messages": _from_json(values.get("messages"))}
    turns = read_messages(values, "messages")
    if not any(role == "assistant" for role, _ in turns):
        raise Malformed("messages have no assistant")
    skipped = tuple(k for k, message in enumerate(values["messages"]) if message.get("weight") == 0)
    return _conversation(Conversation(row_id(values), turns, skipped=skipped, tools=_tools(values)))


def _conversation(example: Conversation) -> Candidate[Example]:
    """A conversation, with its flaw if it teaches to say nothing; refused if it teaches nothing."""
    if not example.learnt:
        raise Malformed("no message of the assistant is to be learnt, as it opens the conversation or has weight 0")
    return Candidate(example, None if all(example.turns[k][1].strip() for k in example.learnt) else "empty answer")


def _from_json(given: Any) -> Any:
    """Messages or tools, which tables often have as JSON."""
    try:
        return json.loads(given) if isinstance(given, str) else given
    except (ValueError, RecursionError):
        return given


def _tools(values: Mapping[str, Any]) -> str:
    """The tools of a row, as JSON; an empty text if it has none."""
    tools = _from_json(values.get("tools"))
    if is_missing(tools):
        return ""
    schemas = [_from_json(tool) for tool in tools] if isinstance(tools, list) else [None]
    if not all(isinstance(schema, Mapping) for schema in schemas):
        raise Malformed("tools is no list of JSON schemas", repr(tools)[:60])
    return whole_characters(json.dumps(schemas, ensure_ascii=False, default=str), "tools") if schemas else ""


def read_completion(values: Mapping[str, Any]) -> Candidate[Example]:
    """A row with ``prompt`` and ``completion``, both texts or both lists of messages."""
    prompt, completion = values.get("prompt"), values.get("completion")
    if isinstance(prompt, list) and isinstance(completion, list):
        before, after = read_messages(values, "prompt"), read_messages(values, "completion")
        if not any(role == "assistant" for role, _ in after):
            raise Malformed("completion has no assistant")
        return _conversation(Conversation(row_id(values), (*before, *after), len(before), tools=_tools(values)))
    if isinstance(prompt, list):
        before, said = read_messages(values, "prompt"), _plain(values, "completion")
        turns = (*before, ("assistant", said))
        return Candidate(Conversation(row_id(values), turns, len(before), tools=_tools(values)), _flaw(said))
    given, said = _plain(values, "prompt"), _plain(values, "completion")
    return Candidate(Completion(row_id(values), given, said), _flaw(said))


def _plain(values: Mapping[str, Any], name: str) -> str:
    """A field that is a plain text, which keeps its spaces and line breaks."""
    if not isinstance(values.get(name), str):
        raise Malformed(f"{name} is no text" if values.get(name) is not None else f"no {name}")
    return whole_characters(values[name], name)


def _flaw(completion: str) -> str | None:
    return None if completion.strip() else "empty completion"


def read_messages(values: Mapping[str, Any], name: str) -> tuple[Turn, ...]:
    """A field that is a list of messages."""
    given = values.get(name)
    if not isinstance(given, list) or not given:
        raise Malformed(f"{name} is no list of messages", repr(given)[:60])
    return tuple(_turn(message, name, number) for number, message in enumerate(given, 1))


def _turn(message: Any, name: str, number: int) -> Turn:
    if not isinstance(message, Mapping):
        raise _wrong(name, number, "is no object", repr(message)[:60])
    role, content = message.get("role"), message.get("content")
    if role is None and "from" in message:
        role, content = SHAREGPT.get(str(message["from"]), message["from"]), message.get("value")
    if role not in ROLES:
        raise _wrong(name, number, "has an unknown role", f"{role!r}; use {', '.join(ROLES)}")
    if message.get("tool_calls") or message.get("function_call"):
        raise _wrong(name, number, "calls a tool, which cannot be learnt")
    said = [_said(part, name, number) for part in content] if isinstance(content, list) else [content]
    return role, "".join(_text(it, name, number) for it in said)


def _said(part: Any, name: str, number: int) -> Any:
    """What a part of a message says, in OpenAI's form."""
    if not isinstance(part, Mapping) or part.get("type") != "text":
        raise _wrong(name, number, "has a part of another type than text, which cannot be learnt", repr(part)[:60])
    return part.get("text")


def _text(given: Any, name: str, number: int) -> str:
    if not isinstance(given, str):
        raise _wrong(name, number, "has no text as content", repr(given)[:60])
    return whole_characters(given, name)


def _wrong(name: str, number: int, what: str, detail: str = "") -> Malformed:
    """A message that cannot be used. Its number is told of its own row alone: rows with the same mistake are counted together."""
    place = f"message {number}" if name == "messages" else f"message {number} of {name}"
    return Malformed(f"a message of {name} {what}", detail, here=f"{place} {what}")


def example_key(example: Example) -> str:
    """What an example says: examples that say the same stay in one split, and are learnt from once."""
    if isinstance(example, Completion):
        return repr((example.prompt, example.completion))
    more = [it for it in (example.skipped, example.tools) if it]
    return repr((example.turns, *more) if more else example.turns)


# Tokens ---------------------------------------------------------------------------------------------------------------


def encode_example(example: Example, tokenizer: PreTrainedTokenizerBase) -> list[EncodedText]:
    """Tokens of an example, with what is learnt of them."""
    if isinstance(example, Completion):
        return [encode_completion(example, tokenizer)]
    return encode_conversation(example, tokenizer)


def encode_completion(example: Completion, tokenizer: PreTrainedTokenizerBase) -> EncodedText:
    """The prompt as ``generate`` encodes it, then the completion and the end token."""
    prompt = beginning_ids(tokenizer) + (plain_ids(example.prompt, tokenizer) if example.prompt else [])
    if not prompt:
        raise InputError(
            f"{example.named('example')}: its prompt is empty, and the tokenizer begins with no token; give one"
        )
    ending = [] if tokenizer.eos_token_id is None else [int(tokenizer.eos_token_id)]
    return EncodedText(example.id, prompt, [*continuation_ids(example.completion, tokenizer), *ending])


def encode_conversation(example: Conversation, tokenizer: PreTrainedTokenizerBase) -> list[EncodedText]:
    """A conversation as one text in which all the assistant's turns are learnt.

    Some templates write a turn differently once others follow it (they drop its reasoning). Then every turn becomes a text of
    its own, with the turns before it as they were when it was written.
    """
    spans = []
    for k in example.learnt:
        start = _write(example, k, tokenizer, prompting=True)
        end = _write(example, k + 1, tokenizer)
        if not end.startswith(start):
            raise InputError(
                f"{example.named('example')}: the chat template does not begin an answer with its generation prompt, so what is "
                "to be learnt cannot be told; give prompt and completion as plain texts"
            )
        spans.append((start, end))
    if all(later.startswith(end) for (_, end), (later, _) in pairwise(spans)):
        return [_encode_spans(example.id, spans, tokenizer)]
    return [_encode_spans(f"{example.id}#{k}", [span], tokenizer) for k, span in enumerate(spans, 1)]


def _encode_spans(name: str, spans: Sequence[tuple[str, str]], tokenizer: PreTrainedTokenizerBase) -> EncodedText:
    """Tokens of the last text. ``spans`` are the texts before and after each part that is learnt."""
    prompt = plain_ids(spans[0][0], tokenizer)
    targets: list[int] = []
    counted: list[bool] = []
    at = len(spans[0][0])
    for start, end in spans:
        for text, learnt in ((start[at:], False), (end[len(start) :], True)):
            ids = continuation_ids(text, tokenizer) if text else []
            targets += ids
            counted += [learnt] * len(ids)
        at = len(end)
    return EncodedText(name, prompt, targets, None if all(counted) else tuple(counted))


def _write(example: Conversation, count: int, tokenizer: PreTrainedTokenizerBase, *, prompting: bool = False) -> str:
    """The first ``count`` turns of a conversation as text, by the tokenizer's template."""
    if tokenizer.chat_template is None:
        raise InputError(
            "the model has no chat template, which conversations need; use an instruction-tuned model, or give prompt and "
            "completion as plain texts"
        )
    messages = [{"role": role, "content": content} for role, content in example.turns[:count]]
    tools = json.loads(example.tools) if example.tools else None
    try:
        return str(
            tokenizer.apply_chat_template(messages, tools=tools, tokenize=False, add_generation_prompt=prompting)
        )
    except Exception as error:  # a template raises what it likes, as where roles do not alternate
        raise InputError(
            f"{example.named('example')}: the model's chat template refuses it: {first_line(error)}; correct or remove it"
        ) from error


def truncate(text: EncodedText, max_tokens: int) -> EncodedText:
    """The first ``max_tokens`` of a text; without targets if its prompt alone has as many."""
    if len(text) <= max_tokens:
        return text
    kept = max(0, max_tokens - len(text.prompt_ids))
    counted = None if text.counted is None else text.counted[:kept]
    return EncodedText(text.id, text.prompt_ids[:max_tokens], text.target_ids[:kept], counted)
