"""4- and 8-bit base layers of bitsandbytes."""

import pytest
import torch
from peft import get_peft_model

from adapter.cases import base_model, config, generator, logits, tokens
from bayeslora import find_holder

bitsandbytes = pytest.importorskip("bitsandbytes", reason="needs the extra 'quant'")


def quantised(bits):
    """A tiny Llama whose attention projections are quantised, as transformers would do."""
    model = base_model()
    for layer in model.model.layers:
        for name in ("q_proj", "k_proj"):
            old = getattr(layer.self_attn, name)
            if bits == 4:
                new = bitsandbytes.nn.Linear4bit(
                    old.in_features, old.out_features, bias=False, compute_dtype=torch.float32
                )
                new.weight = bitsandbytes.nn.Params4bit(old.weight.data, requires_grad=False, quant_type="nf4")
            else:
                new = bitsandbytes.nn.Linear8bitLt(
                    old.in_features, old.out_features, bias=False, has_fp16_weights=False
                )
                new.weight = bitsandbytes.nn.Int8Params(old.weight.data, requires_grad=False, has_fp16_weights=False)
            setattr(layer.self_attn, name, new.to(DEVICE))
    return model.to(DEVICE)


DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BITS = pytest.mark.parametrize("bits", [4, 8])


@pytest.fixture
def model(bits):
    return get_peft_model(quantised(bits), config(target_modules=["q_proj", "k_proj"])).eval()


def answers(model):
    return logits(model, tokens().to(DEVICE))


@BITS
def test_forward_and_draws(model, bits):
    base = answers(quantised(bits))
    mean = answers(model)
    assert (mean - base).abs().max() > 1e-3
    with model.disable_adapter():
        torch.testing.assert_close(answers(model), base, atol=1e-4, rtol=1e-3)
    with model.draws(2, generator()):
        assert not torch.equal(answers(model), mean)


@BITS
def test_training_reaches_every_parameter(model, bits):
    model.train()
    ids = tokens().to(DEVICE)
    model(input_ids=ids, labels=ids).loss.backward()
    for name, parameter in find_holder(model).named_parameters():
        assert parameter.grad is not None and parameter.grad.abs().sum() > 0, name


@BITS
@pytest.mark.filterwarnings("ignore")
def test_merge_is_close_and_unmerge_is_exact(model, bits):
    before = answers(model)
    base = answers(quantised(bits))
    model.merge_adapter()
    assert (answers(model) - before).abs().max() < (base - before).abs().max(), "nearer to the adapted than to the base"
    model.unmerge_adapter()
    torch.testing.assert_close(answers(model), before, atol=1e-6, rtol=0)


@BITS
def test_saving(model, bits, tmp_path):
    from peft import PeftModel

    model.save_pretrained(tmp_path)
    loaded = PeftModel.from_pretrained(quantised(bits), tmp_path).eval()
    torch.testing.assert_close(answers(loaded), answers(model))
