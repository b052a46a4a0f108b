"""Request and response schemas of OpenAI's completion endpoints. Unsupported fields are rejected."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field

from bayeslora.server.limits import MESSAGES, PROMPTS, STOPS, TOP_LOGPROBS
from bayeslora.server.schemas import Asked, Samples, SomeText, Text

StopText = Annotated[str, Field(min_length=1, max_length=64)]
Ignored = Annotated[Any, Field(default=None, description="Accepted and ignored.")]
Unsupported = Annotated[None, Field(default=None, description="Not supported.")]
NoText = Annotated[str | None, Field(default=None, max_length=0, description="Not supported; must be empty.")]
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
        lt=2**63,
        description="Seed for weights and tokens. Without it, sampled texts differ between requests.",
    )
    n: Literal[1] | None = Field(default=None, description="Completions per prompt; only 1 is supported.")
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
        """All stop sequences."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())


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
    refusal: NoText
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


class Confidence(BaseModel):
    """Uncertainty of a generated text. In a stream, tokens arrive one by one and the totals with the last chunk."""

    tokens: list[TokenConfidence]
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
    refusal: None = None


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
