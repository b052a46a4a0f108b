"""All settings that affect the result of a run, as a tree of dataclasses that is validated on construction.

:func:`resolve` replaces ``None`` by values from the method's preset; the resolved tree is saved with the result. Paths,
device and reporting are not part of it.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args, get_origin, get_type_hints

from tyro.conf import arg
from tyro.constructors import PrimitiveConstructorSpec

from bayeslora.errors import InputError, did_you_mean
from bayeslora.layer_ranges import check_depth
from bayeslora.method_names import check_method_names
from bayeslora.number_checks import check_count, check_number, check_seed

if TYPE_CHECKING:
    from bayeslora.methods import Method
    from bayeslora.tasks.own import OwnFormat

Schedule = Literal["linear", "cosine", "cyclic", "multistep", "constant"]


def _parse_pairs(words: list[str]) -> dict[str, Any]:
    """``name=value`` pairs; a value is JSON (``0.1``, ``true``, ``null``) or else text."""
    pairs = {}
    for word in words:
        name, equals, value = word.partition("=")
        if not equals:
            raise ValueError(f"{word!r} is not NAME=VALUE")
        try:
            pairs[name] = json.loads(value)
        except json.JSONDecodeError:
            pairs[name] = value
    return pairs


Pairs = PrimitiveConstructorSpec(
    nargs="*",
    metavar="[NAME=VALUE ...]",
    instance_from_str=_parse_pairs,
    is_instance=lambda value: value is None or isinstance(value, Mapping),
    str_from_instance=lambda value: [f"{name}={json.dumps(it)}" for name, it in (value or {}).items()],
)
"""Annotation of options whose values are ``name=value`` pairs."""


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Training data and prompt format."""

    scoring: Literal["text", "letter"] = "text"
    """What answers a question: the option's text (length-normalised), or its letter. Small models need text."""
    max_tokens: int = 1024
    """Longest prompt with an option, in tokens; only a passage is truncated, from the left. In evaluation, a question that
    is longer without a passage is kept whole if it fits the model's context. Also the size of the blocks that running text
    is split into, and of the longest problem with its solution used in training. At most the model's context."""
    max_train: int | None = None
    """Use only this many training questions (blocks of text, problems), chosen at random, the same for every seed."""
    columns: Annotated[Mapping[str, str], Pairs] = field(default_factory=dict)
    """What your own data call the fields that tasks have, such as question=query answer=target; label= leaves a field out."""
    dataset_config: str | None = None
    """Configuration of a data set of the hub."""
    dataset_splits: Annotated[Mapping[str, str], Pairs] = field(default_factory=dict)
    """What a data set calls its splits, such as train=train_sft test=test_sft."""

    def __post_init__(self) -> None:
        _check_choices(self)
        check_count("max_tokens", self.max_tokens, least=2)
        if self.max_train is not None:
            check_count("max_train", self.max_train)
        self.own_format()

    def own_format(self) -> OwnFormat:
        """How own data differ from what is expected."""
        from bayeslora.tasks.own import OwnFormat

        return OwnFormat(
            {name: str(column) for name, column in self.columns.items()},
            self.dataset_config,
            {name: str(split) for name, split in self.dataset_splits.items()},
        )


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """How the base model is loaded."""

    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Precision of the frozen model; auto is bfloat16 on CUDA and float32 elsewhere. Adapters are always float32."""
    bits: Literal[4, 8] | None = None
    """Quantise the frozen model while loading (needs bitsandbytes)."""
    revision: str | None = None
    """Branch, tag or commit of a hub model."""

    def __post_init__(self) -> None:
        _check_choices(self)


@dataclass(frozen=True, kw_only=True)
class AdapterConfig:
    """Target modules and posterior of the adapter."""

    rank: int = 8
    """Rank of the update."""
    alpha: float = 16.0
    """The update is multiplied by alpha / rank."""
    targets: tuple[str, ...] = ("q_proj", "k_proj", "v_proj", "o_proj")
    """Modules to adapt, by name. The paper adapts q_proj k_proj lm_head."""
    layers: str = "all"
    """Transformer layers to adapt: all, last:K, or a fraction such as 0.5 for the upper half."""
    stochastic_layers: str = "all"
    """Layers with a distribution, in the same notation. Layers below are point estimates, which all draws share."""
    posterior: str | None = None
    """Distribution, if the method has several, such as decoupled or inducing; by default the preset's."""
    settings: Annotated[Mapping[str, Any], Pairs] = field(default_factory=dict)
    """Settings of the posterior that differ from the preset, such as flow_depth=0 init_sd_u=0.1."""

    def __post_init__(self) -> None:
        check_count("rank", self.rank)
        check_number("alpha", self.alpha, above=0)
        if not self.targets:
            raise InputError("targets is empty; name at least one module, such as q_proj")
        for name in ("layers", "stochastic_layers"):
            check_depth(getattr(self, name), name)


@dataclass(frozen=True, kw_only=True)
class TrainingConfig:
    """How the posterior is fitted. Defaults that are not shown are the method's."""

    epochs: int | None = None
    """Passes over the training questions."""
    batch_size: int | None = None
    """Questions per step."""
    micro_batch: int | None = None
    """Questions per forward pass, to save memory; the step is the same except for its noise."""
    learning_rate: float | None = None
    """Learning rate of AdamW."""
    adam_epsilon: float | None = None
    """Epsilon of AdamW, added to the root of the mean squared gradient."""
    optimiser: Literal["adamw", "split", "ivon"] | None = None
    """adamw optimises the whole objective; split uses plain SGD for the KL, as published for BLoB; ivon is for method ivon."""
    kl_rate: float | None = None
    """Learning rate of that SGD."""
    rate_multipliers: Annotated[Mapping[str, float] | None, Pairs] = None
    """Learning rates of kinds of parameters relative to learning_rate, such as flow=0.1; others keep the method's values."""
    weight_decay: float | None = None
    """Weight decay of point estimates; a posterior is never decayed."""
    schedule: Schedule | None = None
    """Learning rate schedule."""
    warmup: float | None = None
    """Share of the steps for learning rate warm-up."""
    milestones: tuple[int, ...] | None = None
    """Epochs after which schedule multistep divides the learning rate by 10."""
    cycles: int | None = None
    """Number of cycles of schedule cyclic, a cosine each."""
    label_smoothing: float | None = None
    """Share of the target distributed uniformly over the options."""
    kl_scaling: Literal["elbo", "paper", "blob"] | None = None
    """Weight of the KL: elbo is kl_beta / N, paper 0.2 / steps per epoch, blob doubles from step to step of a cycle."""
    kl_beta: float | None = None
    """Multiplier of the KL's weight."""
    kl_warmup: float | None = None
    """Share of the steps in which the KL's weight rises from zero."""
    draws: int | None = None
    """Weight draws per step, among which the questions are divided: more draws reduce gradient noise at no cost."""
    aim: int | None = None
    """Batches whose gradient sets, before the first step, the initial directions of Bayesian-LoRA's B; with 0 they are
    random."""
    clip: float | None = None
    """Bound of the gradient's norm, separately for weights and for posterior scales."""
    eval_every: int | None = None
    """Epochs between evaluations on the validation split."""
    patience: int | None = None
    """Evaluations without a better validation NLL after which training stops and restores the best; 0 never stops
    and keeps the last."""
    snapshots: int | None = None
    """Number of snapshots of the distribution, at equal intervals, the last at the end of training; 0 for none."""
    members: int | None = None
    """Number of last snapshots to draw predictions from, in turn."""
    cache_trunk: bool = False
    """Compute the frozen layers below the adapter once and cache their output: exact, and fast if layers is last:K."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass to save memory."""

    def __post_init__(self) -> None:
        _check_choices(self)
        for name in ("epochs", "batch_size", "micro_batch", "cycles", "draws", "eval_every"):
            if getattr(self, name) is not None:
                check_count(name, getattr(self, name))
        for name in ("aim", "patience", "snapshots", "members"):
            if getattr(self, name) is not None:
                check_count(name, getattr(self, name), least=0)
        for name in ("weight_decay", "kl_beta"):
            if getattr(self, name) is not None:
                check_number(name, getattr(self, name), least=0)
        for name in ("warmup", "label_smoothing", "kl_warmup"):
            if getattr(self, name) is not None:
                check_number(name, getattr(self, name), least=0, below=1)
        for name in ("learning_rate", "adam_epsilon", "kl_rate", "clip"):
            if getattr(self, name) is not None:
                check_number(name, getattr(self, name), above=0)
        for epoch in self.milestones or ():
            check_count("milestones", epoch)
        for kind, rate in (self.rate_multipliers or {}).items():
            check_number(f"rate_multipliers {kind}", rate, least=0)


MOST_SAMPLES = 1024
"""Most draws per prediction. All of them are in memory at once, and errors only fall with their square root."""


def check_samples(samples: int) -> None:
    """Refuse a negative number of draws, or one above :data:`MOST_SAMPLES`."""
    if not 0 <= samples <= MOST_SAMPLES:
        raise InputError(
            f"samples is {samples}; give 0 for the posterior mean, or a number of draws up to {MOST_SAMPLES}"
        )


@dataclass(frozen=True, kw_only=True)
class PredictionConfig:
    """How predictions are made."""

    samples: int = 4
    """Weight draws whose probabilities are averaged; 0 uses the posterior mean."""
    batch_tokens: int = 16384
    """Tokens per batch, including draws."""
    draw_layers: str = "all"
    """Layers in which the draws differ: all, last:K, or a fraction such as 0.5. Layers below use the posterior mean and
    are computed once for all draws: a fast approximation."""
    max_new_tokens: int = 512
    """Longest generated solution to a problem, in tokens."""
    solutions: int | None = None
    """Generate solutions to only this many test problems, chosen at random, the same for every run; 0 for none."""
    nli: str | None = None
    """Directory or hub id of a model for natural language inference, which tells whether free answers in other words mean the
    same. Without it, answers are compared by their words and numbers."""
    calibrate: Literal["validation", "none"] = "validation"
    """Choose posterior scale and temperature on the validation questions after training, and report metrics both as trained and
    calibrated. bayeslora calibrate searches more finely, and also chooses a threshold."""
    unfamiliar_by: Literal["distance", "entropy", "epistemic", "none"] = "distance"
    """Score that decides whether a question is unlike those of training: the distance of its features from theirs, the entropy
    of the prediction, or its epistemic part. Fitted with the calibration. none measures nothing, which saves a pass over every
    question."""
    unfamiliar_from: float = 0.99
    """A question is unfamiliar if this share of the validation questions has a lower score."""

    def __post_init__(self) -> None:
        _check_choices(self)
        check_samples(self.samples)
        check_count("max_new_tokens", self.max_new_tokens)
        if self.solutions is not None:
            check_count("solutions", self.solutions, least=0)
        check_count("batch_tokens", self.batch_tokens)
        check_depth(self.draw_layers, "draw_layers")
        check_number("unfamiliar_from", self.unfamiliar_from, above=0, most=1)


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """One run: a method on a task with a model."""

    model: str
    """smollm2, a directory, or a hub id such as org/model."""
    task: str
    """A task (see bayeslora tasks), or your own data: a file (.jsonl, .csv, .parquet, or .txt for plain text), a directory of
    splits, or a data set of the hub such as org/name. Its fields say what is learnt: messages; prompt and completion;
    question and choices; text and label; question and answer; text."""
    method: str = "bayesian-lora"
    """Method (see bayeslora methods)."""
    preset: str = "default"
    """The method's settings: default is recommended, paper is as published; bayeslora methods lists the others."""
    seed: int = 0
    """Random seed."""
    start_from: tuple[str, ...] = ()
    """Trained LoRAs to start from: directories of runs or of LoRA adapters. Methods that build on LoRAs train them
    themselves if none are given."""
    report_split: Literal["test", "validation"] = "test"
    """Split to report. With validation the test split is never read, as required for model selection."""
    data: DataConfig = field(default_factory=DataConfig)
    loading: Annotated[ModelConfig, arg(name="base model")] = field(default_factory=ModelConfig)
    adapter: AdapterConfig = field(default_factory=AdapterConfig)
    training: TrainingConfig = field(default_factory=TrainingConfig)
    prediction: PredictionConfig = field(default_factory=PredictionConfig)

    @classmethod
    def of(cls, model: str, task: str, **settings: Any) -> RunConfig:
        """A run with settings by their names alone: ``RunConfig.of("smollm2", "urns", epochs=1, rank=4)``."""
        from bayeslora.runs.saved_config import from_flat

        return from_flat({"model": model, "task": task, **settings})

    def __post_init__(self) -> None:
        _check_choices(self)
        check_seed(self.seed)


def resolve(config: RunConfig) -> RunConfig:
    """Fill in all settings that the method's preset decides."""
    check_method_names([config.method])
    from bayeslora.methods import find_method, find_preset
    from bayeslora.methods.base import COMMON
    from bayeslora.posterior.registry import make_settings

    method = find_method(config.method)
    preset = find_preset(method, config.preset)
    own = preset.posterior.name if preset.posterior else method.posterior_name
    posterior = config.adapter.posterior or own
    if posterior not in method.posteriors:
        hint = did_you_mean(posterior, method.posteriors)
        known = ", ".join(method.posteriors)
        raise InputError(f"method {method.name!r} has no posterior {posterior!r}{hint}; it has {known}")
    distribution = method.distribution(posterior)
    settings = {**(preset.settings if posterior == own else {}), **config.adapter.settings}
    try:
        settings = asdict(make_settings(posterior, distribution.config_class, settings))
    except ValueError as error:
        raise InputError(f"settings of method {method.name!r}: {error}") from error
    given = {f.name: value for f in fields(TrainingConfig) if (value := getattr(config.training, f.name)) is not None}
    training = {"rate_multipliers": dict(distribution.hints.rate_multipliers), **COMMON, **preset.training}
    training |= {**given, "rate_multipliers": {**training["rate_multipliers"], **given.get("rate_multipliers", {})}}
    _check_kinds(training["rate_multipliers"], distribution.hints.all_kinds)
    if training["optimiser"] == "split" and not distribution.hints.split:
        raise InputError(f"optimiser is 'split', but method {method.name!r} has no parts to split; use adamw")
    if (training["optimiser"] == "ivon") != (posterior == "ivon"):
        own = "ivon" if posterior == "ivon" else "adamw"
        raise InputError(
            f"optimiser is {training['optimiser']!r}, but method {method.name!r} has another kind of widths; use {own}"
        )
    if config.adapter.stochastic_layers != "all" and not distribution.partial:
        raise InputError(
            f"stochastic_layers is {config.adapter.stochastic_layers!r}, but method {method.name!r} covers all layers alike; "
            "use 'all'"
        )
    _check_snapshots(method, training["snapshots"], training["members"])
    return replace(
        config,
        adapter=replace(config.adapter, posterior=posterior, settings=settings),
        training=TrainingConfig(**training),
    )


def _check_snapshots(method: Method, snapshots: int, members: int) -> None:
    from bayeslora.posterior.snapshots import Snapshots

    if snapshots and (method.fit_post_hoc is not None or method.peft is not None):
        what = "is not trained itself" if method.peft is None else "is an adapter of PEFT's own"
        raise InputError(f"snapshots is {snapshots}, but method {method.name!r} {what}; leave it at 0")
    try:
        Snapshots(taken=snapshots, kept=members)
    except ValueError as error:
        raise InputError(str(error)) from error


def _check_kinds(multipliers: Mapping[str, float], known: Collection[str]) -> None:
    for kind in multipliers:
        if kind not in known:
            hint = did_you_mean(kind, sorted(known))
            raise InputError(
                f"rate_multipliers has {kind!r}{hint}; this method's parameters are {', '.join(sorted(known))}"
            )


def _check_choices(config: Any) -> None:
    """Refuse values that a field's ``Literal`` does not list."""
    for name, hint in get_type_hints(type(config)).items():
        value = getattr(config, name)
        literals = [part for part in (hint, *get_args(hint)) if get_origin(part) is Literal]
        known = [choice for part in literals for choice in get_args(part)]
        if known and value is not None and value not in known:
            names = list(map(str, known))
            raise InputError(f"{name} is {value!r}{did_you_mean(str(value), names)}; choose {', '.join(names)}")
