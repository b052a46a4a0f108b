"""Tokens that hold a part of a character are told by their bytes."""

from __future__ import annotations

import httpx
import pytest
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from bayeslora.server.words import Word, Words
from train.tiny import make_tokenizer


def with_fallback() -> PreTrainedTokenizerFast:
    """A tokenizer that writes characters it does not know as bytes, as that of Llama 2."""
    vocabulary = ["?", ":", "a", "▁", *(f"<0x{byte:02X}>" for byte in range(256))]
    made = Tokenizer(models.BPE({it: k for k, it in enumerate(vocabulary)}, [], unk_token="?", byte_fallback=True))
    made.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return PreTrainedTokenizerFast(tokenizer_object=made, unk_token="?")


@pytest.mark.parametrize("tokenizer", [make_tokenizer(), with_fallback()], ids=["byte-level", "fallback"])
def test_a_text_can_be_rebuilt_from_the_bytes_of_its_tokens(tokenizer: PreTrainedTokenizerBase) -> None:
    words = [Words(tokenizer)(token) for token in tokenizer("a😀é").input_ids]
    assert b"".join(word.bytes or b"" for word in words) == "a😀é".encode()
    assert [word.name for word in words] == ["a", *(f"bytes:\\x{byte:02x}" for byte in "😀é".encode())]
    assert words[1].text == "\ufffd"


def test_the_replacement_character_itself_is_a_text() -> None:
    assert Word("\ufffd", "\ufffd".encode()).name == "\ufffd"


def test_parts_of_characters_stay_apart_in_replies(url: str) -> None:
    """Of 300 tokens half are parts of a character, which all have the same text."""
    body = {"prompt": "red", "max_tokens": 4, "temperature": 0, "logprobs": 20}
    found = httpx.post(f"{url}/v1/completions", json=body).json()["choices"][0]["logprobs"]["top_logprobs"]
    assert [len(top) for top in found] == [20] * 4
    chat = {"messages": [{"role": "user", "content": "red"}], "max_tokens": 4, "temperature": 0}
    reply = httpx.post(f"{url}/v1/chat/completions", json=chat | {"logprobs": True, "top_logprobs": 20}).json()
    for token in reply["choices"][0]["logprobs"]["content"]:
        assert len({bytes(top["bytes"]) for top in token["top_logprobs"]}) == 20
