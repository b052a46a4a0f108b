"""Several actions timed in turns: whatever else the machine does falls on all of them alike."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

Action = Callable[[], object]


@dataclass(frozen=True)
class Timing:
    """How long an action took, in seconds, over many rounds.

    Attributes:
        rounds: one measurement for each.
    """

    rounds: tuple[float, ...]

    @property
    def median(self) -> float:
        """The middle one."""
        return statistics.median(self.rounds)

    def ratio_to(self, other: Timing) -> tuple[float, float, float]:
        """Median over the rounds of this one's time relative to the other's, and the quartiles."""
        ratios = sorted(mine / theirs for mine, theirs in zip(self.rounds, other.rounds, strict=True))
        if len(ratios) < 2:
            return ratios[0], ratios[0], ratios[0]
        low, middle, high = statistics.quantiles(ratios, n=4, method="inclusive")
        return middle, low, high


def time_in_turns(
    actions: Mapping[str, Action], device: torch.device, *, repeats: int, warmup: int
) -> dict[str, Timing]:
    """Time each action once in every round, after some rounds that do not count."""
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
