"""The ablations by name: the varied setting, its values and their meaning. A new ablation is an entry here.

Imports are light, because the command line lists them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from bayeslora.errors import InputError, did_you_mean
from bayeslora.runs.config import MOST_SAMPLES, RunConfig, check_samples

BASE = "bayesian-lora"
"""The ablated method."""

PRESET = "inducing"
"""Its form that is ablated: most ablations are about settings that only the published form has."""

Change = Callable[[RunConfig], RunConfig]


def unchanged(config: RunConfig) -> RunConfig:
    """Return the run unchanged."""
    return config


@dataclass(frozen=True)
class Variation:
    """Meaning of a value: another run, or another evaluation of the same run.

    Attributes:
        change: makes the run from the reference run.
        samples: weight draws in evaluation, if varied.
        posterior_scale: factor of all standard deviations in evaluation, if varied.
        note: note in the table besides the value.
    """

    change: Change = unchanged
    samples: int | None = None
    posterior_scale: float | None = None
    note: str = ""

    @property
    def evaluated(self) -> bool:
        """Whether it is an evaluation of a run instead of a run."""
        return self.samples is not None or self.posterior_scale is not None


@dataclass(frozen=True)
class Ablation:
    """A study of predictions as one setting varies.

    Attributes:
        name: as given on the command line.
        description: in one line.
        axis: name of the setting, for tables and figures.
        values: default values.
        takes: description of valid values.
        vary: returns the meaning of a value; raises ``ValueError`` or ``KeyError`` if it is invalid.
        methods: methods to vary.
        ordered: whether values lie on a scale, so that figures may connect them by lines.
        seeds: default seeds of the runs.
    """

    name: str
    description: str
    axis: str
    values: tuple[str, ...]
    takes: str
    vary: Callable[[str], Variation]
    methods: tuple[str, ...] = (BASE,)
    ordered: bool = True
    seeds: tuple[int, ...] = (0, 1, 2)

    def variation(self, value: str) -> Variation:
        """The meaning of a value; invalid values are refused."""
        try:
            return self.vary(value)
        except (ValueError, KeyError):
            raise InputError(
                f"values has {value!r}; {self.name} takes {self.takes}, such as {' '.join(self.values)}"
            ) from None


def with_settings(settings: Mapping[str, Any]) -> Change:
    """Change settings of the posterior."""
    return lambda config: replace(
        config, adapter=replace(config.adapter, settings={**config.adapter.settings, **settings})
    )


def with_method(method: str) -> Change:
    """Change the method, and drop preset and settings of the posterior, which belong to the previous one."""
    return lambda config: (
        config
        if config.method == method
        else replace(
            config, method=method, preset="default", adapter=replace(config.adapter, posterior=None, settings={})
        )
    )


PLACEMENTS: Mapping[str, tuple[str, ...]] = {
    "A": ("q_proj", "v_proj"),
    "B": ("q_proj", "k_proj", "lm_head"),
    "C": ("q_proj", "k_proj", "v_proj", "o_proj"),
    "D": ("gate_proj", "up_proj", "down_proj"),
    "E": ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "lm_head"),
}
"""Modules that are adapted: as LoRA was first published, as Bayesian-LoRA was, attention, MLP, everything."""

DEGENERATE: Mapping[str, Any] = {
    "flow_depth": 0,
    "init_sd_u": 1e-3,
    "max_sd_u": 2e-3,
    "init_lambda": 1e-4,
    "learn_lambda": False,
}
"""Almost degenerate distribution: inducing matrices with a standard deviation of 1e-3 that cannot grow beyond twice that,
conditional noise fixed at 1e-4, no flow."""


def _flow_depth(value: str) -> Variation:
    return Variation(with_settings({"flow_depth": int(value)}))


def _inducing_size(value: str) -> Variation:
    return Variation(with_settings({"inducing_rows": int(value), "inducing_cols": int(value)}))


def _shape(value: str) -> Variation:
    rows, columns = value.split("x")
    return Variation(with_settings({"inducing_rows": int(rows), "inducing_cols": int(columns)}))


def _rank(value: str) -> Variation:
    """Vary the rank. ``alpha`` is scaled with it to keep ``alpha / rank``, and so is the inducing size, by default."""
    rank = int(value)
    if rank < 1:
        raise ValueError

    def change(config: RunConfig) -> RunConfig:
        adapter = config.adapter
        return replace(config, adapter=replace(adapter, rank=rank, alpha=adapter.alpha * rank / adapter.rank))

    return Variation(change)


def _placement(value: str) -> Variation:
    targets = PLACEMENTS[value]
    names = " ".join(target.removesuffix("_proj") for target in targets)
    return Variation(lambda config: replace(config, adapter=replace(config.adapter, targets=targets)), note=names)


def _samples(value: str) -> Variation:
    samples = int(value)
    check_samples(samples)
    return Variation(samples=samples)


def _posterior_scale(value: str) -> Variation:
    scale = float(value)
    if not (math.isfinite(scale) and scale > 0):
        raise ValueError
    return Variation(posterior_scale=scale)


def _seeds(value: str) -> Variation:
    from bayeslora.methods import METHODS

    if value not in METHODS:
        raise KeyError
    return Variation(with_method(value))


def _map_recovery(value: str) -> Variation:
    return {
        "lora": Variation(with_method("lora")),
        "degenerate": Variation(with_settings(DEGENERATE), note="sd 1e-3, lambda 1e-4, no flow"),
        BASE: Variation(),
    }[value]


def _label_smoothing(value: str) -> Variation:
    share = float(value)
    if not 0 <= share < 1:
        raise ValueError
    return Variation(lambda config: replace(config, training=replace(config.training, label_smoothing=share)))


def _share_inducing(value: str) -> Variation:
    return Variation(with_settings({"share_inducing": {"separate": False, "shared": True}[value]}))


def _preset(value: str) -> Variation:
    from bayeslora.methods import find_method

    if value not in find_method(BASE).presets:
        raise KeyError
    return Variation(lambda config: replace(config, preset=value))


_ALL = (
    Ablation(
        "flow-depth",
        "layers of the normalising flow; 0 leaves a Gaussian",
        axis="flow layers",
        values=("0", "1", "2", "4"),
        takes="whole numbers from 0",
        vary=_flow_depth,
    ),
    Ablation(
        "inducing-size",
        "rows and columns of the inducing matrices",
        axis="inducing rows and columns",
        values=("4", "9", "16", "32", "64", "128"),
        takes="whole numbers from 1",
        vary=_inducing_size,
    ),
    Ablation(
        "rank",
        "rank of the update, its scale alpha / rank kept",
        axis="rank",
        values=("2", "4", "8", "16", "32"),
        takes="whole numbers from 1",
        vary=_rank,
    ),
    Ablation(
        "placement",
        "which modules are adapted; A is q v, B q k lm_head, C attention, D MLP, E everything",
        axis="placement",
        values=tuple(PLACEMENTS),
        takes="letters",
        vary=_placement,
        ordered=False,
    ),
    Ablation(
        "shape",
        "inducing matrices of 64 entries that are not square",
        axis="inducing rows x columns",
        values=("2x32", "4x16", "8x8", "16x4", "32x2"),
        takes="rows x columns",
        vary=_shape,
    ),
    Ablation(
        "samples",
        "weight draws that are averaged, 0 for the mean; no training but of one run per seed",
        axis="weight draws",
        values=tuple(map(str, range(1, 11))),
        takes=f"whole numbers from 0 to {MOST_SAMPLES}",
        vary=_samples,
    ),
    Ablation(
        "seeds",
        "how much is chance: LoRA and Bayesian-LoRA with ten seeds each",
        axis="method",
        values=("lora", BASE),
        takes="methods",
        vary=_seeds,
        ordered=False,
        seeds=tuple(range(10)),
    ),
    Ablation(
        "map-recovery",
        "Bayesian-LoRA with hardly any distribution left, against LoRA",
        axis="posterior",
        values=("lora", "degenerate", BASE),
        takes="names",
        vary=_map_recovery,
        ordered=False,
    ),
    Ablation(
        "label-smoothing",
        "how much of the calibration it explains, in LoRA and in Bayesian-LoRA",
        axis="label smoothing",
        values=("0", "0.05", "0.1", "0.2"),
        takes="shares of at least 0 and below 1",
        vary=_label_smoothing,
        methods=("lora", BASE),
    ),
    Ablation(
        "posterior-scale",
        "factor of all standard deviations in prediction; no training but of one run per seed",
        axis="posterior scale",
        values=("0.25", "0.35", "0.5", "0.7", "1", "1.4", "2", "2.8", "4"),
        takes="positive numbers",
        vary=_posterior_scale,
    ),
    Ablation(
        "share-inducing",
        "one inducing matrix for both factors of a layer, or one each",
        axis="inducing matrices",
        values=("separate", "shared"),
        takes="names",
        vary=_share_inducing,
        ordered=False,
    ),
    Ablation(
        "preset",
        "the published settings against the library's",
        axis="preset",
        values=(PRESET, "paper"),
        takes="names",
        vary=_preset,
        ordered=False,
    ),
)

ABLATIONS: Mapping[str, Ablation] = {it.name: it for it in _ALL}


def find_ablation(name: str) -> Ablation:
    """An ablation by name."""
    if name not in ABLATIONS:
        raise InputError(
            f"unknown ablation {name!r}{did_you_mean(name, ABLATIONS)}; choose {', '.join(ABLATIONS)}, or all"
        )
    return ABLATIONS[name]
