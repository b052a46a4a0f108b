"""Row-wise masked autoregressive flow, evaluated for all layers in one batch.

Every row of a matrix ``V0 [m_r, m_c]`` is one input of a masked network (MADE) that the rows share:

    v_j = a_j(v0_<j) · v0_j + t_j(v0_<j),      log|det J| = Σ_rows Σ_j log a_j

(methods entry 13, section 13.2). Only the parallel direction exists, since the posterior evaluates
nothing but its own samples. Shapes: ``M`` independent flows, ``x [M, rows, m_c]``.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

RESIDUAL_BLOCKS = 2
MIN_SLOPE = 1e-3
"""Lower bound of the slopes ``a_j``, which keeps the map invertible."""

_SLOPE_AT_IDENTITY = math.log(math.expm1(1.0 - MIN_SLOPE))
"""Pre-activation for which ``softplus(·) + MIN_SLOPE`` is exactly 1."""


class FlowParameters(NamedTuple):
    """Weights of ``M`` flows of one depth; every linear map is stored as ``[in, out]``.

    ======================  ================================
    ``in_weight``           ``[M, depth, m_c, h]``
    ``in_bias``             ``[M, depth, 1, h]``
    ``block_weight``        ``[M, depth, 2·blocks, h, h]``
    ``block_bias``          ``[M, depth, 2·blocks, 1, h]``
    ``out_weight``          ``[M, depth, h, 2·m_c]``
    ``out_bias``            ``[M, depth, 1, 2·m_c]``
    ======================  ================================

    The output holds the pre-activations of the slopes first and the shifts second.
    """

    in_weight: Tensor
    in_bias: Tensor
    block_weight: Tensor
    block_bias: Tensor
    out_weight: Tensor
    out_bias: Tensor

    @property
    def depth(self) -> int:
        """Number of flow layers."""
        return self.in_weight.shape[1]

    def to(self, dtype: torch.dtype) -> FlowParameters:
        """The same parameters in another precision."""
        return FlowParameters(*(tensor.to(dtype) for tensor in self))

    def layer(self, index: int) -> FlowParameters:
        """The parameters of one flow layer, without the depth dimension."""
        return FlowParameters(*(tensor[:, index] for tensor in self))


def init_flow(flows: int, columns: int, depth: int, hidden: int, uniform: Callable[..., Tensor]) -> FlowParameters:
    """Initial parameters, for which the flow is exactly the identity.

    The output layer is zero except for the bias that gives slope 1, so the hidden layers start to learn one step later.
    ``uniform(shape, bound)`` supplies numbers in ``[-bound, bound]``.
    """
    linears = 2 * RESIDUAL_BLOCKS
    parameters = FlowParameters(
        in_weight=uniform((flows, depth, columns, hidden), 1 / math.sqrt(columns)),
        in_bias=uniform((flows, depth, 1, hidden), 1 / math.sqrt(columns)),
        block_weight=uniform((flows, depth, linears, hidden, hidden), 1 / math.sqrt(hidden)),
        block_bias=uniform((flows, depth, linears, 1, hidden), 1 / math.sqrt(hidden)),
        out_weight=torch.empty(flows, depth, hidden, 2 * columns),
        out_bias=torch.empty(flows, depth, 1, 2 * columns),
    )
    reset_to_identity(parameters)
    return parameters


@torch.no_grad()
def reset_to_identity(parameters: FlowParameters) -> None:
    """Reset the flow to the identity through its output layer alone."""
    slopes, shifts = parameters.out_bias.chunk(2, dim=-1)
    parameters.out_weight.zero_()
    slopes.fill_(_SLOPE_AT_IDENTITY)
    shifts.zero_()


def apply_flow(parameters: FlowParameters, x: Tensor, *, odd: bool = False) -> tuple[Tensor, Tensor]:
    """Apply the flow to ``x [M, rows, m_c]``; also returns ``log|det J|`` of every row, ``[M, rows]``.

    Every second layer processes the columns in reverse, so that each column can depend on all others.

    Args:
        parameters: of the flows.
        x: input of the flows.
        odd: take the odd part of every layer, ``½ (T(x) − T(−x))``: with the mean of the slopes at ``x`` and ``−x`` and half
            the difference of the shifts it is a map of the same form, and preserves symmetry about zero.
    """
    log_det = x.new_zeros(x.shape[:-1])
    for index in range(parameters.depth):
        reverse = index % 2 == 1
        x = x.flip(-1) if reverse else x
        both = torch.cat([x, -x], dim=1) if odd else x
        slopes, shifts = (
            half.chunk(2 if odd else 1, dim=1) for half in _slopes_and_shifts(parameters.layer(index), both)
        )
        slope, shift = slopes[0], shifts[0]
        if odd:
            slope, shift = 0.5 * (slope + slopes[1]), 0.5 * (shift - shifts[1])
        x = slope * x + shift
        x = x.flip(-1) if reverse else x
        log_det = log_det + slope.log().sum(-1)
    return x, log_det


def _slopes_and_shifts(layer: FlowParameters, x: Tensor) -> tuple[Tensor, Tensor]:
    slope, shift = _network(layer, x).chunk(2, dim=-1)
    return F.softplus(slope) + MIN_SLOPE, shift


def _network(layer: FlowParameters, x: Tensor) -> Tensor:
    """The masked residual network, blocks ``h + W₂ relu(W₁ h)``: ``x [M, rows, m_c]`` to ``[M, rows, 2·m_c]``."""
    masks = autoregressive_masks(x.shape[-1], layer.in_bias.shape[-1], x.device, x.dtype)
    block_weight = layer.block_weight * masks.hidden
    h = torch.baddbmm(layer.in_bias, x, layer.in_weight * masks.first)
    for k in range(0, 2 * RESIDUAL_BLOCKS, 2):
        inner = torch.baddbmm(layer.block_bias[:, k], h, block_weight[:, k])
        h = h + torch.baddbmm(layer.block_bias[:, k + 1], inner.relu(), block_weight[:, k + 1])
    return torch.baddbmm(layer.out_bias, h, layer.out_weight * masks.last)


class Masks(NamedTuple):
    """Which weights may be non-zero: ``first [m_c, h]``, ``hidden [h, h]``, ``last [h, 2·m_c]``."""

    first: Tensor
    hidden: Tensor
    last: Tensor


@lru_cache(maxsize=64)
def autoregressive_masks(columns: int, hidden: int, device: torch.device, dtype: torch.dtype) -> Masks:
    """MADE masks: hidden unit of degree ``k`` sees columns ``≤ k``, output ``j`` sees degrees ``< j``.

    Inference mode is disabled while they are created, so that later training steps can use the cached masks.
    """
    with torch.inference_mode(False):
        column_degree = torch.arange(1, columns + 1, device=device)
        cycle, lowest = max(1, columns - 1), min(1, columns - 1)
        hidden_degree = torch.arange(hidden, device=device) % cycle + lowest
        first = hidden_degree >= column_degree[:, None]
        inner = hidden_degree >= hidden_degree[:, None]
        last = column_degree > hidden_degree[:, None]
        return Masks(first.to(dtype), inner.to(dtype), last.repeat(1, 2).to(dtype))
