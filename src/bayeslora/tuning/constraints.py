"""Constraints on a run: upper or lower bounds of outcomes, which may be relative to LoRA's."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass

from bayeslora.errors import InputError, did_you_mean
from bayeslora.runs.result import RunResult

METRICS = ("acc", "nll", "ece", "brier", "adaptive_ece", "classwise_ece", "mce", "aurc", "confidence", "entropy")
COSTS = ("train_seconds", "seconds_per_step", "predict_seconds", "trainable_parameters")
BASELINE = "lora"

ROUNDING = 1e-12
"""An outcome that differs from its bound by no more than this share of it is equal to it."""

_CONSTRAINT = re.compile(r"\s*(\w+)\s*(<=|>=)\s*(?:(lora)\s*(?:([-+*])\s*(.+?))?|(.+?))\s*")


@dataclass(frozen=True)
class Constraint:
    """``outcome ≤ bound`` or ``outcome ≥ bound``.

    Attributes:
        outcome: its name, one of :data:`METRICS` or :data:`COSTS`.
        at_most: whether it is an upper bound.
        number: the bound, or the term or factor relative to LoRA's outcome.
        relation: ``+`` or ``*`` if the bound is relative to LoRA's outcome, else empty.
    """

    outcome: str
    at_most: bool
    number: float
    relation: str = ""

    def bound(self, baseline: Mapping[str, float]) -> float:
        """The bound as a number; ``baseline`` are LoRA's outcomes, if it is relative."""
        if not self.relation:
            return self.number
        reference = baseline[self.outcome]
        return reference + self.number if self.relation == "+" else reference * self.number

    def violation(self, outcomes: Mapping[str, float], baseline: Mapping[str, float]) -> float:
        """``c``, at most zero if the constraint is satisfied; zero within the rounding of a bound relative to LoRA."""
        bound = self.bound(baseline)
        excess = outcomes[self.outcome] - bound
        if abs(excess) <= ROUNDING * abs(bound):
            return 0.0
        return excess if self.at_most else -excess


def parse_constraint(text: str) -> Constraint:
    """Parse ``acc>=0.7``, ``train_seconds<=600``, ``acc>=lora-0.005`` or ``train_seconds<=lora*2``."""
    match = _CONSTRAINT.fullmatch(text)
    if match is None:
        raise InputError(
            f"constraints has {text!r}; give OUTCOME<=BOUND or OUTCOME>=BOUND in quotes, such as 'acc>=lora-0.005'"
        )
    outcome, comparison, lora, sign, offset, plain = match.groups()
    known = (*METRICS, *COSTS)
    if outcome not in known:
        raise InputError(
            f"constraints has {text!r}: unknown outcome {outcome!r}{did_you_mean(outcome, known)}; choose {', '.join(known)}"
        )
    try:
        number = float(plain or offset or 0.0)
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise InputError(
            f"constraints has {text!r}: the bound is no number; give one such as 0.7, or lora, lora-0.005, lora*2"
        )
    relation = "" if not lora else "*" if sign == "*" else "+"
    return Constraint(outcome, comparison == "<=", -number if sign == "-" else number, relation)


def outcomes_of(result: RunResult) -> dict[str, float]:
    """Outcomes in a run's ``result.json`` that can be constrained."""
    costs = {**result.timing, "trainable_parameters": float((result.parameters or {})["trainable"])}
    return {name: float(result.metrics[name]) for name in METRICS} | {name: float(costs[name]) for name in COSTS}
