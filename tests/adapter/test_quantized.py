"""4- and 8-bit base layers of bitsandbytes."""

import warnings

import pytest
import torch
from peft import get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.pytorch_utils import Conv1D

from adapter.cases import SIZES, config, generator, logits, tokens
from bayeslora import find_holder
from bayeslora.adapter import quantised as backends
from bayeslora.models import four_bit

bitsandbytes = pytest.importorskip("bitsandbytes", reason="needs the extra 'quant'")


def quantised(bits, width=64):
    """A tiny Llama whose attention projections are quantised, as transformers would do.

    Some versions of bitsandbytes misread rows that are no multiple of 64 long on a CPU, so these are 64 long.
    """
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = LlamaForCausalLM(LlamaConfig(**SIZES | {"hidden_size": width})).eval()
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


@pytest.mark.parametrize("width, right", [(64, True), (128, True), (96, None), (32, None)])
def test_four_bits_are_read_back_as_they_were_written(width, right):
    """Where rows are whole blocks; elsewhere it is for bitsandbytes to say, and for us to know."""
    weight = torch.randn(64, width, generator=generator()).to(DEVICE)
    stored, state = bitsandbytes.functional.quantize_4bit(weight, quant_type="nf4")
    read = bitsandbytes.functional.dequantize_4bit(stored, state)
    near = bool((read - weight).norm() < 0.15 * weight.norm())
    on_cpu = DEVICE == "cpu"
    assert near == (True if right or not on_cpu else not four_bit.reads_rows_wrongly())


class Packed(torch.Tensor):
    """A weight that only looks like a tensor, as torchao's do."""


def test_only_layers_that_may_be_quantised_are_shown_to_peft(monkeypatch):
    """For these it imports all libraries there are."""
    shown = []
    monkeypatch.setattr(backends, "resolve_quantization_backend", shown.append)
    plain, packed = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)
    packed.weight = torch.nn.Parameter(torch.ones(4, 4).as_subclass(Packed), requires_grad=False)
    eight = quantised(8).model.layers[0].self_attn.q_proj
    for layer in (plain, plain.to("meta"), Conv1D(4, 4), packed, eight):
        assert backends.quantisation_backend(layer) is None
    assert shown == [packed, eight]


def told(model):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        get_peft_model(model, config(target_modules=["q_proj", "k_proj"]))
    return [str(it.message) for it in caught if "bitsandbytes misreads" in str(it.message)]


def test_rows_that_are_misread_are_told_of_once(monkeypatch):
    monkeypatch.setattr(four_bit, "reads_rows_wrongly", lambda: True)
    model = quantised(4, width=32).cpu()
    (line,) = told(model)
    assert "4 layers of this model (32 in model.layers.0.self_attn.q_proj)" in line and "use a GPU, 8 bits" in line
    assert not told(quantised(4, width=64).cpu()) and not told(quantised(8, width=32).cpu())
    monkeypatch.setattr(four_bit, "reads_rows_wrongly", lambda: False)
    assert not told(quantised(4, width=32).cpu())


def test_a_model_is_told_of_once(monkeypatch):
    monkeypatch.setattr(four_bit, "reads_rows_wrongly", lambda: True)
    model = quantised(4, width=32).cpu()
    with pytest.warns(UserWarning, match="bitsandbytes misreads 4-bit weights on this CPU"):
        four_bit.warn_of_wrong_rows(model)
    assert not told(model)
