"""Layers of the frozen model that keep less for the backward pass, and take fewer launches.

The normalisations and gated layers of Hugging Face's models are written as many small operators. Most of them keep
something until the backward pass: in all most of what a training step has in memory. Here a normalisation is one operator that
keeps its input alone, and a gated layer computes its activation again in the backward pass. What they pass on to adapted layers
is computed again there too. Rotary embeddings take fewer operators.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from copy import deepcopy
from types import SimpleNamespace
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bayeslora.adapter.recompute import recomputable
from bayeslora.adapter.rotary import lean_attention

Forward = Callable[[Tensor], Tensor]

LEAN = ("cuda",)
"""Devices on which lean layers are faster."""

_found: WeakKeyDictionary[nn.Module, LeanLayers] = WeakKeyDictionary()


def lean_layers(model: nn.Module, device: torch.device) -> AbstractContextManager[None]:
    """A block in which steps of training are taken, with lean layers where they are faster. It can be entered again."""
    return LeanLayers(model) if device.type in LEAN else nullcontext()


def lean_predictions(model: nn.Module) -> AbstractContextManager[None]:
    """The same for predictions, for which the layers of a model are looked for once."""
    device = next(model.parameters()).device
    if device.type not in LEAN:
        return nullcontext()
    if model not in _found:
        _found[model] = LeanLayers(model)
    return _found[model]


class LeanLayers:
    """The layers of a model that are of the known kinds; they are lean inside a ``with`` block, and inside a block in it."""

    def __init__(self, model: nn.Module) -> None:
        own = (it for it in model.modules() if "forward" not in vars(it))
        found = ((it, lean_norm(it) or lean_gate(it) or lean_attention(it)) for it in own)
        self.forwards = {module: forward for module, forward in found if forward is not None}
        self._changed: list[list[nn.Module]] = []

    def __enter__(self) -> None:
        """Change layers, but for those that something else has changed, such as an outer block."""
        self._changed.append([module for module in self.forwards if "forward" not in vars(module)])
        for module in self._changed[-1]:
            module.forward = self.forwards[module]

    def __exit__(self, *exc: object) -> None:
        for module in self._changed.pop():
            del module.forward


def lean_norm(module: nn.Module) -> Forward | None:
    """The forward pass of a root-mean-square normalisation by one operator, or ``None`` if the module is anything else."""
    if not type(module).__name__.endswith("RMSNorm") or [name for name, _ in module.named_parameters()] != ["weight"]:
        return None
    weight = module.get_parameter("weight")
    epsilon = next((value for name, value in vars(module).items() if name in ("variance_epsilon", "eps")), None)
    if weight.ndim != 1 or not isinstance(epsilon, float) or weight.requires_grad or _is_sharded(weight):
        return None

    def forward(hidden_states: Tensor) -> Tensor:
        if hidden_states.dtype != module.weight.dtype:  # models differ in what precision comes out then
            found: Tensor = type(module).forward(module, hidden_states)
            return found
        return recomputable(normalise(hidden_states), normalise, hidden_states)

    def normalise(hidden_states: Tensor) -> Tensor:
        weight = module.get_parameter("weight")
        return F.rms_norm(hidden_states, weight.shape, weight, epsilon)

    if weight.is_meta:  # its values are those of any other weight
        return None if lean_norm(_with_values(module)) is None else forward
    return forward if _same_norm(module, forward, weight) else None


def _with_values(module: nn.Module) -> nn.Module:
    """A copy of a module without data whose parameters are ones."""
    copy = deepcopy(module).to_empty(device="cpu")
    for parameter in copy.parameters():
        nn.init.ones_(parameter)
    return copy


def _is_sharded(weight: Tensor) -> bool:
    """Whether the weight is divided among processes, and put together only where the module itself is called."""
    return hasattr(weight, "device_mesh") or not weight.numel()


@torch.no_grad()
def _same_norm(module: nn.Module, forward: Forward, weight: Tensor) -> bool:
    """Whether both give the same values on some numbers, up to roundings: of the values, and of a sum in another order."""
    tolerance = max(4 * torch.finfo(weight.dtype).eps, 2e-6)
    # as large as the square root of epsilon, so that an epsilon of another kind would be seen
    for size in (1.0, 1e-3):
        given = size * torch.linspace(-1.5, 2.5, 2 * len(weight), device=weight.device).view(2, -1).to(weight.dtype)
        wanted, found = module(given).float(), forward(given).float()
        if not torch.allclose(found, wanted, rtol=tolerance, atol=1e-30):
            return False
    return True


def lean_gate(module: nn.Module) -> Forward | None:
    """The forward pass of a gated layer ``down(act(gate x) · up x)``, or ``None`` if the module is anything else."""
    names = ("gate_proj", "up_proj", "down_proj")
    act = getattr(module, "act_fn", None)
    if not all(isinstance(getattr(module, name, None), nn.Module) for name in names) or not callable(act):
        return None

    def forward(x: Tensor) -> Tensor:
        down: Tensor = module.down_proj(gated(x))  # type: ignore[operator]
        return down

    def gated(x: Tensor) -> Tensor:
        """A function of its own: in predictions nothing but the product is alive when it returns."""
        gate, up = module.gate_proj(x), module.up_proj(x)  # type: ignore[operator]
        return recomputable(_GatedProduct.apply(gate, up, act), lambda gate, up: act(gate) * up, gate, up)

    return forward if _is_gated(type(module).forward, act) else None


def _is_gated(forward: Callable[..., Any], act: Forward) -> bool:
    """Whether a forward pass is that of a gated layer and uses nothing else, by running it on numbers."""
    given = torch.linspace(-2.0, 3.0, 8)
    parts = SimpleNamespace(
        gate_proj=lambda x: 2.0 * x, up_proj=lambda x: x - 0.5, down_proj=lambda x: 3.0 * x, act_fn=act
    )
    try:
        found = forward(parts, given)
    except (AttributeError, TypeError):
        return False
    return isinstance(found, Tensor) and torch.equal(found, 3.0 * (act(2.0 * given) * (given - 0.5)))


class _GatedProduct(torch.autograd.Function):
    """``act(gate) · up``, which keeps ``gate`` and ``up`` for the backward pass and not ``act(gate)``."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, act: Forward) -> Tensor:
        ctx.save_for_backward(gate, up)
        ctx.act = act
        return act(gate) * up

    @staticmethod
    def backward(ctx: Any, *slopes: Tensor) -> tuple[Tensor | None, ...]:
        gate, up = ctx.saved_tensors
        (slope,) = slopes
        with torch.enable_grad():
            inner = gate.detach().requires_grad_()
            activated = ctx.act(inner)
        to_gate, to_up = ctx.needs_input_grad[:2]
        gate_slope = torch.autograd.grad(activated, inner, slope * up)[0] if to_gate else None
        return gate_slope, slope * activated.detach() if to_up else None, None
