from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Type
from safetensors.numpy import load_file
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from transformers.models.qwen2 import Qwen2Tokenizer

from bayeslora.errors import InputError
from bayeslora.models import convert_gguf
from bayeslora.models.gguf import GGUFError

from .ggufs import MERGES, SPECIAL, TEMPLATE, Recipe, tiny_model, tokens

ARCHITECTURES = ["llama", "qwen2"]
TEXTS = [
    "the  in\n\n1",
    "a  2",
    "\t\t9",
    "1. the\n2. in\n\n10. x",
    "it's I'LL",
    "e\u0301 é ¼ ½²",
    "x<|im_end|>the<tool> in",
    "",
]


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return Recipe().write(tiny_model("llama"), tmp_path / "m.gguf")


def _logits(model: PreTrainedModel) -> torch.Tensor:
    ids = torch.arange(5, 45).reshape(2, 20)
    with torch.no_grad():
        return model(input_ids=ids).logits


def _load(directory: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, use_safetensors=True)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_logits_are_those_of_the_original(tmp_path: Path, architecture: str, tied: bool) -> None:
    model = tiny_model(architecture, tied=tied)
    head = None if tied else model.lm_head.weight.detach().numpy()
    convert_gguf(Recipe(architecture, head=head).write(model, tmp_path / "m.gguf"), tmp_path / "out")
    converted = _load(tmp_path / "out")
    assert type(converted) is type(model)
    assert (converted.lm_head.weight is converted.model.embed_tokens.weight) is tied
    torch.testing.assert_close(_logits(converted), _logits(model), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kind", [Type.F16, Type.BF16, Type.Q8_0, Type.Q4_0, Type.Q4_1, Type.Q5_0, Type.Q5_1])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_quantised_files_are_converted_to_float16(tmp_path: Path, architecture: str, kind: Type) -> None:
    model = tiny_model(architecture)
    convert_gguf(Recipe(architecture, kind).write(model, tmp_path / "m.gguf"), tmp_path / "out")
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                stored = gguf.quants.quantize(parameter.numpy(), kind)
                parameter.copy_(torch.from_numpy(gguf.quants.dequantize(stored, kind)).half().float())
    weights = load_file(tmp_path / "out" / "model.safetensors")
    assert {w.dtype for w in weights.values()} == {np.dtype(np.float16)}
    torch.testing.assert_close(_logits(_load(tmp_path / "out")), _logits(model), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_tied_matrix_stored_twice_stays_tied_and_the_head_is_kept(tmp_path: Path, architecture: str) -> None:
    model = tiny_model(architecture)
    embedding = model.model.embed_tokens.weight.detach().numpy()
    noisy = (embedding + 0.03 * np.random.default_rng(0).standard_normal(embedding.shape)).astype(np.float16)
    source = Recipe(architecture, head=noisy.astype(np.float32)).write(model, tmp_path / "m.gguf")
    convert_gguf(source, tmp_path / "out")
    weights = load_file(tmp_path / "out" / "model.safetensors")
    assert "lm_head.weight" not in weights
    np.testing.assert_array_equal(weights["model.embed_tokens.weight"], noisy)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["tie_word_embeddings"] is True


def test_what_float16_cannot_hold_stays_float32(tmp_path: Path) -> None:
    model = tiny_model("llama")
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight[0, 0] = 1e5
    convert_gguf(Recipe().write(model, tmp_path / "m.gguf"), tmp_path / "out")
    weights = load_file(tmp_path / "out" / "model.safetensors")
    assert weights["model.layers.0.mlp.up_proj.weight"][0, 0] == 1e5
    assert weights["model.layers.0.mlp.down_proj.weight"].dtype == np.float16
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "float32"


def test_config_and_special_tokens(source: Path, tmp_path: Path) -> None:
    convert_gguf(source, tmp_path / "out")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["rms_norm_eps"] == 1e-5
    assert config["rope_parameters"] == {"rope_type": "default", "rope_theta": 1000.0}
    ids = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2}
    assert ids.items() <= config.items()
    assert json.loads((tmp_path / "out" / "generation_config.json").read_text()) == ids
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    named = (tokenizer.unk_token, tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token)
    assert named == (*SPECIAL, SPECIAL[-1])
    assert tokenizer.model_max_length == 64
    assert tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False) == (
        "<|im_start|>hi<|im_end|>\n"
    )
    assert (tmp_path / "out" / "chat_template.jinja").read_text() == TEMPLATE


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_text_survives_and_nothing_is_put_around_it(tmp_path: Path, architecture: str, text: str) -> None:
    convert_gguf(Recipe(architecture).write(tiny_model(architecture), tmp_path / "m.gguf"), tmp_path / "out")
    auto = AutoTokenizer.from_pretrained(tmp_path / "out")
    plain = Tokenizer.from_file(str(tmp_path / "out" / "tokenizer.json"))
    ids = auto(text).input_ids
    assert ids == plain.encode(text).ids
    expected = text.replace("e\u0301", "é") if architecture == "qwen2" else text  # Qwen normalises
    assert auto.decode(ids) == expected
    assert len(auto) == len([t for t in tokens() if not t.startswith("[PAD")])


def test_digits_are_split_off_before_anything_else(source: Path, tmp_path: Path) -> None:
    convert_gguf(source, tmp_path / "out")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert tokenizer.tokenize("\n\n1") == ["ĊĊ", "1"]
    assert tokenizer.tokenize("a  23") == ["a", "ĠĠ", "2", "3"]
    assert tokenizer.tokenize("<|im_end|>the") == ["<|im_end|>", "t", "he"]


@pytest.mark.parametrize("text", TEXTS)
def test_qwen_agrees_with_transformers_own_tokenizer(tmp_path: Path, text: str) -> None:
    convert_gguf(Recipe("qwen2").write(tiny_model("qwen2"), tmp_path / "m.gguf"), tmp_path / "out")
    vocab = {t: k for k, t in enumerate(tokens()) if not t.startswith("[PAD")}
    theirs = Qwen2Tokenizer(vocab=vocab, merges=[tuple(m.split(" ")) for m in MERGES])
    theirs.add_tokens([*SPECIAL, "<tool>"], special_tokens=True)
    assert Tokenizer.from_file(str(tmp_path / "out" / "tokenizer.json")).encode(text).ids == theirs(text).input_ids


def _refusals() -> dict[str, tuple[dict[str, Any], str]]:
    fields: dict[str, tuple[dict[str, Any], str]] = {
        "pre-tokenizer": (
            {"tokenizer.ggml.pre": "llama-bpe"},
            r"'llama' with tokenizer 'llama-bpe' is not supported, only",
        ),
        "tokenizer": ({"tokenizer.ggml.model": "llama"}, "only byte-level BPE"),
        "BOS": ({"tokenizer.ggml.add_bos_token": True}, "BOS token in front is not supported"),
        "no layers": ({"llama.block_count": None}, "field 'llama.block_count' is missing"),
        "zero layers": ({"llama.block_count": np.uint32(0)}, "must be at least 1, got 0"),
        "many layers": ({"llama.block_count": np.uint32(2**31)}, "2147483648 layers but only"),
        "one layer more": ({"llama.block_count": np.uint32(3)}, r"tensor 'blk\.2\.attn_norm\.weight' is missing"),
        "one layer less": ({"llama.block_count": np.uint32(1)}, r"tensor 'blk\.1\.attn_k\.weight' is not known"),
        "heads": ({"llama.attention.head_count": np.uint32(3)}, "do not fit width 32"),
        "width": ({"llama.feed_forward_length": np.uint32(65)}, r"must have shape \(65, 32\), got \(64, 32\)"),
        "type": ({"llama.block_count": "two"}, "must be of type int, got str"),
        "theta": ({"llama.rope.freq_base": np.float32("nan")}, "must be positive and finite, got nan"),
        "scaling": ({"llama.rope.scaling.type": "yarn"}, "rotary scaling 'yarn' is not supported"),
        "head width": ({"llama.attention.key_length": np.uint32(16)}, "key_length 16 is not supported, only 8"),
        "tokens": ({"tokenizer.ggml.tokens": tokens()[:-1]}, "tokens for an embedding of"),
        "token twice": ({"tokenizer.ggml.tokens": ["x"] * len(tokens())}, "empty or listed twice"),
        "token types": ({"tokenizer.ggml.token_type": [1, 1]}, "2 token types for"),
        "merge": ({"tokenizer.ggml.merges": ["Ġ t", "the in"]}, "merge 'the in' is not of two known tokens"),
        "special token": ({"tokenizer.ggml.eos_token_id": np.uint32(10**6)}, "is 1000000, which is no token"),
    }
    recipes: dict[str, tuple[dict[str, Any], str]] = {
        "missing tensor": ({"drop": "output_norm.weight"}, "tensor 'output_norm.weight' is missing"),
        "no embedding": ({"drop": "token_embd.weight"}, "tensor 'token_embd.weight' is missing"),
        "unknown tensor": (
            {"extra": {"rope_freqs.weight": np.ones(4, np.float32)}},
            "'rope_freqs.weight' is not known",
        ),
        "not finite": (
            {"extra": {"output_norm.weight": np.full(32, np.nan, np.float32)}},
            "values that are not finite",
        ),
    }
    return {name: ({"fields": value}, message) for name, (value, message) in fields.items()} | recipes


@pytest.mark.parametrize("recipe, message", _refusals().values(), ids=_refusals())
def test_what_cannot_be_converted_rightly_is_refused(tmp_path: Path, recipe: dict[str, Any], message: str) -> None:
    source = Recipe(**recipe).write(tiny_model("llama"), tmp_path / "m.gguf")
    with pytest.raises(GGUFError, match=message) as caught:
        convert_gguf(source, tmp_path / "out")
    assert "\n" not in str(caught.value)
    assert os.listdir(tmp_path) == ["m.gguf"]


def test_other_architectures_are_refused_by_name(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "gemma3")
    writer.add_tokenizer_pre("default")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(
        GGUFError, match=r"'gemma3' with tokenizer 'default' is not supported, only 'llama' with 'smollm'"
    ):
        convert_gguf(tmp_path / "m.gguf", tmp_path / "out")


def test_the_target_is_not_overwritten_unless_forced(source: Path, tmp_path: Path) -> None:
    target = tmp_path / "deep" / "out"
    convert_gguf(source, target)
    before = (target / "config.json").stat().st_mtime_ns
    with pytest.raises(InputError, match="not empty"):
        convert_gguf(source, target)
    assert (target / "config.json").stat().st_mtime_ns == before
    (target / "config.json").write_text("old")
    convert_gguf(source, target, force=True)
    assert json.loads((target / "config.json").read_text())["model_type"] == "llama"
    assert os.listdir(tmp_path / "deep") == ["out"]


def test_an_empty_directory_is_filled(source: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    convert_gguf(source, tmp_path / "out")
    assert (tmp_path / "out" / "config.json").is_file()


def test_force_replaces_only_what_a_conversion_wrote(source: Path, tmp_path: Path) -> None:
    target = tmp_path / "out"
    convert_gguf(source, target)
    (target / "thesis.txt").write_text("precious")
    with pytest.raises(InputError, match=r"holds 'thesis\.txt', which no conversion wrote"):
        convert_gguf(source, target, force=True)
    assert (target / "thesis.txt").read_text() == "precious"


def test_a_target_that_cannot_be_is_refused(source: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="is not a directory"):
        convert_gguf(source, source)
    with pytest.raises(InputError, match="cannot be written"):
        convert_gguf(source, source / "out")


def test_an_interrupted_conversion_leaves_nothing(source: Path, tmp_path: Path) -> None:
    def stop(done: int, total: int) -> None:
        if done == 5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        convert_gguf(source, tmp_path / "out", progress=stop)
    assert os.listdir(tmp_path) == ["m.gguf"]


def test_progress_goes_from_nothing_to_all(source: Path, tmp_path: Path) -> None:
    calls: list[tuple[int, int]] = []
    convert_gguf(source, tmp_path / "out", progress=lambda done, total: calls.append((done, total)))
    total = calls[-1][1]
    assert calls == [(k, total) for k in range(total + 1)]


def test_all_files_are_equally_readable(source: Path, tmp_path: Path) -> None:
    convert_gguf(source, tmp_path / "out")
    modes = {stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "out").iterdir()}
    assert len(modes) == 1
