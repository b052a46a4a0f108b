"""Settings of a search. Imports are light, because the command line is built from them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from tyro.conf import OmitArgPrefixes, arg

from bayeslora.errors import InputError
from bayeslora.number_checks import check_count
from bayeslora.runs.config import RunConfig
from bayeslora.tuning.constraints import Constraint, parse_constraint
from bayeslora.tuning.space import Axis, parse_axis

OBJECTIVES = {"ece": 1.0, "nll": 1.0, "acc": -1.0}
"""Objectives to minimise: outcomes on the validation split, times these factors."""


@dataclass(frozen=True, kw_only=True)
class Tuning:
    """A search for the settings of one method on one task."""

    run: Annotated[OmitArgPrefixes[RunConfig], arg(name="")]
    search: tuple[str, ...] = ("learning_rate=1e-4:1e-2:log", "weight_decay=1e-4:1e-1:log")
    """Settings to search, each NAME=LOW:HIGH or NAME=LOW:HIGH:log: any numeric option of train, such as kl_beta or rank,
    or settings.NAME and rate_multipliers.NAME. Integers stay integers."""
    constraints: tuple[str, ...] = ()
    """Constraints on a run, each in quotes: 'acc>=lora-0.005', 'train_seconds<=600', 'nll<=1.2'. A bound with lora is
    relative to a LoRA that is trained first with the same settings."""
    trials: int = 32
    """Total number of runs. The same command with more extends the search."""
    start: int | None = None
    """Initial runs at Sobol points before the first model; by default twice the number of settings, plus two."""
    q: int = 1
    """Points chosen at once, to run in parallel with --workers."""
    feasibility: Literal["mc", "pof"] = "mc"
    """How constraints enter the expected improvement: mc inside the expectation, pof by the probability of feasibility."""

    def __post_init__(self) -> None:
        names = [axis.name for axis in self.axes]
        if not names:
            raise InputError("search is empty; name at least one setting, such as learning_rate=1e-4:1e-2:log")
        if len(set(names)) < len(names):
            raise InputError(f"search names one twice ({', '.join(names)}); give each once")
        if self.feasibility not in ("mc", "pof"):
            raise InputError(f"feasibility is {self.feasibility!r}; choose mc, pof")
        for name, least in (("start", 2), ("q", 1)):
            if getattr(self, name) is not None:
                check_count(name, getattr(self, name), least)
        if self.trials < self.first:
            raise InputError(
                f"trials is {self.trials}, but {self.first} are needed to start with; give at least as many, or a smaller start"
            )
        if self.run.report_split != "test":
            raise InputError(
                "report_split is not for tune, whose runs are always about the validation split; leave it out"
            )
        _ = self.limits

    @property
    def axes(self) -> list[Axis]:
        """The searched settings."""
        return [parse_axis(text) for text in self.search]

    @property
    def limits(self) -> list[Constraint]:
        """The constraints."""
        return [parse_constraint(text) for text in self.constraints]

    @property
    def first(self) -> int:
        """Number of initial trials at evenly spread points."""
        return 2 * len(self.search) + 2 if self.start is None else self.start
