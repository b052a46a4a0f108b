"""Curvature of the options' log-likelihood with respect to the LoRA factors, for a Laplace approximation (methods entry 9).

The Fisher information of a linear map with inputs ``a`` and output gradients ``g`` is, by K-FAC, ``Σ g gᵀ ⊗ mean(a aᵀ)``.
Sum and mean run over the same pairs of a question and a token. A layer ``y = W x + s B (A x)`` holds two such maps:

====== ======= ==============
factor ``a``   ``g``
====== ======= ==============
``A``  ``x``   ``s Bᵀ ∂/∂y``
``B``  ``A x`` ``s ∂/∂y``
====== ======= ==============
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from bayeslora.adapter.holder import PosteriorHolder
from bayeslora.adapter.layer import BayesLoraLinear
from bayeslora.adapter.lora import adapted_layers
from bayeslora.errors import InputError
from bayeslora.posterior.factors import LayerFactors
from bayeslora.posterior.laplace import FactorCurvature, LaplacePosterior, LayerCurvature
from bayeslora.predict.linearised.gradients import differentiating, graph_batches, option_gradients, with_graphs
from bayeslora.predict.linearised.low_rank import LowRankSum
from bayeslora.predict.questions.options import Encoded, OptionScores, PackedBatch
from bayeslora.predict.questions.scorer import Scorer, require_numbers


def fit_curvature(
    scorer: Scorer,
    items: Sequence[Encoded],
    posterior: LaplacePosterior,
    advance: Callable[[int, int], None] | None = None,
    *,
    batch_tokens: int = 16384,
) -> None:
    """Set the curvature of a posterior at its mean from the training questions; their answers are not needed.

    Args:
        scorer: scores questions with the model that the posterior belongs to.
        items: all training questions: the curvature is their sum, so a subset gives a wider posterior.
        posterior: of an active adapter.
        advance: progress callback: questions done, total.
        batch_tokens: tokens per batch for scoring only; here a fraction of it is used.
    """
    if not items:
        raise InputError("there are no questions to take the curvature from; give those of the training split")

    def add_up(tokens: int) -> dict[str, _LayerSums]:
        done = 0
        with differentiating(scorer) as holder:
            adapter = _adapter_of(holder, posterior)
            holder.use({name: holder.posterior(name).mean().detach() for name in holder.active})
            sums = _sums(scorer.model, adapter, posterior)
            for rows in graph_batches(items, tokens):
                questions = [items[row] for row in rows]
                batch = scorer.pack(questions)
                with _recording(sums.values()):
                    scores = scorer(questions)
                require_numbers(scores.log_probabilities)
                _add_batch(sums, batch, _weighted(scores), scores.present)
                done += len(rows)
                if advance is not None:
                    advance(done, len(items))
        return sums

    sums = with_graphs(add_up, items, batch_tokens, posterior)
    posterior.set_curvature({name: layer.curvature() for name, layer in sums.items()})


def _adapter_of(holder: PosteriorHolder, posterior: LaplacePosterior) -> str:
    for name in holder.active:
        if holder.posterior(name) is posterior:
            return name
    raise InputError("the posterior belongs to no active adapter of the model; activate its adapter first")


def _weighted(scores: OptionScores) -> Tensor:
    """Values ``√p · log p`` with ``p`` held fixed: products of their gradients sum up to the Fisher information."""
    log_p = scores.log_probabilities
    return (0.5 * log_p.detach()).exp() * log_p


# Sums of one layer ----------------------------------------------------------------------------------------------------


class _LayerSums:
    """K-FAC sums of one layer over the questions so far, and its last forward pass."""

    def __init__(self, layer: BayesLoraLinear, factors: LayerFactors, scaling: float, rank: int) -> None:
        self.layer = layer
        self.A, self.B = (factor[0].detach() for factor in factors)
        self.scaling = scaling
        self.inputs = self.shift = torch.empty(0)
        self.pairs = 0
        self.small_A, self.small_B = (self.A.new_zeros(len(self.A), len(self.A)) for _ in range(2))
        self.long_A, self.long_B = LowRankSum(rank), LowRankSum(rank)

    def record(self, module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> Tensor:
        """Forward hook: store the input, and add a zero to the output to obtain the output's gradient."""
        self.inputs = args[0].detach()
        self.shift = torch.zeros_like(output, requires_grad=True)
        return output + self.shift

    def add_inputs(self, batch: PackedBatch, used: Tensor) -> None:
        """Add the inputs of the last pass."""
        x = self._tokens(self.inputs, batch, used)
        self.pairs += len(x)
        self.long_A.add(x)
        self.small_B += _gram(x @ self.A.mT)

    def add_gradients(self, gradient: Tensor, batch: PackedBatch, used: Tensor) -> None:
        """Add gradients with respect to the output of the last pass."""
        g = self.scaling * self._tokens(gradient, batch, used)
        self.small_A += _gram(g @ self.B)
        self.long_B.add(g)

    def _tokens(self, values: Tensor, batch: PackedBatch, used: Tensor) -> Tensor:
        """Rows of the tokens with indices ``used``; a head only receives the kept columns, which are all used."""
        if values.shape[:2] == batch.kept.shape:
            return values.flatten(0, 1).to(self.A)
        if values.shape[:-1] != batch.input_ids.shape:
            raise InputError(
                f"{self.layer.name} is given {list(values.shape)} for {list(batch.input_ids.shape)} tokens: which is which "
                "cannot be told, nor its curvature; leave this layer out of the adapted ones"
            )
        return values.flatten(0, 1)[used.to(values.device)].to(self.A)

    def curvature(self) -> LayerCurvature:
        """Curvature from summed gradients and averaged inputs."""
        return LayerCurvature(
            A=FactorCurvature(self.small_A, self.long_A.root() / self.pairs**0.5),
            B=FactorCurvature(self.small_B / self.pairs, self.long_B.root()),
        )


def _sums(model: nn.Module, adapter: str, posterior: LaplacePosterior) -> dict[str, _LayerSums]:
    layers, mean, rank = adapted_layers(model, adapter), posterior.mean(), posterior.config.curvature_rank
    names = [name for group in posterior.random_groups for name in group.names]
    return {name: _LayerSums(layers[name], mean[name], layers[name].scaling[adapter], rank) for name in names}


@contextmanager
def _recording(sums: Iterable[_LayerSums]) -> Iterator[None]:
    """Register the recording hooks of all layers inside the block."""
    handles = [layer.layer.register_forward_hook(layer.record) for layer in sums]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _add_batch(sums: Mapping[str, _LayerSums], batch: PackedBatch, values: Tensor, present: Tensor) -> None:
    shifts = [layer.shift for layer in sums.values()]
    used = batch.used.flatten().nonzero().squeeze(1)  # once for all layers: it synchronises with the device
    for gradients in option_gradients(values, present, shifts):
        for layer, gradient in zip(sums.values(), gradients, strict=True):
            layer.add_gradients(gradient, batch, used)
    for layer in sums.values():
        layer.add_inputs(batch, used)


def _gram(rows: Tensor) -> Tensor:
    return rows.mT @ rows
