"""Tensors that a file holds, known before an adapter is built for them.

A configuration that does not fit its file, such as one with a thousand times the rank, would first fill the memory and then
fail. While a file is being loaded, what the configuration asks for is worked out without memory and compared.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from bayeslora.adapter.base import ATTRIBUTE
from bayeslora.adapter.config import BayesLoraConfig
from bayeslora.errors import InputError
from bayeslora.posterior import LayerShape, build_posterior

Shape = tuple[int, ...]

PREFIX = f"base_model.model.{ATTRIBUTE}.bayeslora_posterior."
"""What the names of a posterior's tensors begin with in a file."""

_expected: ContextVar[Mapping[str, Shape] | None] = ContextVar("expected", default=None)


@contextmanager
def expecting(shapes: Mapping[str, Shape]) -> Iterator[None]:
    """Inside the block adapters are built only for a file that holds tensors of these shapes."""
    token = _expected.set(shapes)
    try:
        yield
    finally:
        _expected.reset(token)


def require_expected(config: BayesLoraConfig, layers: Sequence[LayerShape], points: Collection[str]) -> None:
    """Refuse to build a posterior over these layers for a file that holds another; nothing where none is being loaded."""
    held = _expected.get()
    if held is None:
        return
    for name, shape in _shapes(config, layers, points).items():
        if held.get(name) != shape:
            what = f"holds {_shown(held[name])} for" if name in held else "lacks"
            raise InputError(
                f"{what} a tensor of the adapter, {name!r}, which is {_shown(shape)} by adapter_config.json (r={config.r}); "
                "restore both files, or train again with --force"
            )


def _shapes(config: BayesLoraConfig, layers: Sequence[LayerShape], points: Collection[str]) -> dict[str, Shape]:
    """The tensors of a posterior, worked out without memory for them."""
    with FakeTensorMode(allow_non_fake_inputs=True), torch.device("meta"):
        snapshots = config.remembered()
        posterior = build_posterior(config.posterior, layers, config.settings, points=points, snapshots=snapshots)
        return {PREFIX + name: tuple(tensor.shape) for name, tensor in posterior.state_dict().items()}


def _shown(shape: Shape) -> str:
    return "x".join(map(str, shape)) if shape else "one number"
