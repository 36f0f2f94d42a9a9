"""Bodies of requests and responses. Unknown fields are kept but have no effect. Known fields must
have the right types."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from eesd.runtime.request import MAX_LOGPROBS

INT64 = 2**63 - 1
Text = Annotated[str, Field(min_length=1, max_length=1024)]
TokenId = Annotated[int, Field(ge=0, le=INT64)]
# Lists fail at the first wrong item, because errors for a million items would take half a minute
# and gigabytes.
Tokens = Annotated[list[TokenId], Field(min_length=1, fail_fast=True)]
Many = Field(min_length=1, max_length=1 << 16, fail_fast=True)
Texts = Annotated[list[str], Many]
Special = Annotated[
    bool | None,
    Field(
        description=(
            "Whether to add the tokenizer's special tokens, such as BOS, to text "
            "prompts. Defaults to true."
        )
    ),
]
Logprobs = Annotated[int, Field(ge=0, le=MAX_LOGPROBS)]


class Body(BaseModel):
    """A request body."""

    model_config = ConfigDict(extra="allow", strict=True, allow_inf_nan=False)

    def given(self) -> dict[str, Any]:
        """Return the fields that the client sent, including unknown fields."""
        return self.model_dump(exclude_unset=True)


class StreamOptions(Body):
    include_usage: bool | None = None


ALIASES = {
    "repeat_penalty": "repetition_penalty",
    "stop_sequences": "stop",
    "n_predict": "max_tokens",
    "num_predict": "max_tokens",
    "max_new_tokens": "max_tokens",
    "min_new_tokens": "min_tokens",
    "thinking": "reasoning_effort",
    "think": "reasoning_effort",
    "enable_thinking": "reasoning_effort",
}
"""Other servers' names for some fields."""
THINKING = {"enabled": "medium", "disabled": "none", True: "medium", False: "none"}
"""The reasoning effort for each value that Ollama (``think``), Qwen (``enable_thinking``) and
DeepSeek (``thinking``) use. The value of DeepSeek is an object, and its ``type`` is the key
here."""


class GenerationBody(Body):
    """The fields that all generating requests have in common. If a field is missing or null, the
    server's default applies."""

    @model_validator(mode="before")
    @classmethod
    def _as_others_write_it(cls, given: Any) -> Any:
        """Convert fields that clients of other servers write differently. Such clients use other
        names, give -1 as a limit of tokens if there is no limit, give empty stop strings, or give
        biases as pairs."""
        if not isinstance(given, dict):
            return given
        found = {**given}
        for alias, name in ALIASES.items():
            if (
                name in cls.model_fields
                and found.get(alias) is not None
                and found.get(name) is None
            ):
                value = found.pop(alias)
                if name == "reasoning_effort":
                    if isinstance(value, dict):
                        value = value.get("type")
                    if isinstance(value, str | bool):
                        value = THINKING.get(value, value)
                found[name] = value
        for name in ("max_tokens", "max_completion_tokens", "max_output_tokens"):
            if found.get(name) == -1 and type(found[name]) is int:
                found[name] = None
        if found.get("stop") == "":
            found["stop"] = None
        elif isinstance(found.get("stop"), list):
            found["stop"] = [text for text in found["stop"] if text != ""]
        if isinstance(pairs := found.get("logit_bias"), list) and all(
            isinstance(pair, list) and len(pair) == 2 for pair in pairs
        ):
            # in llama.cpp's API, false forbids the token
            found["logit_bias"] = {
                str(token): -100.0 if bias is False else bias for token, bias in pairs
            }
        return found

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Annotated[int, Field(ge=1, le=1 << 20)] | None = None
    seed: Annotated[int, Field(ge=-INT64 - 1, le=INT64)] | None = None
    cache_salt: (
        Annotated[
            str,
            Field(
                max_length=1024,
                description="Cached prefixes are shared only between requests with the same salt.",
            ),
        ]
        | None
    ) = None
    stop: Text | Annotated[list[Text], Field(max_length=16, fail_fast=True)] | None = None
    temperature: Annotated[float, Field(ge=0, lt=100)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: (
        Annotated[int, Field(ge=-1, le=INT64, description="0 and -1 disable the filter.")] | None
    ) = None
    min_p: Annotated[float, Field(ge=0, lt=1)] | None = None
    repetition_penalty: Annotated[float, Field(ge=0.01, le=100)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    logit_bias: (
        dict[Annotated[str, Field(pattern=r"^\d{1,18}$")], Annotated[float, Field(ge=-100, le=100)]]
        | None
    ) = None
    stop_token_ids: Annotated[list[TokenId], Field(max_length=128, fail_fast=True)] | None = None
    allowed_token_ids: (
        Annotated[list[TokenId], Field(min_length=1, max_length=1 << 18, fail_fast=True)] | None
    ) = None
    bad_words: Annotated[list[Text], Field(max_length=128, fail_fast=True)] | None = None
    min_tokens: Annotated[int, Field(ge=0, le=INT64)] | None = None
    ignore_eos: bool | None = None
    sampling_method: (
        Annotated[
            Literal["coupled", "rejection"],
            Field(description="Method for verifying drafts. An extension to OpenAI's API."),
        ]
        | None
    ) = None
    draft: (
        Annotated[bool, Field(description="Whether to draft. An extension to OpenAI's API.")] | None
    ) = None
    return_token_ids: (
        Annotated[
            bool, Field(description="Whether to return the token ids of each choice, as in vLLM.")
        ]
        | None
    ) = None

    @property
    def stops(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    @property
    def choices(self) -> int:
        """Number of texts for each prompt."""
        return self.n or 1

    @property
    def include_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)


class CompletionBody(GenerationBody):
    """``POST /v1/completions``."""

    prompt: str | Texts | Tokens | Annotated[list[Tokens], Many]
    max_tokens: (
        Annotated[
            int,
            Field(
                ge=0,
                le=INT64,
                description="Maximum number of new tokens. 0 is allowed only with `echo`.",
            ),
        ]
        | None
    ) = 16
    logprobs: Logprobs | None = None
    echo: bool | None = None
    add_special_tokens: Special = None
    suffix: (
        Annotated[
            str,
            Field(
                description=(
                    "Text that follows the completion. The tokenizer must have tokens for "
                    "filling in the middle."
                )
            ),
        ]
        | None
    ) = None


class Part(Body):
    type: str
    text: str | None = None


class Message(Body):
    role: str
    content: str | Annotated[list[Part], Field(fail_fast=True)] | None = None


Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


class TemplateBody(Body):
    """Fields that control how messages become a prompt. ``tools`` may also be given."""

    chat_template_kwargs: (
        Annotated[
            dict[str, Any], Field(description="Additional values to pass to the chat template.")
        ]
        | None
    ) = None
    add_generation_prompt: (
        Annotated[
            bool,
            Field(
                description="Whether the chat template begins an answer at the end of the prompt."
            ),
        ]
        | None
    ) = None
    continue_final_message: (
        Annotated[
            bool,
            Field(
                description="Whether to continue the last message instead of starting a new one."
            ),
        ]
        | None
    ) = None


class ChatBody(GenerationBody, TemplateBody):
    """``POST /v1/chat/completions``."""

    messages: Annotated[list[Message], Many]
    max_tokens: Annotated[int, Field(ge=1, le=INT64)] | None = None
    max_completion_tokens: (
        Annotated[
            int,
            Field(
                ge=1,
                le=INT64,
                description="Maximum number of new tokens. Takes precedence over `max_tokens`.",
            ),
        ]
        | None
    ) = None
    logprobs: bool | None = None
    top_logprobs: (
        Annotated[
            int,
            Field(
                ge=0,
                le=MAX_LOGPROBS,
                description=(
                    "Number of most likely tokens to return at each position. Requires `logprobs`."
                ),
            ),
        ]
        | None
    ) = None
    reasoning_effort: (
        Annotated[
            Effort, Field(description="Reasoning effort to pass to chat templates that support it.")
        ]
        | None
    ) = None


class TokenizeBody(TemplateBody):
    """The body of ``POST /tokenize``, which has a text or chat messages."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[Message], Many] | None = None
    add_special_tokens: Special = None
    return_token_strs: bool | None = None
    reasoning_effort: Effort | None = None


class DetokenizeBody(Body):
    """``POST /detokenize``."""

    model: str | None = None
    tokens: Annotated[list[TokenId], Field(fail_fast=True)]


class PromptDetails(BaseModel):
    cached_tokens: int


class CompletionDetails(BaseModel):
    """``reasoning_tokens`` counts the tokens of thoughts and of the marks around them."""

    reasoning_tokens: int


class Usage(BaseModel):
    """Numbers of tokens. Each prompt is counted once. A text without thoughts has no
    ``completion_tokens_details``."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails
    completion_tokens_details: CompletionDetails | None = None


class SpeculativeDecoding(BaseModel):
    """Drafting metrics of a response.

    Attributes:
        mean_acceptance_length: Mean number of tokens that a round with a verified draft produced.
            This is the number of accepted tokens plus one.
        draft_acceptance_rate: Share of the verified draft tokens that were accepted.
        acceptance_histogram: Number of rounds that verified a draft and accepted exactly 0, 1, 2,
            ... of its tokens.
        num_spec_steps: Number of rounds that verified a draft.
        num_accepted_draft_tokens, num_draft_tokens: Number of draft tokens that were accepted, and
            number of draft tokens that were verified.
    """

    mean_acceptance_length: float
    draft_acceptance_rate: float
    acceptance_histogram: list[int]
    num_spec_steps: int
    num_accepted_draft_tokens: int
    num_draft_tokens: int


class ResponseMetrics(BaseModel):
    speculative_decoding: SpeculativeDecoding


class CompletionLogprobs(BaseModel):
    """Log-probabilities as ``/v1/completions`` reports them. Offsets are counted in characters of
    the choice's text."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class TopLogprob(BaseModel):
    token: str
    logprob: float
    bytes: list[int]


class ChatLogprob(TopLogprob):
    top_logprobs: list[TopLogprob]


class ChatLogprobs(BaseModel):
    content: list[ChatLogprob]


class Choice(BaseModel):
    """Common fields of all choices. ``stop_reason`` is the stop string that ended the text, or
    ``deadline`` after a timeout."""

    index: int
    finish_reason: str | None
    stop_reason: str | None = None
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None


class CompletionChoice(Choice):
    text: str
    logprobs: CompletionLogprobs | None


class CalledFunction(BaseModel):
    """``arguments`` is JSON, as the model wrote it."""

    name: str | None = None
    arguments: str


class ToolCall(BaseModel):
    """A call of a function. In a stream, the first piece has ``id`` and ``name``, and later pieces
    continue the arguments."""

    index: int | None = None
    id: str | None = None
    type: str | None = None
    function: CalledFunction


class ChatMessage(BaseModel):
    role: str
    content: str | None
    reasoning_content: str | None = None
    tool_calls: list[ToolCall] | None = None


class ChatChoice(Choice):
    message: ChatMessage
    logprobs: ChatLogprobs | None


class Delta(BaseModel):
    role: str | None = None
    content: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[ToolCall] | None = None


class ChatChunkChoice(Choice):
    delta: Delta
    logprobs: ChatLogprobs | None = None


class Answer(BaseModel):
    """Common fields of all responses and chunks. ``created`` is a Unix time in seconds.
    ``ignored_keywords`` lists the keywords of the request's JSON schemas that are not enforced."""

    id: str
    object: str
    created: int
    model: str
    usage: Usage | None = None
    metrics: ResponseMetrics | None = None
    ignored_keywords: list[str] | None = None


class CompletionAnswer(Answer):
    choices: list[CompletionChoice]


class ChatAnswer(Answer):
    choices: list[ChatChoice]


class ChatChunk(Answer):
    choices: list[ChatChunkChoice]


class ModelCard(BaseModel):
    id: str
    object: str
    created: int
    owned_by: str
    max_model_len: int


class ModelList(BaseModel):
    object: str
    data: list[ModelCard]


class TokenizeAnswer(BaseModel):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str | None] | None = None


class DetokenizeAnswer(BaseModel):
    prompt: str


class TokenizerInfo(BaseModel):
    """The special tokens. Clients that truncate prompts themselves need them. A value is None if
    the model does not have the token."""

    bos_token: str | None
    eos_token: str | None
    pad_token: str | None
