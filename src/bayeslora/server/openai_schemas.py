"""Requests and responses of OpenAI's completion endpoints; unsupported fields are refused."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field

from bayeslora.server.limits import MESSAGES, PROMPTS, STOPS, TOP_LOGPROBS
from bayeslora.server.schemas import Asked, Samples, SomeText, Text

StopText = Annotated[str, Field(min_length=1, max_length=64)]
Ignored = Annotated[Any, Field(default=None, description="Taken, and without effect.")]
Unsupported = Annotated[None, Field(default=None, description="Not supported.")]
NoText = Annotated[str | None, Field(default=None, max_length=0, description="Not supported, unless it is empty.")]
NoList = Annotated[
    list[Any] | None, Field(default=None, max_length=0, description="Not supported, unless it is empty.")
]
NoPenalty = Annotated[float | None, Field(default=None, ge=0, le=0, description="Not supported.")]


class StreamOptions(Asked):
    """Options of a stream."""

    include_usage: bool = False
    include_obfuscation: Ignored


class TextRequest(Asked):
    """Fields of both endpoints."""

    model: str | None = Field(default=None, description="Name of the model, as /v1/models has it.")
    max_tokens: int | None = Field(default=None, ge=1, description="After which it ends at the latest.")
    temperature: float | None = Field(
        default=None, ge=0, le=2, description="0 takes the most probable token; 1 if left out."
    )
    top_p: float | None = Field(default=None, gt=0, le=1, description="Share of the probability that is drawn from.")
    stop: StopText | Annotated[list[StopText], Field(max_length=STOPS)] | None = None
    seed: int | None = Field(
        default=None, ge=0, lt=2**63, description="Of weights and tokens; without it sampled texts differ each time."
    )
    n: Literal[1] | None = Field(default=None, description="One text per prompt; only 1 is supported.")
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    samples: Samples
    frequency_penalty: NoPenalty
    presence_penalty: NoPenalty
    logit_bias: Unsupported
    user: Ignored
    metadata: Ignored
    store: Ignored
    service_tier: Ignored
    safety_identifier: Ignored
    prompt_cache_key: Ignored

    @property
    def stops(self) -> tuple[str, ...]:
        """All stop texts."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())


class CompletionRequest(TextRequest):
    """Texts to continue."""

    prompt: SomeText | Annotated[list[SomeText], Field(min_length=1, max_length=PROMPTS)]
    logprobs: int | None = Field(
        default=None, ge=0, le=TOP_LOGPROBS, description="How many of the most probable tokens to tell."
    )
    best_of: Literal[1] | None = None
    echo: Literal[False] | None = None
    suffix: Unsupported


class TextPart(Asked):
    """A part of a message."""

    type: Literal["text"]
    text: Text


class Message(Asked):
    """A message. Clients may send one back as received, including the fields that OpenAI's client leaves empty."""

    role: Annotated[str, Field(min_length=1, max_length=32)]
    content: Text | Annotated[list[TextPart], Field(max_length=MESSAGES)]
    name: Ignored
    refusal: NoText
    annotations: NoList
    tool_calls: NoList
    audio: Unsupported
    function_call: Unsupported
    parsed: Unsupported

    @property
    def plain(self) -> dict[str, str]:
        """The message as chat templates expect it."""
        parts = self.content
        return {"role": self.role, "content": parts if isinstance(parts, str) else "".join(part.text for part in parts)}


class TextFormat(Asked):
    """The only supported response format."""

    type: Literal["text"]


class ChatRequest(TextRequest):
    """A conversation to continue."""

    messages: list[Message] = Field(min_length=1, max_length=MESSAGES)
    max_completion_tokens: int | None = Field(default=None, ge=1, description="The newer name of max_tokens.")
    logprobs: bool | None = None
    top_logprobs: int | None = Field(default=None, ge=0, le=TOP_LOGPROBS)
    response_format: TextFormat | None = None
    tools: Unsupported
    tool_choice: Unsupported
    functions: Unsupported
    parallel_tool_calls: Ignored


class TokenConfidence(BaseModel):
    """How sure the model was of a token. Entropies are in nats."""

    token: str
    probability: float
    entropy: float
    aleatoric: float
    epistemic: float


class Confidence(BaseModel):
    """How sure the model was of a text; a stream has the tokens one by one, and the whole text at the end."""

    tokens: list[TokenConfidence]
    log_likelihood: float | None = Field(default=None, description="Of the whole text under the average of the draws.")
    mutual_information: float | None = Field(default=None, description="Sum of the epistemic parts.")
    samples: int | None = None
    seed: int | None = Field(default=None, description="Which writes the same text again.")


class Usage(BaseModel):
    """Tokens read and written."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class CompletionLogprobs(BaseModel):
    """Log-probabilities under the average of the draws, before any temperature."""

    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]
    text_offset: list[int]


class CompletionChoice(BaseModel):
    """One text."""

    index: int
    text: str
    finish_reason: Literal["stop", "length"] | None
    logprobs: CompletionLogprobs | None
    confidence: Confidence


class Completion(BaseModel):
    """All texts, or a piece of one in a stream."""

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
    """A token and its log-probability, with the most probable tokens."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(BaseModel):
    """Log-probabilities under the average of the draws, before any temperature."""

    content: list[TokenLogprob]
    refusal: None = None


class ChatMessage(BaseModel):
    """A message from the model."""

    role: Literal["assistant"] = "assistant"
    content: str
    refusal: None = None


class ChatChoice(BaseModel):
    """One answer."""

    index: int
    message: ChatMessage
    finish_reason: Literal["stop", "length"]
    logprobs: ChatLogprobs | None
    confidence: Confidence


class ChatCompletion(BaseModel):
    """An answer in a conversation."""

    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage


class Delta(BaseModel):
    """The text that a piece adds."""

    role: Literal["assistant"] | None = None
    content: str | None = None


class ChatPieceChoice(BaseModel):
    """A piece of an answer."""

    index: int
    delta: Delta
    finish_reason: Literal["stop", "length"] | None
    logprobs: ChatLogprobs | None
    confidence: Confidence | None


class ChatPiece(BaseModel):
    """An event of a stream."""

    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChatPieceChoice]
    usage: Usage | None = None
