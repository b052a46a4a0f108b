"""Frozen products in eight bits, for passes of a model that is not trained: e4m3 floats or integers, one scale for each row.

Every row of the weight and of the input has a scale of its own; sums are of 32 bits. An input that several layers share, such
as that of query, key and value, is rounded once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

Rounded = tuple[Tensor, Tensor]
"""A matrix in eight bits, and the scale of each row ``[rows, 1]``."""


def to_float8(rows: Tensor) -> Rounded:
    """The rows as e4m3 floats, whose largest is 448."""
    scale = rows.abs().amax(dim=1, keepdim=True).float().clamp(min=1e-12) / 448.0
    return (rows / scale).to(torch.float8_e4m3fn), scale


def to_int8(rows: Tensor) -> Rounded:
    """The rows as integers from -127 to 127."""
    scale = rows.abs().amax(dim=1, keepdim=True).float().clamp(min=1e-12) / 127.0
    return (rows / scale).round().to(torch.int8), scale


def multiply_float8(given: Rounded, weight: Rounded, dtype: torch.dtype) -> Tensor:
    """The product of the rows with those of the weight."""
    (rows, scale), (columns, other) = given, weight
    return torch._scaled_mm(rows, columns.t(), scale_a=scale, scale_b=other.t(), out_dtype=dtype, use_fast_accum=True)


def multiply_int8(given: Rounded, weight: Rounded, dtype: torch.dtype) -> Tensor:
    """The product of the rows with those of the weight."""
    (rows, scale), (columns, other) = given, weight
    return (torch._int_mm(rows, columns.t()).float() * scale * other.t()).to(dtype)


@dataclass
class Format:
    """How matrices are rounded and multiplied.

    Attributes:
        round: rounds a matrix by rows.
        multiply: multiplies two rounded matrices.
    """

    round: Callable[[Tensor], Rounded]
    multiply: Callable[[Rounded, Rounded, torch.dtype], Tensor]
    _last: tuple[Tensor, Rounded] | None = field(default=None, repr=False)

    def rounded(self, given: Tensor) -> Rounded:
        """The input by rows; the last one is kept for other layers with the same input."""
        if torch.compiler.is_compiling():  # the compiler sees by itself what is computed twice
            return self.round(given.reshape(-1, given.shape[-1]))
        if self._last is None or self._last[0] is not given:
            self._last = given, self.round(given.reshape(-1, given.shape[-1]))
        return self._last[1]

    def forget(self) -> None:
        """Drop the last input."""
        self._last = None


def make_format(name: str) -> Format:
    """The format ``float8`` or ``int8``; outside of a compiled model its small operations are compiled by themselves."""
    if name == "float8":
        return Format(torch.compile(to_float8, dynamic=True), multiply_float8)
    return Format(torch.compile(to_int8, dynamic=True), torch.compile(multiply_int8, dynamic=True))


class EightBitLinear(nn.Module):
    """A frozen linear layer whose product is of eight bits."""

    def __init__(self, layer: nn.Linear, weight: Rounded, form: Format) -> None:
        super().__init__()
        self.in_features, self.out_features = layer.in_features, layer.out_features
        self.values, self.scale = weight
        self.bias, self.form = layer.bias, form

    def forward(self, x: Tensor) -> Tensor:
        """``W x + b``."""
        product = self.form.multiply(self.form.rounded(x), (self.values, self.scale), x.dtype)
        product = product.view(*x.shape[:-1], self.out_features)
        return product if self.bias is None else product + self.bias


class EightBits:
    """The frozen layers of models in a format. Models that share weights share those in eight bits."""

    def __init__(self, name: str) -> None:
        self.form = make_format(name)
        self._weights: dict[int, Rounded] = {}

    def put_into(self, model: nn.Module) -> list[tuple[nn.Module, str, nn.Module]]:
        """Replace all frozen linear layers but the output head; returns what they were: the parent, the name, the layer."""
        replaced = [
            (parent, name, child)
            for parent in model.modules()
            for name, child in parent.named_children()
            if type(child) is nn.Linear and name != "lm_head" and not child.weight.requires_grad
        ]
        for parent, name, child in replaced:
            setattr(parent, name, EightBitLinear(child, self._weight(child), self.form))
        return replaced

    @contextmanager
    def of(self, model: nn.Module) -> Iterator[None]:
        """The same, inside a block."""
        replaced = self.put_into(model)
        try:
            yield
        finally:
            for parent, name, child in replaced:
                setattr(parent, name, child)
            self.form.forget()

    @torch.no_grad()
    def _weight(self, layer: nn.Linear) -> Rounded:
        place = layer.weight.data_ptr()
        if place not in self._weights:
            self._weights[place] = (to_float8 if self.form.multiply is multiply_float8 else to_int8)(layer.weight)
        return self._weights[place]
