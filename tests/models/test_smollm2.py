"""The real SmolLM2. Expected ids are llama.cpp's."""

from __future__ import annotations

import shutil
from collections.abc import Iterator

import pytest
import torch

from bayeslora.models import LoadedModel, load_model
from bayeslora.models.smollm2 import INSTALL, find_smollm2

pytestmark = [
    pytest.mark.system,
    pytest.mark.skipif(find_smollm2() is None, reason=f"the model is not installed: {INSTALL}"),
]

IDS = {
    "\n\n1": [1116, 33],
    "a  2": [81, 256, 34],
    "\t\t9": [1656, 41],
    "1. a\n2. b\n\n10. c": [33, 30, 253, 198, 34, 30, 278, 1116, 33, 32, 30, 265],
    "Hello<|im_end|>": [19556, 2],
    " A": [330],
    " B": [389],
    " C": [340],
    " D": [422],
    " yes": [9805],
    " no": [787],
    " True": [3635],
    " False": [4178],
    " positive": [2731],
    " negative": [3524],
    "": [],
}


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LoadedModel]:
    cache = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("BAYESLORA_CACHE", str(cache))
        yield load_model("smollm2", device="cpu")
    shutil.rmtree(cache)  # pytest would keep a quarter of a gigabyte


@pytest.mark.parametrize("text, ids", IDS.items())
def test_token_ids(loaded: LoadedModel, text: str, ids: list[int]) -> None:
    assert loaded.tokenizer(text).input_ids == ids
    assert loaded.tokenizer.decode(ids) == text


def test_special_tokens_and_chat_template(loaded: LoadedModel) -> None:
    tokenizer = loaded.tokenizer
    ids = (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id, tokenizer.unk_token_id)
    assert ids == (1, 2, 2, 0)
    assert len(tokenizer) == 49152
    chat = [{"role": "user", "content": "Hi"}]
    text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert isinstance(text, str) and text.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")


def test_it_is_a_plain_trainable_tied_model(loaded: LoadedModel) -> None:
    model = loaded.model
    assert type(model).__name__ == "LlamaForCausalLM"
    assert sum(parameter.numel() for parameter in model.parameters()) == 134_515_008
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert all(parameter.requires_grad and parameter.dtype == torch.float32 for parameter in model.parameters())
    assert not getattr(model, "is_quantized", False)
    assert model.config.rms_norm_eps == 1e-5 and model.config.rope_parameters["rope_theta"] == 100_000


def test_it_knows_the_capital_of_france(loaded: LoadedModel) -> None:
    inputs = loaded.tokenizer("The capital of France is", return_tensors="pt")
    output = loaded.model.generate(**inputs, max_new_tokens=1, do_sample=False)
    assert loaded.tokenizer.decode(output[0, -1]) == " Paris"
