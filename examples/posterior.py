"""A frozen network adapted to few, noisy examples: LoRA's point estimate beside Bayesian-LoRA's posterior.

Pure torch, a few seconds on a CPU. The labels of a two-moons problem are noisy, so a network that fits all 48 training
points is confidently wrong on new ones. Both methods adapt the same frozen layers at the same rank, with the same
number of steps; prediction averages the probabilities of the posterior's draws.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from bayeslora.metrics import accuracy, ece, nll
from bayeslora.posterior import (
    Factors,
    InducingPosterior,
    LayerShape,
    PointPosterior,
    Posterior,
    kl_weight,
)

WIDTH, RANK, STEPS, DRAWS = 64, 8, 300, 16
TRAIN, TEST, SEEDS = 48, 4000, 3
LAYERS = [
    LayerShape("first", WIDTH, WIDTH, RANK),
    LayerShape("second", WIDTH, WIDTH, RANK),
    LayerShape("head", 2, WIDTH, 2),
]
METHODS = {"LoRA": (PointPosterior, 1e-3), "Bayesian-LoRA": (InducingPosterior, 2e-3)}


def noisy_moons(count: int, generator: torch.Generator, flipped: float = 0.15) -> tuple[Tensor, Tensor]:
    """Points on two interleaved half circles; a part of the labels is wrong."""
    labels = torch.randint(2, (count,), generator=generator)
    angle = torch.rand(count, generator=generator) * torch.pi
    sign = 1 - 2 * labels
    points = torch.stack([torch.cos(angle) * sign + labels, torch.sin(angle) * sign + 0.5 * labels], dim=1)
    points = points + 0.15 * torch.randn(points.shape, generator=generator)
    wrong = torch.rand(count, generator=generator) < flipped
    return points, torch.where(wrong, 1 - labels, labels)


class FrozenNetwork:
    """A random network that never changes; only the low-rank updates of its layers are fitted."""

    def __init__(self, generator: torch.Generator) -> None:
        self.embed = torch.randn(WIDTH, 2, generator=generator)
        self.phase = torch.rand(WIDTH, generator=generator) * 2 * torch.pi
        self.weights = {
            layer.name: torch.randn(layer.out_features, layer.in_features, generator=generator) / layer.in_features**0.5
            for layer in LAYERS
        }

    def __call__(self, x: Tensor, factors: Factors) -> Tensor:
        """Logits ``[n, N, 2]``, one set for each draw of the factors."""
        h = torch.sin(x @ self.embed.T + self.phase).expand(factors.n, -1, -1)
        for layer in LAYERS:
            A, B = factors[layer.name]
            h = h @ self.weights[layer.name].T + h @ A.mT @ B.mT
            h = h if layer.name == "head" else torch.tanh(h)
        return h


def fit(posterior: Posterior, network: FrozenNetwork, x: Tensor, y: Tensor, lr: float) -> None:
    """Maximise the ELBO: mean log-likelihood minus the KL, weighted 1/N."""
    optimiser = torch.optim.Adam(posterior.parameters(), lr=lr)
    weight = kl_weight("elbo", examples=len(x), batch_size=len(x))
    generator = torch.Generator().manual_seed(0)
    for _ in range(STEPS):
        factors = posterior.draw(1, generator)
        loss = F.cross_entropy(network(x, factors)[0], y) + weight * posterior.kl(factors).total
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()


@torch.no_grad()
def predict(posterior: Posterior, network: FrozenNetwork, x: Tensor) -> Tensor:
    """Probabilities averaged over draws."""
    factors = posterior.draw(DRAWS, torch.Generator().manual_seed(1))
    return network(x, factors).softmax(-1).mean(0)


def run(posterior: Posterior, lr: float, seed: int) -> Tensor:
    """Accuracy, NLL and ECE on test data of one problem."""
    generator = torch.Generator().manual_seed(seed)
    network = FrozenNetwork(generator)
    x, y = noisy_moons(TRAIN, generator)
    test_x, test_y = noisy_moons(TEST, generator)
    fit(posterior, network, x, y, lr)
    probabilities = predict(posterior, network, test_x)
    return torch.tensor([metric(probabilities, test_y) for metric in (accuracy, nll, ece)])


def main() -> None:
    """Print a table: both methods on the same problems."""
    print(f"{TRAIN} noisy training examples, {TEST} test examples, {DRAWS} draws; mean of {SEEDS} problems\n")
    print(f"{'':16}{'ACC':>8}{'NLL':>8}{'ECE':>8}")
    for name, (make, lr) in METHODS.items():
        scores = torch.stack([run(make(LAYERS), lr, seed) for seed in range(SEEDS)]).mean(0)
        print(f"{name:16}" + "".join(f"{score:8.3f}" for score in scores))


if __name__ == "__main__":
    main()
