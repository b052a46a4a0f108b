"""Conversations and completions: what is read of a row, and which of its tokens are learnt."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from bayeslora.errors import InputError
from bayeslora.tasks.conversations import (
    Completion,
    Conversation,
    ConversationTask,
    encode_completion,
    encode_conversation,
    example_key,
    read_completion,
    read_conversation,
    truncate,
)
from bayeslora.tasks.rows import Malformed
from bayeslora.tasks.tokens import EncodedText, marked, tokens_digest

CHAT = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}</>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
FORGETFUL = (  # drops what an assistant thought, once others have spoken
    "{% for m in messages %}<{{ m['role'] }}>"
    "{{ m['content'].split('|')[-1] if not loop.last else m['content'] }}</>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
PARTS = [{"type": "text", "text": "Hi"}, {"type": "text", "text": "!"}]
TOOLS = [{"type": "function", "function": {"name": "größe", "parameters": {"type": "object", "default": None}}}]
SAID = [("user", "Hi!"), ("assistant", "Hello."), ("user", "1+1?"), ("assistant", "2")]


def tokenizer(chat: str | None = CHAT) -> PreTrainedTokenizerFast:
    """One token for each byte, and an end."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE({letter: k for k, letter in enumerate(alphabet)} | {"<end>": len(alphabet)}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<end>")
    fast.chat_template = chat
    return fast


def messages(*turns: tuple[str, str]) -> list[dict[str, Any]]:
    return [{"role": role, "content": content} for role, content in turns]


def learnt(text: EncodedText, made: PreTrainedTokenizerFast) -> list[str]:
    return [piece for piece, counts in marked(text, made) if counts]


# Rows -----------------------------------------------------------------------------------------------------------------


def test_messages_of_both_formats() -> None:
    read = read_conversation({"id": "x", "messages": messages(*SAID)}).item
    assert read == Conversation("x", tuple(SAID)) and read.learnt == [1, 3]
    theirs = [{"from": "human", "value": "Hi!"}, {"from": "gpt", "value": "Hello."}]
    assert read_conversation({"messages": theirs}).item.turns == tuple(SAID[:2])


def test_messages_as_json() -> None:
    said = f" {json.dumps(messages(*SAID), indent=1)}"
    assert read_conversation({"messages": said}).item.turns == tuple(SAID)


def test_messages_in_parts() -> None:
    said = [{"role": "user", "content": PARTS}, {"role": "assistant", "content": [{"type": "text", "text": "Hello."}]}]
    assert read_conversation({"messages": said}).item.turns == tuple(SAID[:2])
    assert read_completion({"prompt": said[:1], "completion": said[1:]}).item.turns == tuple(SAID[:2])
    assert read_conversation({"messages": [said[0], {"role": "assistant", "content": []}]}).flaw == "empty answer"


@pytest.mark.parametrize("written", [TOOLS, json.dumps(TOOLS), [json.dumps(tool) for tool in TOOLS]])
def test_tools_are_given_to_the_template(written: Any) -> None:
    made = tokenizer("{% if tools is not none %}[{{ tools[0].function.name }}]{% endif %}" + CHAT)
    rows = [
        {"messages": messages(*SAID[:2]), "tools": written},
        {"prompt": messages(SAID[0]), "completion": messages(SAID[1]), "tools": written},
        {"prompt": messages(SAID[0]), "completion": "Hello.", "tools": written},
    ]
    for row, read in zip(rows, (read_conversation, read_completion, read_completion), strict=True):
        item = read(row).item
        assert isinstance(item, Conversation) and json.loads(item.tools) == TOOLS
        [text] = encode_conversation(item, made)
        assert made.decode(text.prompt_ids) == "[größe]<user>Hi!</><assistant>" and learnt(text, made) == ["Hello.</>"]
        for none in (None, "", "null", [], "[]", float("nan")):
            without = read({**row, "tools": none}).item
            [plain] = encode_conversation(without, made)
            assert made.decode(plain.prompt_ids) == "<user>Hi!</><assistant>"
            assert example_key(without) != example_key(item)


def test_messages_of_weight_0_and_those_that_open_a_conversation_are_only_read() -> None:
    said = messages(("assistant", "Welcome!"), *SAID)
    said[2]["weight"] = 0
    read = read_conversation({"messages": said}).item
    assert read.learnt == [4] and len(read.turns) == 5
    [text] = encode_conversation(read, tokenizer())
    assert learnt(text, tokenizer()) == ["2</>"]
    assert example_key(read) != example_key(replace(read, skipped=()))


def test_an_empty_answer_of_a_conversation_is_a_flaw() -> None:
    for said in ("", " \n"):
        assert read_conversation({"messages": messages(SAID[0], ("assistant", said))}).flaw == "empty answer"


def test_prompt_and_completion_as_texts_and_as_messages() -> None:
    assert read_completion({"id": 1, "prompt": "a ", "completion": "b"}).item == Completion("1", "a ", "b")
    row = {"prompt": messages(*SAID[:3]), "completion": messages(SAID[3])}
    read = read_completion(row).item
    assert isinstance(read, Conversation) and read.turns == tuple(SAID) and read.learnt == [3]
    assert read_completion({**row, "completion": "2"}).item.turns == tuple(SAID)
    for prompt in ("a", messages(SAID[0])):
        assert read_completion({"prompt": prompt, "completion": " "}).flaw == "empty completion"


@pytest.mark.parametrize(
    "values, reason",
    [
        ({"messages": []}, "messages is no list of messages"),
        ({"messages": "hi"}, "messages is no list of messages: 'hi'"),
        ({"messages": ["hi"]}, "message 1 is no object: 'hi'"),
        ({"messages": messages(("user", "hi"))}, "messages have no assistant"),
        (
            {"messages": messages(("narrator", "hi"))},
            "message 1 has an unknown role: 'narrator'; use system, user, assistant",
        ),
        ({"messages": [{"role": "user", "content": 5}]}, "message 1 has no text as content: 5"),
        (
            {"messages": [{"role": "user", "content": ["hi"]}]},
            "message 1 has a part of another type than text, which cannot be learnt: 'hi'",
        ),
        (
            {"messages": [{"role": "user", "content": [*PARTS, {"type": "image_url", "image_url": {"url": "x"}}]}]},
            "message 1 has a part of another type than text, which cannot be learnt: {'type': 'image_url'",
        ),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "has no text as content: None"),
        ({"messages": messages(*SAID), "tools": "f(x)"}, "tools is no list of JSON schemas: 'f(x)'"),
        ({"messages": messages(*SAID), "tools": TOOLS[0]}, "tools is no list of JSON schemas: {'type': 'function'"),
        ({"messages": messages(*SAID), "tools": [5]}, "tools is no list of JSON schemas: [5]"),
        ({"messages": messages(*SAID), "tools": [{"name": "\ud800"}]}, "tools is no valid Unicode"),
        ({"messages": [{"role": "user", "content": "\ud800"}]}, "messages is no valid Unicode"),
        (
            {"messages": [*messages(SAID[0]), {"role": "assistant", "content": "", "tool_calls": [{"id": "1"}]}]},
            "message 2 calls a tool, which cannot be learnt",
        ),
        (
            {"messages": messages(("assistant", "Hello."), ("user", "Hi!"))},
            "no message of the assistant is to be learnt",
        ),
    ],
)
def test_messages_that_cannot_be_read(values: dict[str, Any], reason: str) -> None:
    with pytest.raises(Malformed) as error:
        read_conversation(values)
    assert reason in str(error.value)


@pytest.mark.parametrize(
    "values, reason",
    [
        ({"prompt": "a"}, "no completion"),
        ({"prompt": 3, "completion": "a"}, "prompt is no text"),
        ({"prompt": messages(("user", "a")), "completion": messages(("user", "b"))}, "completion has no assistant"),
        ({"prompt": "a", "completion": messages(("assistant", "b"))}, "completion is no text"),
        ({"prompt": messages(("user", "a")), "completion": "\ud800"}, "completion is no valid Unicode"),
    ],
)
def test_completions_that_cannot_be_read(values: dict[str, Any], reason: str) -> None:
    with pytest.raises(Malformed) as error:
        read_completion(values)
    assert reason in str(error.value)


# Tokens ---------------------------------------------------------------------------------------------------------------


def test_only_what_the_assistant_says_is_learnt_with_its_end() -> None:
    made = tokenizer()
    [text] = encode_conversation(Conversation("x", tuple(SAID)), made)
    whole = "<user>Hi!</><assistant>Hello.</><user>1+1?</><assistant>2</>"
    assert made.decode([*text.prompt_ids, *text.target_ids]) == whole
    assert made.decode(text.prompt_ids) == "<user>Hi!</><assistant>"
    assert learnt(text, made) == ["Hello.</>", "2</>"]
    assert text.terms == len("Hello.</>2</>") < len(text.target_ids)
    [last] = encode_conversation(Conversation("x", tuple(SAID), first=2), made)
    assert learnt(last, made) == ["2</>"] and last.counted is None


def test_a_template_that_rewrites_the_past_gives_one_text_per_turn() -> None:
    made = tokenizer(FORGETFUL)
    turns = (("user", "Hi!"), ("assistant", "hm|Hello."), ("user", "1+1?"), ("assistant", "add|2"))
    first, second = encode_conversation(Conversation("x", turns), made)
    assert (first.id, second.id) == ("x#1", "x#2")
    assert made.decode([*first.prompt_ids, *first.target_ids]) == "<user>Hi!</><assistant>hm|Hello.</>"
    assert made.decode(second.prompt_ids) == "<user>Hi!</><assistant>Hello.</><user>1+1?</><assistant>"
    assert learnt(first, made) == ["hm|Hello.</>"] and learnt(second, made) == ["add|2</>"]


def test_a_completion_follows_its_prompt_and_ends() -> None:
    made = tokenizer(None)
    text = encode_completion(Completion("x", "2+2=", "4"), made)
    assert made.decode(text.prompt_ids) == "2+2=" and made.decode(text.target_ids) == "4<end>" and text.terms == 2
    with pytest.raises(InputError, match="its prompt is empty"):
        encode_completion(Completion("x", "", "4"), made)


@pytest.mark.parametrize(
    "template, message",
    [
        (None, "no chat template, which conversations need"),
        ("{{ raise_exception('roles must alternate') }}", "refuses it: roles must alternate"),
        ("{{ messages|length }}", "does not begin an answer with its generation prompt"),
    ],
)
def test_templates_that_cannot_be_used(template: str | None, message: str) -> None:
    with pytest.raises(InputError, match=message):
        encode_conversation(Conversation("x", tuple(SAID)), tokenizer(template))


def test_long_texts_lose_their_end_and_those_without_an_answer_are_left_out() -> None:
    made = tokenizer()
    task = ConversationTask(
        "own", "", lambda split: (Conversation("x", tuple(SAID)), Conversation("y", tuple(SAID[:2])))
    )
    limit = len("<user>Hi!</><assistant>Hello.</><user>1+1?</>")
    found = task.encode_lessons("train", made, limit)
    assert [len(text) for text in found.texts] == [limit, len("<user>Hi!</><assistant>Hello.</>")]
    assert found.truncated == 1 and not found.left_out and learnt(found.texts[0], made) == ["Hello.</>"]
    assert len(task.encode("test", made, limit)[0]) > limit
    with pytest.raises(InputError, match="no example has an answer within 5 tokens"):
        task.encode_lessons("train", made, 5)
    some = ConversationTask(
        "own", "", lambda split: (Conversation("x", (("user", "?" * 50), SAID[1])), *task.load(split))
    )
    assert some.encode_lessons("train", made, 40).left_out == {"no answer within 40 tokens": 1}


def test_truncation_keeps_the_beginning() -> None:
    text = EncodedText("x", [1, 2], [3, 4, 5], (True, False, True))
    assert truncate(text, 5) is text
    assert truncate(text, 4) == EncodedText("x", [1, 2], [3, 4], (True, False))
    assert truncate(text, 1) == EncodedText("x", [1], [], ()) and truncate(text, 1).terms == 0


def test_what_counts_is_part_of_the_digest_and_old_digests_stay() -> None:
    plain, some = EncodedText("x", [1], [2, 3]), EncodedText("x", [1], [2, 3], (True, False))
    assert tokens_digest([plain]) != tokens_digest([some])
    assert tokens_digest([plain]) == hashlib.sha256(b"([1], [2, 3])").hexdigest()
