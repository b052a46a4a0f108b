"""Methods: a posterior with its training settings, or with a way to fit it to trained LoRAs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bayeslora.adapter.foreign import ForeignHolder
    from bayeslora.posterior import Factors, Posterior
    from bayeslora.predict.calibrate import Calibration
    from bayeslora.predict.questions.predictor import Predictor
    from bayeslora.progress import Advance, Reporter
    from bayeslora.tasks import Questions

COMMON: Mapping[str, Any] = {
    "epochs": 4,
    "batch_size": 32,
    "weight_decay": 0.0,
    "optimiser": "adamw",
    "adam_epsilon": 1e-8,
    "kl_rate": 0.01,
    "schedule": "linear",
    "warmup": 0.06,
    "milestones": (4, 6),
    "cycles": 1,
    "label_smoothing": 0.0,
    "kl_scaling": "elbo",
    "kl_beta": 1.0,
    "kl_warmup": 0.0,
    "draws": 1,
    "aim": 0,
    "clip": 1.0,
    "eval_every": 1,
    "patience": 2,
    "snapshots": 0,
    "members": 0,
}
"""Default training settings of every method; presets override them."""

PAPER: Mapping[str, Any] = {
    "epochs": 10,
    "batch_size": 8,
    "weight_decay": 0.1,
    "schedule": "multistep",
    "warmup": 0.0,
    "milestones": (4, 6),
    "label_smoothing": 0.1,
    "learning_rate": 5e-4,
    "adam_epsilon": 1e-5,
    "eval_every": 2,
}
"""Training settings that the Bayesian-LoRA paper gives for all methods (batch 16 for BoolQ and WinoGrande there)."""


@dataclass(frozen=True)
class Preset:
    """A named choice of settings.

    Attributes:
        settings: of the posterior.
        training: of the training, by field name of :class:`bayeslora.train.TrainingConfig`; missing ones are taken from
            :data:`COMMON`.
        posterior: if it is not the method's.
    """

    settings: Mapping[str, Any] = field(default_factory=dict)
    training: Mapping[str, Any] = field(default_factory=dict)
    posterior: type[Posterior] | None = None


@dataclass(frozen=True)
class Method:
    """A method of uncertainty estimation.

    Attributes:
        name: as given on the command line.
        description: in one line.
        presets: ``default`` is the recommended one, ``paper`` the published one. For post-hoc methods, they train the LoRAs.
        posterior: its distribution; ``None`` for PEFT's own adapters, which are identified by the method's name.
        fit_post_hoc: fits the method to trained LoRAs; ``None`` if it is trained itself.
        loras: number of LoRAs that the fit needs, for given settings of the posterior.
        peft: for PEFT's own adapters, the first version of PEFT that has it.
        needs_options: whether it can be fitted only on questions with options, and not on running text or solutions.
        start_rank: initial rank in training, relative to the requested one: some methods reduce it.
    """

    name: str
    description: str
    presets: Mapping[str, Preset]
    posterior: type[Posterior] | None = None
    fit_post_hoc: Callable[[PostHocInputs], PostHocResult] | None = None
    loras: Callable[[Mapping[str, Any]], int] = lambda settings: 1
    peft: tuple[int, int] | None = None
    needs_options: bool = False
    start_rank: float = 1.0

    def foreign(self) -> type[ForeignHolder] | None:
        """The holder class that draws from it, if it is one of PEFT's own adapters."""
        if self.peft is None:
            return None
        from bayeslora.adapter.foreign import FOREIGN

        return FOREIGN[self.name]

    def distribution(self, posterior: str | None = None) -> type[Posterior] | type[ForeignHolder]:
        """The class of its distribution, or of another of its posteriors by name, with settings and kinds of parameters."""
        from bayeslora.posterior.registry import POSTERIORS

        return self.foreign() or POSTERIORS[posterior or self.posterior_name]

    @property
    def posterior_name(self) -> str:
        """Name of its distribution in saved runs."""
        return self.name if self.posterior is None else self.posterior.name

    @property
    def posteriors(self) -> tuple[str, ...]:
        """Names of the posteriors that it may use, its own first."""
        others = (preset.posterior.name for preset in self.presets.values() if preset.posterior is not None)
        return tuple(dict.fromkeys((self.posterior_name, *others)))


@dataclass(frozen=True)
class PostHocInputs:
    """Inputs for fitting a method post hoc, whatever the task.

    Attributes:
        posterior: of the method, fresh and in the model.
        loras: factors of trained LoRAs, one draw each.
        seed: of the run.
        report: receives progress reports.
        fit_temperature: finds the temperature of least NLL on the validation split, with the current model.
    """

    posterior: Posterior
    loras: Sequence[Factors]
    seed: int
    report: Reporter
    fit_temperature: Callable[[Advance], float]


@dataclass(frozen=True)
class QuestionPostHocInputs(PostHocInputs):
    """Additional inputs where the task consists of questions with options.

    Attributes:
        predictor: predicts with the current model.
        train: training questions of the LoRAs.
        validation: held-out questions.
    """

    predictor: Predictor
    train: Questions
    validation: Questions


@dataclass(frozen=True)
class PostHocResult:
    """Result of a post-hoc fit.

    Attributes:
        found: figures for the result.
        calibration: to be applied to all later predictions, if any.
    """

    found: Mapping[str, Any] = field(default_factory=dict)
    calibration: Calibration | None = None
