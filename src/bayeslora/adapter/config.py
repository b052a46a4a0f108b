"""Settings of the PEFT adapter, saved as ``adapter_config.json``; field names are those of PEFT's ``LoraConfig``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import InitVar, asdict, dataclass, field, fields, is_dataclass
from typing import Any

from peft import LoraConfig, PeftConfig
from peft.utils import PeftType

from bayeslora.adapter.expressions import require_plain_name
from bayeslora.errors import InputError
from bayeslora.layer_ranges import check_depth
from bayeslora.number_checks import is_number
from bayeslora.posterior.registry import posterior_config
from bayeslora.posterior.snapshots import Snapshots
from bayeslora.type_checks import check_kinds, describe

LORA_ONLY: dict[str, tuple[Any, str]] = {
    "use_dora": (
        False,
        "DoRA divides by the norm of the whole updated weight, which every draw would have to compute anew",
    ),
    "init_lora_weights": (True, "a posterior starts as its own settings say, with a mean update of zero"),
    "lora_bias": (False, "the update has no bias of its own"),
    "layer_replication": (None, "layers are adapted where they are"),
}
"""Settings of ``LoraConfig`` of which only LoRA's default is taken, with that default and the reason; they are not saved."""

NOT_COPIED = {"peft_type", "peft_version", "auto_mapping", "inference_mode"}
"""Settings of a LoRA that say what it is and how it was loaded."""

LISTED = {
    "target_modules": str,
    "exclude_modules": str,
    "layers_to_transform": int,
    "layers_pattern": str,
    "modules_to_save": str,
}
"""Settings that are lists, with the kind of their entries. Only ``modules_to_save`` cannot be one entry by itself."""


@dataclass
class BayesLoraConfig(PeftConfig):
    """A distribution over LoRA factors as a PEFT method.

    Attributes:
        posterior: which distribution: ``decoupled`` or ``inducing`` (Bayesian-LoRA with four free means, or as published),
            ``point`` (LoRA), ``ensemble``, ``meanfield`` (Bayes by backprop), ``blob``, ``ivon``, ``swag``, ``tfb``, ``laplace``,
            ``dropout`` (MC-dropout), ``contextual`` (C-LoRA) or ``adalora``.
        settings: its settings, as a dictionary or as its dataclass
            (``settings=InducingConfig(flow_depth=2)``).
        r: rank of the update.
        lora_alpha: the update is multiplied by ``lora_alpha / r``, or ``lora_alpha / √r`` with ``use_rslora``.
        lora_dropout: share of a layer's inputs that its update does not see, in training only, as in LoRA.
        bias: ``none``: biases of the base model are not trained. The only supported value.
        target_modules: names, a regular expression or ``all-linear``. By default the query, key, value and output
            projections of attention, as in ``bayeslora train``; LoRA's own targets in models with other names.
        exclude_modules: names or a regular expression of modules to leave out.
        layers_to_transform: indices of the layers to adapt; all if not given.
        layers_pattern: name of the list of layers, where it is not one that PEFT knows.
        stochastic_layers: layers with a distribution: ``all``, ``last:K`` or a fraction such as ``0.5``. Those below have a
            point estimate, so that all draws share their outputs.
        snapshots: number of snapshots taken in training, equally spaced, the last one at its end.
        members: number of last snapshots in the mixture, from which predictions draw in turn.
        rank_pattern: other ranks for some modules, by name or regular expression.
        alpha_pattern: other ``lora_alpha`` for some modules.
        use_rslora: scale by ``1/√r`` instead of ``1/r``.
        fan_in_fan_out: the base layer stores its weight as ``[in, out]`` (set automatically for GPT-2's ``Conv1D``).
        modules_to_save: modules that are trained in full and saved with the adapter.
        trainable_token_indices: tokens whose embeddings are trained too. Never ``None``: PEFT would then copy the frozen
            output head into every checkpoint of an adapter that targets it.
        target_parameters: not supported; a value raises an error that explains why.
        init_weights: start as the posterior does, with a mean update of zero. ``False`` perturbs every parameter at random,
            which is useful in tests only.
        posterior_scale: multiplier of the posterior's standard deviations, chosen by calibration.
        seed: seed of the initial values. Several adapters on one model start from different values.
        use_dora: not supported, and neither are ``init_lora_weights``, ``lora_bias`` and ``layer_replication``: LoRA's defaults
            are taken, so that scripts for LoRA work, and other values raise an error that explains why.
        layer_names: the adapted layers in the order in which the saved tensors stack them; set automatically.
        base_fingerprint: distinguishes the adapter's base model from others of the same shape; set automatically.
    """

    posterior: str = "decoupled"
    settings: Any = field(default_factory=dict)
    r: int = 8
    lora_alpha: float = 16
    lora_dropout: float = 0.0
    bias: str = "none"
    target_modules: list[str] | set[str] | str | None = None
    exclude_modules: list[str] | set[str] | str | None = None
    layers_to_transform: list[int] | int | None = None
    layers_pattern: list[str] | str | None = None
    stochastic_layers: str = "all"
    snapshots: int = 0
    members: int = 0
    rank_pattern: dict[str, int] = field(default_factory=dict)
    alpha_pattern: dict[str, float] = field(default_factory=dict)
    use_rslora: bool = False
    fan_in_fan_out: bool = False
    modules_to_save: list[str] | None = None
    trainable_token_indices: list[int] | dict[str, list[int]] | None = None
    target_parameters: list[str] | None = None
    init_weights: bool = True
    posterior_scale: float = 1.0
    seed: int = 0
    layer_names: list[str] | None = None
    base_fingerprint: str | None = None
    use_dora: InitVar[bool] = False
    init_lora_weights: InitVar[bool | str] = True
    lora_bias: InitVar[bool] = False
    layer_replication: InitVar[list[tuple[int, int]] | None] = None

    @classmethod
    def from_lora(cls, config: LoraConfig, **settings: Any) -> BayesLoraConfig:
        """The settings of a LoRA as settings of a new adapter. What is not supported must be at its default.

        Args:
            config: of PEFT. Without ``target_modules``, our default applies.
            settings: that LoRA has not, such as ``posterior``, or that replace its own.
        """
        if getattr(config, "peft_type", None) != PeftType.LORA:
            raise InputError(f"expected a peft.LoraConfig, got {type(config).__name__}")
        given, plain = config.to_dict(), LoraConfig().to_dict()
        shared = {it.name for it in fields(cls)} | LORA_ONLY.keys()
        strange = {name: value for name, value in given.items() if name not in shared and value != plain.get(name)}
        if strange:
            told = ", ".join(f"{name}={value!r}" for name, value in strange.items())
            raise InputError(f"not supported: {told}; leave them at LoRA's defaults, or use PEFT's LoraConfig")
        return cls(**{name: value for name, value in given.items() if name in shared - NOT_COPIED} | settings)

    def __post_init__(self, *lora_only: Any) -> None:
        super().__post_init__()
        for name, value in zip(LORA_ONLY, lora_only, strict=True):  # attributes, but not of what is saved
            setattr(self, name, value)
        self.peft_type = PeftType("BAYESLORA")
        if is_dataclass(self.settings) and not isinstance(self.settings, type):
            self.settings = asdict(self.settings)
        self._check_kinds()
        if self.posterior == "snapshots":  # former format of checkpoint ensembles
            kept = {"snapshots": 4, "members": 3, **self.settings}
            self.posterior, self.settings = "point", {}
            self.snapshots, self.members = kept["snapshots"], kept["members"]
        self.settings = asdict(posterior_config(self.posterior, self.settings))  # saved whole: defaults may change
        if self.trainable_token_indices is None:
            self.trainable_token_indices = {}
        for name in ("target_modules", "exclude_modules"):
            if isinstance(getattr(self, name), list):
                setattr(self, name, set(getattr(self, name)))
        # a given fingerprint means that the adapter was loaded
        self.trained_on = self.base_fingerprint
        # local paths of base models, with their public names
        self.base_names: dict[str, str] = {}
        self.check()

    def check(self) -> None:
        """Refuse invalid values; they may have been set one by one."""
        self._check_kinds()
        check_depth(self.stochastic_layers, "stochastic_layers")
        self.remembered()
        ranks = {"r": self.r, **self.rank_pattern}
        for name, rank in ranks.items():
            if not isinstance(rank, int) or isinstance(rank, bool) or rank < 1:
                raise ValueError(f"the rank must be an integer of at least 1, got {name}={rank!r}")
        for name, alpha in {"lora_alpha": self.lora_alpha, **self.alpha_pattern}.items():
            if not is_number(alpha):
                raise ValueError(f"lora_alpha must be a finite number, got {name}={alpha!r}")
        self._check_dropped()
        self._check_lora_only()
        if self.bias != "none":
            raise ValueError(f"bias={self.bias!r} is not supported: biases are not trained; leave it at 'none'")
        self._check_targets()

    def _check_kinds(self) -> None:
        """Refuse values of a kind that no setting has, which would fail later or stand for something else."""
        plain = ("posterior", "posterior_scale", "seed", "snapshots", "members")
        check_kinds(type(self), {name: getattr(self, name) for name in plain})
        for name in ("settings", "rank_pattern", "alpha_pattern"):
            if not isinstance(getattr(self, name), Mapping):
                raise InputError(f"{name} is {getattr(self, name)!r}; give a dictionary")
        for name, kind in LISTED.items():
            given = getattr(self, name)
            listed = isinstance(given, (list, tuple, set, frozenset)) and all(isinstance(one, kind) for one in given)
            alone = isinstance(given, kind) and name != "modules_to_save"
            if not (given is None or listed or alone):
                raise InputError(f"{name} is {given!r}; give a list, each {describe(kind)}")

    def remembered(self) -> Snapshots:
        """Which snapshots the posterior keeps."""
        return Snapshots(taken=self.snapshots, kept=self.members)

    def _check_dropped(self) -> None:
        p = self.lora_dropout
        if not (isinstance(p, (int, float)) and 0.0 <= p < 1.0):
            raise ValueError(f"lora_dropout must be at least 0 and below 1, got {p!r}")
        if p > 0.0 and self.posterior == "dropout":
            raise ValueError(
                f"lora_dropout={p} and the posterior 'dropout' would drop inputs twice; set p in its settings instead"
            )

    def _check_lora_only(self) -> None:
        for name, (default, reason) in LORA_ONLY.items():
            given = getattr(self, name)
            if given != default:
                raise InputError(
                    f"{name}={given!r} is not supported: {reason}; leave it at {default!r}, or use PEFT's LoraConfig"
                )

    def _check_targets(self) -> None:
        if self.target_parameters:
            raise ValueError(
                f"target_parameters={self.target_parameters} is not supported: a draw of a stacked expert weight would be "
                "as large as the experts themselves; adapt attention and the head by target_modules instead"
            )
        if isinstance(self.target_modules, str) and self.target_modules != "all-linear":
            for name in ("layers_to_transform", "layers_pattern"):
                if getattr(self, name) is not None:
                    raise ValueError(f"{name} cannot be used when target_modules is a regular expression")
        if self.layers_pattern is not None and self.layers_to_transform is None:
            raise ValueError("layers_pattern needs layers_to_transform: it names the list those indices count in")
        for name in ("layers_pattern", "modules_to_save"):
            given = getattr(self, name) or ()
            for one in (given,) if isinstance(given, str) else given:
                require_plain_name(name, one)  # PEFT makes a regular expression of it

    @property
    def expressions(self) -> list[str]:
        """Settings that are, or may be, regular expressions for module names."""
        targets = (self.target_modules, self.exclude_modules)
        return [it for it in targets if isinstance(it, str)] + [*self.rank_pattern, *self.alpha_pattern]

    @property
    def portable_base(self) -> str | None:
        """The name by which other machines can load the base model."""
        name = self.base_model_name_or_path
        return self.base_names.get(name, name) if name else name

    def to_dict(self) -> dict[str, Any]:
        """The settings as saved."""
        return {**super().to_dict(), "base_model_name_or_path": self.portable_base}

    def scaling(self, rank: int, alpha: float) -> float:
        """Factor of the update ``B A``."""
        return alpha / (rank**0.5 if self.use_rslora else rank)
