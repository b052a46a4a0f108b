"""Lean layers against the layers they stand for: values, gradients, and what is kept for the backward pass."""

import functools
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers import Gemma2Config, Gemma2ForCausalLM
from transformers.activations import ACT2FN
from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from adapter.cases import SIZES, adapted, base_model, tokens
from bayeslora import find_holder
from bayeslora.adapter import lean_layers
from bayeslora.adapter.lean_layers import LeanLayers, _GatedProduct, lean_gate, lean_norm
from bayeslora.adapter.sampling import Sampling, sampled
from bayeslora.predict.generation.writing import generate_apart
from bayeslora.predict.mc import posterior_predictive
from bayeslora.train import fit
from bayeslora.train.objective import TokenObjective
from predict.test_generate import PROMPTS, SHORT, TOKENIZER, writer
from rounding import summed
from train.test_fit import settings
from train.test_objective import texts


def kinds(model):
    return sorted(type(module).__name__ for module in LeanLayers(model).forwards)


@pytest.mark.parametrize(
    ("architecture", "wanted"),
    [
        ("llama", ["LlamaAttention"] * 2 + ["LlamaMLP"] * 2 + ["LlamaRMSNorm"] * 5),
        ("qwen3", ["Qwen3Attention"] * 2 + ["Qwen3MLP"] * 2 + ["Qwen3RMSNorm"] * 9),
        ("qwen3_moe", ["Qwen3MoeAttention"] * 2 + ["Qwen3MoeRMSNorm"] * 9),
        ("gpt2", []),
    ],
)
def test_known_layers_are_found(architecture, wanted):
    model = adapted(architecture, target_modules=["c_attn"] if architecture == "gpt2" else ["q_proj"])
    assert kinds(model) == wanted


def test_a_norm_of_another_formula_is_left_alone():
    """Gemma multiplies by one plus the weight."""
    model = Gemma2ForCausalLM(Gemma2Config(**SIZES, head_dim=8)).requires_grad_(False)
    assert kinds(model) == ["Gemma2Attention"] * 2 + ["Gemma2MLP"] * 2


@pytest.mark.parametrize("eps", [1e-6, 1e-5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norms_are_recognised_in_every_precision(dtype, eps):
    norm = base_model("llama").model.norm.to(dtype).requires_grad_(False)
    with torch.no_grad():
        norm.weight.uniform_(0.5, 2.0)
        norm.variance_epsilon = eps
    lean = lean_norm(norm)
    given = torch.randn(3, 32).to(dtype)
    torch.testing.assert_close(lean(given), norm(given))
    other = given.to(torch.float32 if dtype == torch.bfloat16 else torch.bfloat16)
    assert torch.equal(lean(other), norm(other)) and lean(other).dtype == norm(other).dtype
    assert lean_norm(norm.requires_grad_()) is None


def test_a_norm_that_is_divided_among_processes_is_left_alone():
    norm = base_model("llama").model.norm.requires_grad_(False)
    norm.weight.device_mesh = "as sharded tensors have it"
    assert lean_norm(norm) is None


def test_a_norm_with_its_epsilon_elsewhere_is_left_alone():
    class OtherRMSNorm(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight, self.eps = nn.Parameter(torch.ones(16), requires_grad=False), 1e-6

        def forward(self, x):
            return self.weight * x / (x.pow(2).mean(-1, keepdim=True).sqrt() + self.eps)

    assert lean_norm(OtherRMSNorm()) is None


def test_a_gated_layer_that_does_more_is_left_alone():
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.gate_proj, self.up_proj, self.down_proj = (nn.Linear(4, 4) for _ in range(3))
            self.act_fn, self.factor = F.silu, 2.0

        def forward(self, x):
            return self.factor * self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))

    class Swapped(Scaled):
        def forward(self, x):
            return self.down_proj(self.gate_proj(x) * self.act_fn(self.up_proj(x)))

    class Right(Scaled):
        def forward(self, x):
            return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))

    assert lean_gate(Scaled()) is None and lean_gate(Swapped()) is None and lean_gate(Right()) is not None


@pytest.mark.parametrize("act", ["silu", "gelu_pytorch_tanh", "relu2"])
@pytest.mark.parametrize("needed", [(True, True), (True, False), (False, True)])
def test_the_gated_product_has_the_gradient_of_its_formula(act, needed):
    """The same operators as without it, so equal to the bit."""
    given = [torch.randn(5, 7, requires_grad=it) for it in needed]
    slope = torch.randn(5, 7)
    with_it = torch.autograd.grad(
        _GatedProduct.apply(*given, ACT2FN[act]), [it for it in given if it.requires_grad], slope
    )
    without = torch.autograd.grad(ACT2FN[act](given[0]) * given[1], [it for it in given if it.requires_grad], slope)
    assert all(torch.equal(a, b) for a, b in zip(with_it, without, strict=True))


def kept(model, ids):
    """Bytes of activations that a pass keeps, each tensor once."""
    sizes = {}

    def pack(tensor):
        if not isinstance(tensor, nn.Parameter):
            sizes[tensor.untyped_storage().data_ptr()] = (tensor.untyped_storage().nbytes(), tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model(input_ids=ids).logits.sum().backward()
    return sum(size for size, _ in sizes.values())


def test_the_activation_of_a_gated_layer_is_not_kept():
    """One tensor of the size of the gate fewer for every layer through which gradients go; norms are one operator on GPUs."""
    model, ids = adapted(posterior="point", target_modules=["q_proj"]).train(), tokens(3)
    plain = kept(model, ids)
    lean = LeanLayers(model)
    lean.forwards = {module: it for module, it in lean.forwards.items() if type(module).__name__ == "LlamaMLP"}
    with lean:
        assert plain - kept(model, ids) == 2 * ids.numel() * SIZES["intermediate_size"] * 4


def test_layers_are_as_before_after_the_block_and_after_an_error():
    model, ids = adapted(target_modules=["q_proj"]).eval(), tokens(2)
    before = model(input_ids=ids).logits
    with LeanLayers(model):
        torch.testing.assert_close(model(input_ids=ids).logits, before)
    with pytest.raises(IndexError), LeanLayers(model):
        model(input_ids=ids + 1000)
    assert not any("forward" in vars(module) for module in model.modules())
    assert torch.equal(model(input_ids=ids).logits, before)


def test_layers_that_something_else_has_changed_are_left_alone():
    model = base_model("llama").requires_grad_(False)
    norm = model.model.norm
    norm.forward = functools.partial(type(norm).forward, norm)
    with LeanLayers(model):
        assert isinstance(norm.forward, functools.partial)
    assert isinstance(norm.forward, functools.partial)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_a_step_has_the_same_gradient(monkeypatch, checkpointing):
    gradients = []
    for devices in ((), ("cpu",)):
        monkeypatch.setattr(lean_layers, "LEAN", devices)
        model = adapted(posterior="meanfield", target_modules=["q_proj", "down_proj"])
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        chosen = settings(batch_size=4, clip=1e9, gradient_checkpointing=checkpointing)
        fit.Fit(TokenObjective(model), texts(6), chosen, 0, lambda: {"nll": 0.0})._take_step(0)
        assert not any("forward" in vars(module) for module in model.modules())
        gradients.append({name: p.grad for name, p in find_holder(model).named_parameters() if p.grad is not None})
    assert gradients[0].keys() == gradients[1].keys() and gradients[0]
    for name, value in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], value, **summed(value), msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu_a_norm_is_one_operator_that_keeps_its_input():
    norm = base_model("llama").model.norm.to("cuda", torch.bfloat16).requires_grad_(False)
    given = torch.randn(3, 32, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    sizes = []
    with torch.autograd.graph.saved_tensors_hooks(lambda it: sizes.append(it.nbytes) or it, lambda it: it):
        found = lean_norm(norm)(given)
    assert "rms" in found.grad_fn.name().lower()
    assert sum(sizes) <= given.nbytes + norm.weight.nbytes + 3 * 4  # and one number for every row
    torch.testing.assert_close(found, norm(given))


def test_inputs_of_adapted_layers_that_can_be_computed_again_are_not_kept():
    """Neither the normalised input of the queries nor the product before ``down_proj``, in two layers each."""
    given = {"posterior": "point", "target_modules": ["q_proj", "down_proj"]}
    model, ids = adapted(**given).train(), tokens(3)
    lean = LeanLayers(model)
    with lean:
        less = kept(model, ids)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(lean_layers, "recomputable", lambda output, function, *inputs: output)
            more = kept(model, ids)
    # on a CPU the norm is made of several operators, of which the last but one is kept either way
    assert more - less >= 2 * ids.numel() * SIZES["intermediate_size"] * 4


def test_blocks_within_blocks_leave_the_layers_to_the_outermost():
    model = adapted(target_modules=["q_proj"]).eval()
    lean, others = LeanLayers(model), LeanLayers(model)

    def are_lean():
        return all(vars(module)["forward"] is forward for module, forward in lean.forwards.items())

    with lean:
        with others, lean:
            assert are_lean()
        assert are_lean()
    assert not any("forward" in vars(module) for module in model.modules())


def predictions(model, ids):
    """By every way in which a model predicts: scores under draws, the averaged next token, texts."""
    with sampled(model, Sampling(2)), torch.no_grad():
        yield model(input_ids=ids.repeat(2, 1)).logits
    with posterior_predictive(model, 2), torch.no_grad():
        yield model(input_ids=ids).logits


def test_predictions_use_them_where_they_are_faster(monkeypatch):
    model, ids = adapted(posterior="meanfield", target_modules=["q_proj"]).eval(), tokens(3)
    calls = []
    monkeypatch.setattr(F, "rms_norm", lambda *given: calls.append(1) or torch.rms_norm(*given))
    plain = list(predictions(model, ids))
    assert not calls
    monkeypatch.setattr(lean_layers, "LEAN", ("cpu",))
    for found, wanted in zip(predictions(model, ids), plain, strict=True):
        assert len(calls) >= 5
        calls.clear()
        torch.testing.assert_close(found, wanted, **summed(wanted))
    assert lean_layers.lean_predictions(model) is lean_layers.lean_predictions(model)


def test_answers_of_draws_are_written_with_them(monkeypatch):
    model = writer()
    plain = generate_apart(model, TOKENIZER, PROMPTS[0], SHORT, samples=2)
    calls = []
    monkeypatch.setattr(F, "rms_norm", lambda *given: calls.append(1) or torch.rms_norm(*given))
    monkeypatch.setattr(lean_layers, "LEAN", ("cpu",))
    assert generate_apart(model, TOKENIZER, PROMPTS[0], SHORT, samples=2) == plain and calls


def test_predictions_keep_nothing_of_a_gated_layer_but_its_product():
    """Gate and up are as large as it, and would be alive beside the last product."""
    mlp = base_model("llama").model.layers[0].mlp.requires_grad_(False)
    made, alive = [], []
    for name in ("gate_proj", "up_proj"):
        getattr(mlp, name).register_forward_hook(lambda module, args, output: made.append(weakref.ref(output)))
    mlp.down_proj.register_forward_pre_hook(lambda module, args: alive.append([it() is not None for it in made]))
    forward, given = lean_gate(mlp), torch.randn(2, 3, SIZES["hidden_size"])
    with torch.no_grad():
        found = forward(given)
        torch.testing.assert_close(found, type(mlp).forward(mlp, given))
    assert alive[0] == [False, False]
    forward(given.requires_grad_())
    assert alive[-1][-2:] == [True, True]  # the gradient needs them


class CentredRMSNorm(LlamaRMSNorm):
    """Something else of this name."""

    def forward(self, hidden_states):
        return super().forward(hidden_states - hidden_states.mean(-1, keepdim=True))


@pytest.mark.parametrize("kind, known", [(LlamaRMSNorm, True), (CentredRMSNorm, False), (Gemma2RMSNorm, False)])
def test_norms_without_data_are_those_that_they_are_with_it(kind, known):
    """For estimates: nothing can be computed on the device ``meta``."""
    with torch.device("meta"):
        empty = kind(8).requires_grad_(False)
    assert (lean_norm(empty) is not None) == (lean_norm(kind(8).requires_grad_(False)) is not None)
    assert (lean_norm(empty) is not None) == known
