"""The frozen layers below the first adapted one, computed once per question.

If only the uppermost layers are adapted, everything below them gives the same output at every epoch, for every draw and
for every method. That output is cached, and the upper layers start from it. This is exact, since they receive the same
input.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from bayeslora.adapter.base import ATTRIBUTE, Holder, find_any_holder
from bayeslora.adapter.draw_expansion import Stack, tensors_in
from bayeslora.adapter.sampling import MEAN, sampled
from bayeslora.errors import InputError
from bayeslora.predict.questions.options import (
    Encoded,
    OptionScores,
    PackedBatch,
    packed_length,
    packed_logits,
    score_options,
)
from bayeslora.predict.questions.scorer import Scorer, batches_by_length

Key = tuple[tuple[int, ...], ...]


class TrunkCache:
    """Cached outputs of the layers below a cut, by question; valid for all adapters above the same cut."""

    def __init__(self) -> None:
        self.states: dict[Key, Tensor] = {}
        self.cut: int | None = None

    def __len__(self) -> int:
        return len(self.states)


class TrunkScorer(Scorer):
    """A scorer that computes the frozen trunk once per question.

    Args:
        model: a model whose adapters sit in its upper layers only.
        pad_id: padding token.
        cache: filled by earlier scorers of the same base model with the same cut, if any.
    """

    def __init__(self, model: nn.Module, pad_id: int = 0, cache: TrunkCache | None = None) -> None:
        super().__init__(model, pad_id)
        self._root = _root(model)
        self._parent, self._name, self._cut = _find_cut(self._root, find_any_holder(model))
        self._layers: nn.ModuleList = getattr(self._parent, self._name)
        self._upper = nn.ModuleList(list(self._layers)[self._cut :])
        self._lower = nn.ModuleList(list(self._layers)[: self._cut + 1])
        self._cache = TrunkCache() if cache is None else cache
        if self._cache.cut not in (None, self._cut):
            raise InputError(
                f"the trunk was kept for {self._cache.cut} layers and this adapter has {self._cut} below it; "
                "adapt the same layers, or keep them apart"
            )
        self._cache.cut = self._cut
        self._checked = False

    def __call__(self, items: Sequence[Encoded], draws: int = 1, *, blocks: int = 1) -> OptionScores:
        """As :meth:`Scorer.__call__`, from the cached output of the trunk."""
        self._check(items[:1])
        batch = self.pack(items, blocks=blocks)
        states = self._states(items, batch)
        find_any_holder(self.model).settle(self._root)
        with self._only(self._upper):
            return score_options(self.model, batch, states, self._copies(draws))

    def pack(self, items: Sequence[Encoded], *, blocks: int = 1) -> PackedBatch:
        """As :meth:`Scorer.pack`; the cache is per question, so its options must share a row."""
        batch = super().pack(items, blocks=blocks)
        if batch.apart:
            raise InputError(
                f"the trunk of a {type(self._root).__name__} cannot be kept: the options of a question cannot share a row of "
                "its batches; leave --cache-trunk out"
            )
        return batch

    def prepare(
        self, items: Sequence[Encoded], batch_tokens: int, advance: Callable[[int, int], None] | None = None
    ) -> None:
        """Compute the trunk for all later questions, in batches that depend on the questions alone.

        The last bits of a question's states depend on the batch they were computed in. If a run filled its cache on the
        fly, it would resume after an interruption with different bits.
        """
        self._check(items[:1])
        done = 0
        for rows in batches_by_length(items, batch_tokens):
            batch = [items[row] for row in rows]
            if not all(_key(item) in self._cache.states for item in batch):
                self._fill(batch)
            done += len(batch)
            if advance is not None:
                advance(done, len(items))

    def _states(self, items: Sequence[Encoded], batch: PackedBatch) -> Tensor:
        """The trunk's output ``[B, T, d]`` in the layout of the batch; padding is zero, as nothing attends to it."""
        missing = list({_key(item): item for item in items if _key(item) not in self._cache.states}.values())
        if missing:
            self._fill(missing)
        kept = [self._cache.states[_key(item)] for item in items]
        states = torch.zeros((*batch.input_ids.shape, kept[0].shape[-1]), dtype=kept[0].dtype, device=self.device)
        for (row, start), own in zip(batch.places, kept, strict=True):
            states[row, start : start + len(own)] = own.to(self.device, non_blocking=True)
        return states

    @torch.no_grad()
    def _fill(self, items: Sequence[Encoded]) -> None:
        batch = self.pack(items)
        states = self._compute(batch)
        for (row, start), item in zip(batch.places, items, strict=True):
            self._cache.states[_key(item)] = states[row, start : start + packed_length(item)].to("cpu", copy=True)

    def _compute(self, batch: PackedBatch) -> Tensor:
        """Compute the input of the first adapted layer, captured by a hook while that layer runs."""
        seen: list[Tensor] = []

        def keep(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            seen.append(args[0] if args else kwargs["hidden_states"])

        handle = self._layers[self._cut].register_forward_pre_hook(keep, with_kwargs=True)
        try:
            with self._only(self._lower), sampled(self.model, MEAN):
                packed_logits(self.model, batch)
        finally:
            handle.remove()
        return seen[0]

    @contextmanager
    def _only(self, layers: nn.ModuleList) -> Iterator[None]:
        """Restrict the model to these layers inside the block."""
        setattr(self._parent, self._name, layers)
        try:
            yield
        finally:
            setattr(self._parent, self._name, self._layers)

    @torch.no_grad()
    def _check(self, items: Sequence[Encoded]) -> None:
        """Refuse architectures that do more than pass embeddings to their layers, by a single test.

        The cached states must reach the first adapted layer unchanged, and all other inputs of this and later layers (masks,
        position embeddings) must equal those in the whole model: to the bit, as a small difference in one question's logits
        may be a large one in another's.
        """
        if self._checked:
            return
        batch = self.pack(items)
        states = self._compute(batch)
        with sampled(self.model, MEAN):
            whole, inputs = self._observe(batch)
            with self._only(self._upper):
                split, split_inputs = self._observe(batch, states)
        same = _equal(split_inputs[0][:1], [states]) and all(
            _equal(one[1:], other[1:]) for one, other in zip(inputs, split_inputs, strict=True)
        )
        tolerance = 1e-3 if states.dtype == torch.float32 else 0.1
        if not (same and torch.allclose(whole, split, atol=tolerance, rtol=tolerance)):
            raise InputError(
                f"the trunk of a {type(self._root).__name__} cannot be kept: its layers are given more than the output of "
                "those below; leave --cache-trunk out"
            )
        self._checked = True

    def _observe(self, batch: PackedBatch, embeddings: Tensor | None = None) -> tuple[Tensor, list[list[Tensor]]]:
        """Logits, and the inputs of each layer from the first adapted one on: hidden states first, then the rest."""
        seen: list[list[Tensor]] = []

        def keep(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            named = {name: value for name, value in kwargs.items() if name != "hidden_states"}
            seen.append(tensors_in([args or kwargs["hidden_states"], named]))

        handles = [layer.register_forward_pre_hook(keep, with_kwargs=True) for layer in self._upper]
        try:
            return packed_logits(self.model, batch, embeddings), seen
        finally:
            for handle in handles:
                handle.remove()


def _root(model: nn.Module) -> nn.Module:
    """The module that has the holder, to which names of adapted layers are relative."""
    return next(module for module in model.modules() if ATTRIBUTE in module._modules)


def _find_cut(root: nn.Module, holder: Holder) -> tuple[nn.Module, str, int]:
    """Parent module of the list of layers, its attribute name, and the index of the first adapted layer."""
    names = holder.layer_names
    stack = Stack.find(root, names)
    if stack is None:
        raise InputError(
            f"cannot tell the trunk from the adapted layers {', '.join(names[:3])}, ...; leave --cache-trunk out"
        )
    cut = min(map(stack.index, names))
    if cut == 0:
        raise InputError("the lowest layer is adapted, so there is no trunk to keep; use --layers last:K as well")
    parent, _, name = stack.path.rpartition(".")
    return root.get_submodule(parent), name, cut


def _equal(one: Sequence[Tensor], other: Sequence[Tensor]) -> bool:
    return len(one) == len(other) and all(torch.equal(a, b.to(a.device)) for a, b in zip(one, other, strict=True))


def _key(item: Encoded) -> Key:
    return (tuple(item.prompt_ids), *map(tuple, item.option_ids))
