"""C-LoRA: a random core between the factors, whose distribution depends on the input (methods entry 10)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bayeslora.posterior.base import Posterior
from bayeslora.posterior.factors import Factors
from bayeslora.posterior.hints import TrainingHints
from bayeslora.posterior.inner import Inner, random_signs
from bayeslora.posterior.kl import KL, gaussian_kl
from bayeslora.posterior.layers import LayerGroup, lora_start
from bayeslora.posterior.noise import Noise

NETWORK = ("weight1", "bias1", "weight2", "bias2")


@dataclass(frozen=True, kw_only=True)
class ContextualConfig:
    """Settings of :class:`ContextualPosterior`.

    Attributes:
        hidden: width of the network's hidden layer.
        prior_sd: standard deviation of the core's entries under the prior.
    """

    hidden: int = 64
    prior_sd: float = 0.2

    def __post_init__(self) -> None:
        if self.hidden < 1:
            raise ValueError(f"hidden must be at least 1, got {self.hidden}")
        if not (math.isfinite(self.prior_sd) and self.prior_sd > 0):
            raise ValueError(f"prior_sd must be positive and finite, got {self.prior_sd}")


class KLRecord:
    """Records the outputs of the layers' networks in training, call by call, for the KL of the cores drawn from them.

    Calls accumulate until they are read, and the first call after a read starts afresh: a draw used for several passes gives
    each of them its own KL. Calls in a backward pass repeat earlier ones (gradient checkpointing) and do not count.
    """

    def __init__(self, prior_sd: float, scale: float) -> None:
        self._prior_sd, self._scale = prior_sd, scale
        self._outputs: list[Tensor] = []
        self._was_read = False

    @torch.compiler.disable
    def add(self, outputs: Tensor) -> None:
        """Record one call: the outputs of a network for all tokens, ``[n, m, 2 R²]``."""
        if torch._C._current_graph_task_id() != -1:  # inside a backward pass
            return
        if self._was_read:
            self._outputs, self._was_read = [], False
        self._outputs.append(outputs)

    @property
    def outputs(self) -> Sequence[Tensor]:
        """The outputs recorded so far."""
        return self._outputs

    def read(self, device: torch.device) -> Tensor:
        """KL of the calls so far: summed over tokens and entries, averaged over the draws; all layers at once."""
        self._was_read = True
        alike: dict[tuple[Any, ...], list[Tensor]] = {}
        for outputs in self._outputs:
            alike.setdefault((outputs.device, outputs.shape[0], outputs.shape[2]), []).append(outputs)
        terms = [self._kl(torch.cat(group, dim=1)) for group in alike.values()]
        return torch.stack([term.to(device) for term in terms]).sum()

    def _kl(self, outputs: Tensor) -> Tensor:
        mean, root = _wide(outputs).chunk(2, dim=-1)
        return gaussian_kl(mean, self._scale * root.sigmoid().square(), self._prior_sd) / len(outputs)


@dataclass(frozen=True, kw_only=True)
class Core(Inner):
    """``E h`` for ``h = A x`` and ``E = μ(h) + σ(h) ⊙ ε``, where a network of one hidden layer maps ``h`` to ``μ`` and ``σ``.

    Attributes:
        tensors: weights and biases of the network, then ``ε [n, R, R]``. Without ``ε`` the core is ``μ(h)``, and the network
            needs only those outputs.
        scale: multiplier of ``σ``.
        flip: whether every token has random signs on both sides of its noise, as in flipout.
        record: records every call, if given.
    """

    scale: float = 1.0
    flip: bool = False
    record: KLRecord | None = None

    def __call__(self, x: Tensor, A: Tensor) -> Tensor:
        """Apply the core to ``A x``. Signs come from torch's global generator, which checkpointing restores."""
        weight1, bias1, weight2, bias2, *noise = self.tensors
        rank = A.shape[1]
        h = x.flatten(1, 2) @ A.mT  # rows and positions merged: the network treats all tokens alike
        hidden = torch.baddbmm(bias1.unsqueeze(1), h, weight1.mT).relu()
        outputs = torch.baddbmm(bias2.unsqueeze(1), hidden, weight2.mT)
        mean, *roots = outputs.unflatten(-1, (-1, rank, rank)).unbind(2)
        if not noise:
            return _apply(mean, h).unflatten(1, x.shape[1:3])
        if self.record is not None:
            self.record.add(outputs)
        spread = roots[0].sigmoid().square() * (self.scale * noise[0]).unsqueeze(1)
        if self.flip:
            u, v = random_signs((2, *h.shape), h)
            spread = v.unsqueeze(-1) * spread * u.unsqueeze(-2)
        return _apply(mean + spread, h).unflatten(1, x.shape[1:3])


class ContextualPosterior(Posterior):
    """The update ``B E(x) A x`` with a Gaussian core ``E(x) [R, R]`` of every token; ``A`` and ``B`` are points.

    In training every token flips the signs of its noise. In evaluation a draw is one ``ε`` for all tokens, so it is a
    function of the input that does not depend on the rest of the batch. Neither draws nor the mean are matrices: they can
    be neither merged nor exported.

    The KL is that of the cores of the last forward pass in training, padding included, so it grows with the batch and its
    length. It needs the graph of that pass, which re-entrant gradient checkpointing does not keep. Before the first pass,
    in evaluation and for the mean it is zero.
    """

    name = "contextual"
    config_class = ContextualConfig
    partial = True
    config: ContextualConfig
    hints = TrainingHints({"A_": "weights_a", "B_": "weights_b", "network_": "network"}, split={"network": "both"})
    amortised = True

    def _initialise(self, generator: torch.Generator) -> None:
        for group in self.groups:
            for factor, value in lora_start(group, generator).items():
                self._add(f"{factor}_{group.key}", value)
            hidden, outputs = self.config.hidden, 2 * group.rank**2
            shapes = ((hidden, group.rank), (hidden,), (outputs, hidden), (outputs,))
            for name, shape, inputs in zip(NETWORK, shapes, (group.rank, group.rank, hidden, hidden), strict=True):
                uniform = 2.0 * torch.rand((len(group), *shape), generator=generator) - 1.0
                self._add(f"network_{name}_{group.key}", uniform / inputs**0.5)  # as torch initialises linear layers

    def _draw(self, n: int, source: Noise) -> Factors:
        record = KLRecord(self.config.prior_sd, self.scale) if self.training else None
        cores = []
        for group in self.groups:
            noise = source.normal((len(group), n, group.rank, group.rank))
            network = (_repeat(self._tensor(f"network_{name}_{group.key}"), n) for name in NETWORK)
            cores.append(Core(tensors=(*network, noise), scale=self.scale, flip=self.training, record=record))
        return Factors(self.groups, *self._points(n), latents=record, inners=tuple(cores))

    def _mean(self) -> Factors:
        return Factors(self.groups, *self._points(1), inners=tuple(map(self._mean_core, self.groups)))

    def _mean_core(self, group: LayerGroup) -> Core:
        weight1, bias1, weight2, bias2 = (self._tensor(f"network_{name}_{group.key}") for name in NETWORK)
        means = slice(group.rank**2)
        network = (weight1, bias1, weight2[:, means], bias2[:, means])
        return Core(tensors=tuple(_repeat(tensor, 1) for tensor in network))

    def _points(self, n: int) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        A, B = (
            tuple(_repeat(self._tensor(f"{factor}_{group.key}"), n) for group in self.groups) for factor in ("A", "B")
        )
        return A, B

    def _start_from(self, factors: Factors) -> None:
        """Set the mean core to the identity, whatever the input, until the network learns otherwise."""
        for group, A, B in zip(self.groups, factors.A, factors.B, strict=True):
            self.get_parameter(f"A_{group.key}").copy_(A[:, 0])
            self.get_parameter(f"B_{group.key}").copy_(B[:, 0])
            means = slice(group.rank**2)
            self.get_parameter(f"network_weight2_{group.key}")[:, means] = 0.0
            bias = self.get_parameter(f"network_bias2_{group.key}")
            bias[:, means] = torch.eye(group.rank, dtype=bias.dtype, device=bias.device).flatten()

    def _kl(self, factors: Factors | None, source: Noise) -> KL:
        record = None if factors is None else factors.latents
        if record is None or not record.outputs:
            return super()._kl(factors, source)
        if torch.is_grad_enabled() and self._trains_cores() and not all(o.requires_grad for o in record.outputs):
            raise RuntimeError(
                "the KL of 'contextual' needs the graph of the forward pass, and that kept none: call the model with gradients "
                "enabled, and for gradient checkpointing pass gradient_checkpointing_kwargs={'use_reentrant': False}"
            )
        total = record.read(self._reference.device)
        return KL({"factors": total})

    def _trains_cores(self) -> bool:
        return any(p.requires_grad for name, p in self.named_parameters() if not name.startswith("B_"))


def _apply(core: Tensor, h: Tensor) -> Tensor:
    """``E h`` of every token, for ``E [n, m, R, R]`` and ``h [n, m, R]``."""
    return (core @ h.unsqueeze(-1)).squeeze(-1)


def _repeat(tensor: Tensor, n: int) -> Tensor:
    """``[L, ...]`` as ``[L, n, ...]``, without a copy."""
    return tensor.unsqueeze(1).expand(-1, n, *tensor.shape[1:])


def _wide(tensor: Tensor) -> Tensor:
    """Cast to at least float32, for sums over tokens and logarithms of small numbers."""
    return tensor if tensor.dtype == torch.float64 else tensor.float()
