"""Request and response schemas of ``/v1/choices``, ``/v1/classify`` and the GET endpoints."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from bayeslora.server.limits import CHOICES, TEXT_CHARACTERS

Text = Annotated[str, Field(max_length=TEXT_CHARACTERS)]
SomeText = Annotated[str, Field(min_length=1, max_length=TEXT_CHARACTERS)]
Samples = Annotated[
    int | None,
    Field(
        default=None,
        ge=0,
        description="Number of posterior samples to average; 0 uses the posterior mean. Defaults to the run's setting.",
    ),
]


class Asked(BaseModel):
    """Base class of requests. Unknown fields are rejected, so that misspelt names are reported."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class ErrorDetail(BaseModel):
    """Error details."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorReply(BaseModel):
    """An error response in OpenAI's format."""

    error: ErrorDetail


class AnswerRequest(Asked):
    """How to answer."""

    level: float = Field(
        default=0.9, gt=0, lt=1, description="Target coverage of the prediction set, if the run is calibrated."
    )
    samples: Samples
    deterministic: bool = Field(default=False, description="Also return the probabilities of the posterior mean.")
    alone: bool = Field(
        default=False,
        description="Do not compute it in a batch with other requests: the last digits are then those of a model that "
        "is asked nothing else.",
    )
    model: str | None = Field(default=None, description="Model name, as listed by /v1/models.")


class ClassifyRequest(AnswerRequest):
    """A text to classify."""

    text: SomeText = Field(description="The text.", examples=["The pool is closed."])


class ChoicesRequest(AnswerRequest):
    """A multiple-choice question."""

    question: SomeText = Field(description="The question.", examples=["Which of these can fly?"])
    choices: list[SomeText] = Field(
        min_length=2, max_length=CHOICES, description="The answer options.", examples=[["a bat", "a trout"]]
    )
    passage: Text = Field(default="", description="Context passage for the question.")
    bare: bool = Field(
        default=False, description="Use the question without a template, for runs trained that way (e.g. on urns)."
    )


class ChoicesReply(BaseModel):
    """The answer with its probabilities and uncertainty. Entropies are in nats.

    Fields that :class:`bayeslora.predict.questions.answers.Answer` has, too, are in the same order.
    """

    model: str
    answer: str | None = Field(description="The chosen option; null if the model abstains.")
    confidence: float = Field(description="Probability of the most probable choice.")
    choices: list[str]
    probabilities: list[float] = Field(
        description="Probabilities of the choices, averaged over the samples, at the calibrated temperature."
    )
    entropy: float = Field(description="Total uncertainty: entropy of the averaged probabilities.")
    aleatoric: float = Field(description="Aleatoric part of the entropy: mean entropy of the samples.")
    epistemic: float = Field(
        description="Epistemic part of the entropy: disagreement between the samples. A low value does not imply "
        "a correct answer."
    )
    abstains: bool = Field(description="Whether the confidence is below the calibrated threshold.")
    agreement: float = Field(description="Share of the samples that choose the same option by themselves.")
    semantic_entropy: float = Field(description="Entropy over the options that the samples choose, in nats.")
    prediction_set: list[str] | None = Field(
        description="Choices that contain the correct one with probability `level`; null if the run is not calibrated."
    )
    distance: float | None = Field(
        description="Share of the validation questions that are nearer to the training questions than this one; null if "
        "the run has not measured it."
    )
    unfamiliar: bool | None = Field(
        description="Whether the question is unlike the training questions; null if unknown."
    )
    draws: list[list[float]] = Field(
        description="Probabilities of the choices for each posterior sample, before temperature scaling."
    )
    level: float
    deterministic: list[float] | None = Field(description="Probabilities of the posterior mean; null unless requested.")


class Model(BaseModel):
    """A model in OpenAI's format."""

    id: str
    object: str = "model"
    created: int
    owned_by: str = "bayeslora"


class ModelList(BaseModel):
    """The list of served models; it has one entry."""

    object: str = "list"
    data: list[Model]


class Proof(BaseModel):
    """Proof of a server that it has written its announcement."""

    proof: str


class Health(BaseModel):
    """Health check result."""

    status: str


class Bins(BaseModel):
    """Reliability diagram: confidence and accuracy per bin; null for empty bins."""

    edges: list[float]
    count: list[int]
    confidence: list[float | None]
    accuracy: list[float | None]


class CoveragePoint(BaseModel):
    """Coverage, error rate and accuracy at a confidence threshold."""

    threshold: float
    coverage: float
    error_rate: float
    accuracy: float


class Span(BaseModel):
    """Confidence interval of a metric; infinite bounds are null."""

    low: float | None
    high: float | None


class Evaluation(BaseModel):
    """Configuration, calibration and metrics of the run."""

    model: str
    method: str
    base_model: str
    task: str = Field(description="Task of the metrics, bins and curve; without them, the training task.")
    samples: int = Field(description="Default number of posterior samples per prediction.")
    max_samples: int
    chat: bool = Field(description="Whether the tokenizer has a chat template.")
    split: str | None = Field(description="Split of the metrics, bins and curve.")
    questions: int | None
    metrics: dict[str, float | None] | None
    intervals: dict[str, Span] | None = Field(description="95 % confidence intervals of the main metrics.")
    calibration: dict[str, Any] | None = Field(
        description="Values fitted by the method or by `bayeslora calibrate`: temperature, threshold, target, levels."
    )
    as_served: bool = Field(
        description="Whether the metrics describe the model as served; false if calibration or sampling changed since."
    )
    reliability: Bins | None
    risk_coverage: list[CoveragePoint] | None = Field(description="Risk-coverage curve, highest threshold first.")
