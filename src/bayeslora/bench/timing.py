"""Time several actions in turns, so that other load on the machine affects all of them alike."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

Action = Callable[[], object]


@dataclass(frozen=True)
class Timing:
    """Times of an action over many rounds, in seconds.

    Attributes:
        rounds: one time per round.
    """

    rounds: tuple[float, ...]

    @property
    def median(self) -> float:
        """Median time."""
        return statistics.median(self.rounds)

    def ratio_to(self, other: Timing) -> tuple[float, float, float]:
        """Median over the rounds of the time relative to ``other``'s, and its quartiles."""
        ratios = sorted(mine / theirs for mine, theirs in zip(self.rounds, other.rounds, strict=True))
        if len(ratios) < 2:
            return ratios[0], ratios[0], ratios[0]
        low, middle, high = statistics.quantiles(ratios, n=4, method="inclusive")
        return middle, low, high


def time_in_turns(
    actions: Mapping[str, Action], device: torch.device, *, repeats: int, warmup: int
) -> dict[str, Timing]:
    """Time each action once in every round, after untimed warm-up rounds."""
    rounds: dict[str, list[float]] = {name: [] for name in actions}
    for number in range(warmup + repeats):
        for name, action in actions.items():
            _wait(device)
            start = time.perf_counter()
            action()
            _wait(device)
            if number >= warmup:
                rounds[name].append(time.perf_counter() - start)
    return {name: Timing(tuple(times)) for name, times in rounds.items()}


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()
