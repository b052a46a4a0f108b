"""Lean rotary embeddings against those of transformers: values, gradients, operators, and which layers take them."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.models.glm.modeling_glm import apply_rotary_pos_emb  # interleaved
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb as halves

from adapter.cases import base_model, tokens
from bayeslora.adapter.lean_layers import LeanLayers
from bayeslora.adapter.rotary import _is_rotation, lean_attention, lean_rotation
from rounding import summed


def given(dtype=torch.float64, heads=(4, 2), layout="by head", **options):
    """Queries and keys ``[2, heads, 5, 8]`` and angles, whose halves differ, as those of no model do."""

    def states(heads):
        if layout == "by head":
            return torch.randn(2, heads, 5, 8, dtype=dtype).requires_grad_(**options)
        return torch.randn(2, 5, heads, 8, dtype=dtype).requires_grad_(**options)

    q, k = (states(it) for it in heads)
    cos, sin = torch.randn(2, 2, 5, 8, dtype=dtype)
    return q, k, cos, sin


@pytest.mark.parametrize("layout", ["by head", "by token"])
@pytest.mark.parametrize("seed", range(3))
def test_values_and_gradients_are_those_of_the_formula(seed, layout):
    """In double precision, to the rounding of a sum of two products."""
    torch.manual_seed(seed)
    q, k, cos, sin = given(layout=layout)
    axis = 1 if layout == "by head" else 2
    lean, plain = lean_rotation(halves)(q, k, cos, sin, axis), halves(q, k, cos, sin, axis)
    slopes = [torch.randn_like(it) for it in plain]
    for ours, theirs in zip(
        [*lean, *torch.autograd.grad(lean, [q, k], slopes)],
        [*plain, *torch.autograd.grad(plain, [q, k], slopes)],
        strict=True,
    ):
        torch.testing.assert_close(ours, theirs, rtol=1e-14, atol=1e-14)


def test_the_gradient_is_that_of_finite_differences():
    torch.manual_seed(0)
    q, k, cos, sin = given()
    assert torch.autograd.gradcheck(lambda q, k: lean_rotation(halves)(q, k, cos, sin), (q, k))


def test_in_half_precision_it_rounds_no_more_often_than_the_formula():
    """The product is rounded once, and the sum; the formula of transformers rounds the second product too."""
    torch.manual_seed(0)
    exact = given(torch.float64, requires_grad=False)
    rounded = [it.bfloat16() for it in exact]
    wanted = halves(*(it.double() for it in rounded))
    lean, plain = lean_rotation(halves)(*rounded), halves(*rounded)
    for ours, theirs, right in zip(lean, plain, wanted, strict=True):
        assert ours.dtype == torch.bfloat16
        assert (ours.double() - right).abs().mean() <= (theirs.double() - right).abs().mean()


class Operators(TorchDispatchMode):
    """Elements that operators write, views aside."""

    def __init__(self):
        super().__init__()
        self.calls, self.written = [], 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if not func.is_view and isinstance(result, torch.Tensor):
            self.calls.append(func.overloadpacket.__name__)
            self.written += result.numel()
        return result


def test_three_operators_write_twice_the_input_in_either_direction():
    q, k, cos, sin = given()
    with Operators() as ahead:
        rotated = lean_rotation(halves)(q, k, cos, sin)
    slopes = [torch.ones_like(it) for it in rotated]
    with Operators() as back:
        torch.autograd.grad(rotated, [q, k], slopes)
    for seen in (ahead, back):
        assert seen.calls == ["mul", "addcmul_", "addcmul_"] * 2 and seen.written == 2 * (q.numel() + k.numel())


@pytest.mark.parametrize("kept", ["cos", "sin"])
def test_angles_that_need_gradients_get_them(kept):
    q, k, cos, sin = given()
    angles = {"cos": cos, "sin": sin}
    angles[kept].requires_grad_()
    lean, plain = (rotate(q, k, **angles)[0].sum() for rotate in (lean_rotation(halves), halves))
    assert torch.equal(*(torch.autograd.grad(it, angles[kept])[0] for it in (lean, plain)))


def test_mixed_precisions_are_left_to_the_formula():
    q, k, cos, sin = given(torch.float32, requires_grad=False)
    lean = lean_rotation(halves)(q.bfloat16(), k.bfloat16(), cos, sin)
    plain = halves(q.bfloat16(), k.bfloat16(), cos, sin)
    assert all(torch.equal(*pair) and pair[0].dtype == torch.float32 for pair in zip(lean, plain, strict=True))


def test_other_rotations_are_left_alone():
    def swapped(q, k, cos, sin, unsqueeze_dim=1):
        return halves(q, k, sin, cos, unsqueeze_dim)

    def with_positions(q, k, cos, sin, position_ids=None, unsqueeze_dim=1):
        return halves(q, k, cos, sin, unsqueeze_dim)

    class Attention(torch.nn.Module):
        def forward(self, q, k, cos, sin):
            return apply_rotary_pos_emb(q, k, cos, sin)

    others = (apply_rotary_pos_emb, swapped, with_positions, None, torch.nn.Identity())
    assert _is_rotation(halves) and not any(_is_rotation(it) for it in others)
    assert lean_attention(Attention()) is None


@pytest.mark.parametrize("architecture", ["llama", "qwen3"])
def test_a_model_computes_the_same_with_it_and_its_code_is_untouched(architecture):
    model, ids = base_model(architecture).eval(), tokens(3)
    attention = next(it for it in model.modules() if type(it).__name__.endswith("Attention"))
    lean = LeanLayers(model)
    lean.forwards = {it: forward for it, forward in lean.forwards.items() if it.__class__ is attention.__class__}
    assert lean.forwards
    before = model(input_ids=ids).logits
    with lean, Operators() as seen:
        found = model(input_ids=ids).logits
    assert "addcmul_" in seen.calls
    torch.testing.assert_close(found, before, **summed(before))
    assert type(attention).forward.__globals__["apply_rotary_pos_emb"].__module__ == type(attention).__module__
    assert torch.equal(model(input_ids=ids).logits, before)


def test_layers_without_rotary_embeddings_are_left_alone():
    model = base_model("gpt2")
    assert not any(lean_attention(it) for it in model.modules())


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu_it_keeps_the_layout_of_queries():
    """Attention takes them as they come out of the projections, by token; no copy is made in between."""
    q = torch.randn(2, 5, 4, 8, device="cuda", dtype=torch.bfloat16).transpose(1, 2)
    cos, sin = torch.randn(2, 2, 5, 8, device="cuda", dtype=torch.bfloat16)
    lean, plain = lean_rotation(halves)(q, q, cos, sin)[0], halves(q, q, cos, sin)[0]
    assert lean.stride() == q.stride()
    torch.testing.assert_close(lean, plain, rtol=2**-6, atol=2**-6)
