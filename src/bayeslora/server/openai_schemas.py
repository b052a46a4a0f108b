"""Request and response schemas of OpenAI's completion endpoints. Unsupported fields are rejected."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field

from bayeslora.server.limits import BIASES, COMPLETIONS, MESSAGES, PROMPTS, SEEDS, STOPS, TOP_LOGPROBS
from bayeslora.server.schemas import Asked, Samples, SomeText, Text

StopText = Annotated[str, Field(min_length=1, max_length=64)]
TokenId = Annotated[str, Field(pattern=r"^[0-9]{1,9}$")]
Bias = Annotated[float, Field(ge=-100, le=100)]
Ignored = Annotated[Any, Field(default=None, description="Accepted and ignored.")]
Unsupported = Annotated[None, Field(default=None, description="Not supported.")]
NoList = Annotated[list[Any] | None, Field(default=None, max_length=0, description="Not supported; must be empty.")]
NoPenalty = Annotated[float | None, Field(default=None, ge=0, le=0, description="Not supported; must be 0.")]


class StreamOptions(Asked):
    """Stream options."""

    include_usage: bool = False
    include_obfuscation: Ignored


class TextRequest(Asked):
    """Fields common to both endpoints."""

    model: str | None = Field(default=None, description="Model name, as listed by /v1/models.")
    max_tokens: int | None = Field(default=None, ge=1, description="Maximum number of tokens to generate.")
    temperature: float | None = Field(
        default=None, ge=0, le=2, description="Sampling temperature; 0 is greedy decoding. Defaults to 1."
    )
    top_p: float | None = Field(default=None, gt=0, le=1, description="Nucleus sampling: probability mass to keep.")
    stop: StopText | Annotated[list[StopText], Field(max_length=STOPS)] | None = None
    seed: int | None = Field(
        default=None,
        ge=0,
        lt=SEEDS,
        description="Seed for weights and tokens. Without it, sampled texts differ between requests; greedy ones have that of "
        "the run.",
    )
    n: int | None = Field(default=None, ge=1, le=COMPLETIONS, description="Texts per prompt, each with its own seed.")
    top_k: int | None = Field(default=None, ge=0, description="Sample from this many most probable tokens; 0 from all.")
    min_p: float | None = Field(
        default=None, ge=0, le=1, description="Least probability to sample, as a share of the most probable token's."
    )
    logit_bias: dict[TokenId, Bias] | None = Field(
        default=None, max_length=BIASES, description="What is added to the logits of tokens, by id."
    )
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    samples: Samples
    agreement: bool | None = Field(
        default=None,
        description="Whether every posterior sample also writes a text of its own, to tell how far they agree and how probable "
        "it is that the text is right. Takes about twice as long. Defaults to true if the run's confidence in answers is "
        "calibrated.",
    )
    frequency_penalty: NoPenalty
    presence_penalty: NoPenalty
    reasoning_effort: Ignored
    verbosity: Ignored
    user: Ignored
    metadata: Ignored
    store: Ignored
    service_tier: Ignored
    safety_identifier: Ignored
    prompt_cache_key: Ignored

    @property
    def stops(self) -> tuple[str, ...]:
        """All stop sequences."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    @property
    def biases(self) -> tuple[tuple[int, float], ...]:
        """Tokens by id, with what is added to their logits."""
        return tuple((int(token), bias) for token, bias in (self.logit_bias or {}).items())


class CompletionRequest(TextRequest):
    """Prompts to complete."""

    prompt: SomeText | Annotated[list[SomeText], Field(min_length=1, max_length=PROMPTS)]
    logprobs: int | None = Field(
        default=None, ge=0, le=TOP_LOGPROBS, description="Number of most probable tokens to return per position."
    )
    best_of: Literal[1] | None = None
    echo: Literal[False] | None = None
    suffix: Unsupported


class TextPart(Asked):
    """A text part of a message."""

    type: Literal["text"]
    text: Text


class Message(Asked):
    """A chat message. Responses can be sent back unchanged, including the fields that OpenAI's client leaves empty."""

    role: Annotated[str, Field(min_length=1, max_length=32)]
    content: Text | Annotated[list[TextPart], Field(max_length=MESSAGES)]
    name: Ignored
    refusal: Ignored
    annotations: NoList
    tool_calls: NoList
    audio: Unsupported
    function_call: Unsupported
    parsed: Unsupported

    @property
    def plain(self) -> dict[str, str]:
        """The message in the format of chat templates."""
        parts = self.content
        return {"role": self.role, "content": parts if isinstance(parts, str) else "".join(part.text for part in parts)}


class TextFormat(Asked):
    """Plain text, the only supported response format."""

    type: Literal["text"]


class ChatRequest(TextRequest):
    """A conversation to continue."""

    messages: list[Message] = Field(min_length=1, max_length=MESSAGES)
    max_completion_tokens: int | None = Field(default=None, ge=1, description="Newer name of max_tokens; overrides it.")
    logprobs: bool | None = None
    top_logprobs: int | None = Field(default=None, ge=0, le=TOP_LOGPROBS)
    response_format: TextFormat | None = None
    tools: Unsupported
    tool_choice: Unsupported
    functions: Unsupported
    parallel_tool_calls: Ignored


class TokenConfidence(BaseModel):
    """Probability and uncertainty of a generated token. Entropies are in nats."""

    token: str
    probability: float
    entropy: float
    aleatoric: float
    epistemic: float


class Alternative(BaseModel):
    """A text that other posterior samples wrote."""

    text: str
    share: float = Field(description="Share of the samples.")


class Confidence(BaseModel):
    """Uncertainty of a generated text. In a stream, tokens arrive one by one and the rest with the last chunk."""

    tokens: list[TokenConfidence]
    value: float | None = Field(
        default=None,
        description="Probability that the text is right, with `agreement`: calibrated, or else that of the text itself.",
    )
    calibrated: bool | None = Field(
        default=None, description="Whether `value` is calibrated: of greedy, whole answers to a single question."
    )
    abstains: bool | None = Field(default=None, description="Whether `value` is calibrated and below the threshold.")
    agreement: float | None = Field(default=None, description="Share of the samples that write the same.")
    semantic_entropy: float | None = Field(default=None, description="Entropy over the different texts, in nats.")
    alternatives: list[Alternative] | None = Field(default=None, description="What the other samples wrote.")
    log_likelihood: float | None = Field(
        default=None, description="Log-likelihood of the text under the averaged distribution."
    )
    mutual_information: float | None = Field(default=None, description="Sum of the tokens' epistemic uncertainty.")
    samples: int | None = None
    seed: int | None = Field(default=None, description="Seed that reproduces the text.")


class Usage(BaseModel):
    """Token counts."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class CompletionLogprobs(BaseModel):
    """Log-probabilities of the averaged distribution, before temperature."""

    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]
    text_offset: list[int]


class CompletionChoice(BaseModel):
    """A completion."""

    index: int
    text: str
    finish_reason: Literal["stop", "length"] | None
    logprobs: CompletionLogprobs | None
    confidence: Confidence


class Completion(BaseModel):
    """All completions of a request, or one chunk of a stream."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | None = None


class TopLogprob(BaseModel):
    """A token and its log-probability."""

    token: str
    logprob: float
    bytes: list[int] | None


class TokenLogprob(TopLogprob):
    """A generated token, its log-probability, and the most probable tokens at its position."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(BaseModel):
    """Log-probabilities of the averaged distribution, before temperature."""

    content: list[TokenLogprob]
    refusal: None = None


class ChatMessage(BaseModel):
    """An assistant message."""

    role: Literal["assistant"] = "assistant"
    content: str
    refusal: str | None = Field(default=None, description="That the model is not sure, if it abstains.")


class ChatChoice(BaseModel):
    """A chat completion choice."""

    index: int
    message: ChatMessage
    finish_reason: Literal["stop", "length"]
    logprobs: ChatLogprobs | None
    confidence: Confidence


class ChatCompletion(BaseModel):
    """A chat completion."""

    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage


class Delta(BaseModel):
    """The text that a chunk adds."""

    role: Literal["assistant"] | None = None
    content: str | None = None
    refusal: str | None = None


class ChatPieceChoice(BaseModel):
    """A choice in a stream chunk."""

    index: int
    delta: Delta
    finish_reason: Literal["stop", "length"] | None
    logprobs: ChatLogprobs | None
    confidence: Confidence | None


class ChatPiece(BaseModel):
    """A stream chunk."""

    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChatPieceChoice]
    usage: Usage | None = None
