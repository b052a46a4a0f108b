"""Checks that a saved file fits its configuration before an adapter is built for it.

A configuration that does not fit its file, such as one with a thousand times the rank, would first fill the memory and then
fail. So while a file is loaded, the shapes that the configuration implies are computed without memory and compared.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import lru_cache

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from bayeslora.adapter.base import ATTRIBUTE
from bayeslora.adapter.config import BayesLoraConfig
from bayeslora.errors import InputError
from bayeslora.posterior import LayerShape, build_posterior
from bayeslora.posterior.snapshots import Snapshots

Shape = tuple[int, ...]

PREFIX = f"base_model.model.{ATTRIBUTE}.bayeslora_posterior."
"""Prefix of the names of a posterior's tensors in a file."""

_expected: ContextVar[Mapping[str, Shape] | None] = ContextVar("expected", default=None)


@contextmanager
def expecting(shapes: Mapping[str, Shape]) -> Iterator[None]:
    """Inside the block, adapters are built only if they fit a file with tensors of these shapes."""
    token = _expected.set(shapes)
    try:
        yield
    finally:
        _expected.reset(token)


def require_expected(config: BayesLoraConfig, layers: Sequence[LayerShape], points: Collection[str]) -> None:
    """Refuse to build a posterior over these layers if the file being loaded holds another; no effect outside of loading."""
    held = _expected.get()
    if held is None:
        return
    settings = json.dumps(dict(config.settings), sort_keys=True)
    shapes = _shapes(config.posterior, tuple(layers), settings, frozenset(points), config.remembered())
    for name, shape in shapes.items():
        if held.get(name) != shape:
            what = f"holds {_shown(held[name])} for" if name in held else "lacks"
            raise InputError(
                f"{what} a tensor of the adapter, {name!r}, which is {_shown(shape)} by adapter_config.json (r={config.r}); "
                "restore both files, or train again with --force"
            )


@lru_cache(maxsize=32)
def _shapes(
    name: str, layers: tuple[LayerShape, ...], settings: str, points: frozenset[str], snapshots: Snapshots
) -> dict[str, Shape]:
    """Shapes of a posterior's tensors, computed without memory and cached for equal adapters."""
    with FakeTensorMode(allow_non_fake_inputs=True), torch.device("meta"):
        posterior = build_posterior(name, layers, json.loads(settings), points=points, snapshots=snapshots)
        return {PREFIX + name: tuple(tensor.shape) for name, tensor in posterior.state_dict().items()}


def _shown(shape: Shape) -> str:
    return "x".join(map(str, shape)) if shape else "one number"
