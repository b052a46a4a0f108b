"""Requests and responses of ``/v1/choices`` and the small endpoints."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from bayeslora.server.limits import CHOICES, TEXT_CHARACTERS

Text = Annotated[str, Field(max_length=TEXT_CHARACTERS)]
SomeText = Annotated[str, Field(min_length=1, max_length=TEXT_CHARACTERS)]
Samples = Annotated[
    int | None,
    Field(
        default=None, ge=0, description="Weight draws to average, 0 for the posterior mean; the run's own by default."
    ),
]


class Asked(BaseModel):
    """A request; unknown fields are refused, so that misspelt ones are noticed."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class ErrorDetail(BaseModel):
    """Details of an error."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorReply(BaseModel):
    """An error in OpenAI's format."""

    error: ErrorDetail


class ChoicesRequest(Asked):
    """A question and its choices."""

    question: SomeText = Field(description="The question.", examples=["Which of these can fly?"])
    choices: list[SomeText] = Field(
        min_length=2, max_length=CHOICES, description="What may be answered.", examples=[["a bat", "a trout"]]
    )
    passage: Text = Field(default="", description="A text that the question is about.")
    level: float = Field(
        default=0.9, gt=0, lt=1, description="How often the right choice is to be in the prediction set, if calibrated."
    )
    samples: Samples
    bare: bool = Field(default=False, description="Ask the question as it stands, for runs trained so, as on urns.")
    deterministic: bool = Field(default=False, description="Give the posterior mean's probabilities, too.")
    model: str | None = Field(default=None, description="Name of the model, as /v1/models has it.")


class ChoicesReply(BaseModel):
    """The model's answer, probabilities and uncertainty. Entropies are in nats."""

    model: str
    answer: str | None = Field(description="The choice taken; nothing if the model is not sure enough.")
    abstains: bool = Field(description="Whether the confidence is below the threshold that calibration chose.")
    confidence: float = Field(description="Probability of the most probable choice.")
    choices: list[str]
    probabilities: list[float] = Field(
        description="Of the choices, averaged over the draws, at the fitted temperature."
    )
    draws: list[list[float]] = Field(description="Of the choices, for every draw, before the temperature.")
    entropy: float = Field(description="How unsure the model is.")
    aleatoric: float = Field(description="The part that is in every draw, on average.")
    epistemic: float = Field(
        description="The part that lies between the draws. Little of it does not make an answer right."
    )
    level: float
    prediction_set: list[str] | None = Field(
        description="Choices among which the right one is with the wanted probability; nothing without calibration."
    )
    deterministic: list[float] | None = Field(description="The posterior mean's probabilities, if asked for.")


class Model(BaseModel):
    """A model in OpenAI's format."""

    id: str
    object: str = "model"
    created: int
    owned_by: str = "bayeslora"


class ModelList(BaseModel):
    """The list of served models, which has one."""

    object: str = "list"
    data: list[Model]


class Health(BaseModel):
    """Result of the health check."""

    status: str


class Bins(BaseModel):
    """A reliability diagram: confidence and accuracy by bin, null where a bin is empty."""

    edges: list[float]
    count: list[int]
    confidence: list[float | None]
    accuracy: list[float | None]


class CoveragePoint(BaseModel):
    """Coverage and error rate of answers with at least a confidence."""

    threshold: float
    coverage: float
    error_rate: float
    accuracy: float


class Span(BaseModel):
    """An interval of a metric; a bound is null where it is infinite."""

    low: float | None
    high: float | None


class Evaluation(BaseModel):
    """Metrics of the run."""

    model: str
    method: str
    base_model: str
    task: str = Field(description="What metrics, bins and curve are about; if there are none, what it was trained on.")
    samples: int = Field(description="Weight draws per prediction, unless a request says otherwise.")
    max_samples: int
    chat: bool = Field(description="Whether the tokenizer has a chat template.")
    split: str | None = Field(description="What metrics, bins and curve are about.")
    questions: int | None
    metrics: dict[str, float | None] | None
    intervals: dict[str, Span] | None = Field(description="95 % intervals of the main metrics.")
    calibration: dict[str, Any] | None = Field(
        description="What bayeslora calibrate, or the method itself, found: temperature, threshold, target, levels."
    )
    as_served: bool = Field(
        description="Whether metrics, bins and curve are of the model as it is served, and not from before its calibration."
    )
    reliability: Bins | None
    risk_coverage: list[CoveragePoint] | None = Field(description="From the highest confidence down.")
