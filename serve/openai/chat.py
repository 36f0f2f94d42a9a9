"""``POST /v1/chat/completions``."""

from collections.abc import Sequence

from fastapi import APIRouter, Request
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import Response

from eesd.runtime.request import Update
from eesd.runtime.text import TextCodec
from eesd.serve.grammar.harmony import MARKS, HarmonyParser, writes_harmony
from eesd.serve.grammar.thinking import BEGIN, END, ThinkParser, may_think
from eesd.serve.grammar.tool_calls import ToolDelta, whole_calls
from eesd.serve.grammar.tools import Tools, encode_chat, special_token, tools_of
from eesd.serve.http.errors import ANSWERS, APIError
from eesd.serve.http.json_route import JSONRoute, Shared
from eesd.serve.http.options import Serving
from eesd.serve.openai.answers import finished, new_answer, respond
from eesd.serve.openai.generations import Generations, Progress
from eesd.serve.openai.logprobs import TokenWriter
from eesd.serve.openai.params import admit, requests_of
from eesd.serve.openai.schemas import (
    ChatAnswer,
    ChatBody,
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatMessage,
    Delta,
    TokenizeBody,
    ToolCall,
)

router = APIRouter(route_class=JSONRoute)


@router.post("/v1/chat/completions", response_model=ChatAnswer, responses=ANSWERS)
async def chat_completions(body: ChatBody, request: Request, serving: Shared) -> Response:
    """Answer chat messages."""
    if body.top_logprobs is not None and not body.logprobs:
        raise APIError(
            400, "top_logprobs needs logprobs; set it to true.", "top_logprobs", "invalid_value"
        )
    generations, readers = await begin(body, request, serving)
    writers = [_Writer(body, serving, index, reader) for index, reader in enumerate(readers)]
    new = new_answer(ChatAnswer, "chat.completion", "chatcmpl", serving, generations)
    if body.stream:
        new = new_answer(ChatChunk, "chat.completion.chunk", "chatcmpl", serving, generations)
    role = Delta(role="assistant", content="")
    first = [
        ChatChunkChoice(index=index, delta=role, finish_reason=None)
        for index in range(len(writers))
    ]
    return await respond(body, request, generations, writers, new, first)


async def begin(
    body: ChatBody, request: Request, serving: Serving
) -> tuple[Generations, list["Reader"]]:
    """Make the generations that answer a chat request, and a reader for each answer. The request
    may come from any of the APIs.

    Raises:
        APIError, EESDError: The server cannot fulfil the request.
    """
    admit(body, request, serving)
    codec = serving.service.llm.codec
    tools, tokens = await run_in_threadpool(encode, body, codec)
    most = body.max_completion_tokens or body.max_tokens
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    # In a thread, because a grammar may take long to read.
    requests = await run_in_threadpool(
        requests_of, body, [tokens], serving, most, logprobs, tools=tools, key=request.state.key
    )
    generations = Generations(serving, requests, body.choices)
    request.state.generations = generations
    return generations, [
        Reader(choice, tools, codec, bool(body.stream)) for choice in generations.progress
    ]


def encode(body: ChatBody | TokenizeBody, codec: TextCodec) -> tuple[Tools | None, list[int]]:
    """Return the tools and the tokens of the messages. A template is a program and may take long,
    so call this in a thread.

    Raises:
        APIError, EESDError: The body contradicts itself, or a message or a tool cannot be used.
    """
    if body.continue_final_message and body.add_generation_prompt:
        message = (
            "continue_final_message goes on with a message, and add_generation_prompt begins one; "
            "give one of them."
        )
        raise APIError(400, message, "continue_final_message", "invalid_value")
    ending = "answer"
    if body.continue_final_message:
        ending = "continue"
    elif body.add_generation_prompt is False:
        ending = "end"
    tools = tools_of(body.given(), codec)
    messages = [message.given() for message in body.messages or ()]
    variables = body.chat_template_kwargs or {}
    tokens = encode_chat(messages, tools, codec, body.reasoning_effort, variables, ending)
    return tools, tokens


class Reader:
    """Reads one answer: the model's thoughts, text and calls.

    Attributes:
        progress: The output so far.
        tools: The functions that may be called.
    """

    def __init__(
        self, progress: Progress, tools: Tools | None, codec: TextCodec, streaming: bool
    ) -> None:
        self.progress = progress
        self.tools = tools
        # With constrained output the model does not think, because the client wants only output of
        # that form.
        is_free = progress.request.constraint is None
        has_messages = writes_harmony(codec) and (is_free or tools is not None)
        names = tools.functions if tools else ()
        self._messages = HarmonyParser(names, streaming) if has_messages else None
        parses = tools is not None and not has_messages
        self._parser = tools.parser(codec, streaming=streaming) if tools and parses else None
        marks = {special_token(mark, codec): mark for mark in (BEGIN, END, *MARKS)}
        self._marks = {token: mark for token, mark in marks.items() if token is not None}
        end = codec.tokenizer.decode(
            list(progress.request.tokens[-2 * len(BEGIN) :]), skip_special_tokens=False
        )
        thinks = may_think(codec) and is_free and not has_messages
        self._thoughts = ThinkParser(end.rstrip().endswith(BEGIN)) if thinks else None

    def see(self, update: Update) -> list[ToolDelta]:
        """Process an update. Return the deltas that it adds to the answer."""
        text = self.progress.see(update)
        last = self.progress.finish_reason is not None
        marks = dict(self._marks)
        if self._parser:
            marks |= self._parser.marks
        if self._thoughts or self._parser or self._messages:
            pieces = [marks.get(output.token, "") + output.text for output in update.tokens]
            text = "".join(pieces) + update.held
        if self._messages is not None:
            deltas = self._messages.push(text, last)
            if self._messages.calls and self.progress.finish_reason == "stop":
                self.progress.finish_reason = "tool_calls"
            return deltas
        deltas = []
        if self._thoughts:
            thought, text = self._think(self._thoughts, pieces, update.held, last)
            if thought:
                deltas.append(ToolDelta(thought=thought))
        if self._parser is None:
            if text:
                deltas.append(ToolDelta(text))
            return deltas
        deltas += self._parser.push(text)
        if last:
            deltas += self._parser.finish()
        if self._parser.calls and self.progress.finish_reason == "stop":
            self.progress.finish_reason = "tool_calls"
        return deltas

    def _think(
        self, thoughts: ThinkParser, pieces: Sequence[str], held: str, last: bool
    ) -> tuple[str, str]:
        """Return the thoughts and the text that the new tokens add, and count the thoughts'
        tokens."""
        thought = ""
        text = ""
        for piece in pieces:
            before = thoughts.thinking
            more, said = thoughts.push(piece, last=False)
            thought += more
            text += said
            self.progress.thought_tokens += before or thoughts.thinking
        more, said = thoughts.push(held, last)
        return thought + more, text + said


class _Writer:
    """Builds one choice of a chat."""

    def __init__(self, body: ChatBody, serving: Serving, index: int, reader: Reader) -> None:
        self._body = body
        self._index = index
        self._reader = reader
        self._progress = reader.progress
        self._said: list[ToolDelta] = []
        self._tokens = (
            TokenWriter(serving.codec, reader.progress.request.tokens) if body.logprobs else None
        )

    def see(self, update: Update) -> list[Delta]:
        deltas = self._reader.see(update)
        self._said += deltas
        return [Delta(**delta.to_dict()) for delta in deltas]

    def choice(self) -> ChatChoice:
        progress = self._progress
        content = "".join(delta.content for delta in self._said)
        message = ChatMessage(
            role="assistant", content=content if self._reader.tools is None else content or None
        )
        if thought := "".join(delta.thought for delta in self._said):
            message.reasoning_content = thought
        if calls := whole_calls(self._said):
            message.tool_calls = [ToolCall(**call) for call in calls]
        logprobs = self._tokens.chat(progress.outputs) if self._tokens else None
        choice = ChatChoice(
            index=self._index, message=message, logprobs=logprobs, **finished(progress)
        )
        if self._body.return_token_ids:
            choice.token_ids = [output.token for output in progress.outputs]
            choice.prompt_token_ids = list(progress.request.tokens)
        return choice

    def chunks(self, update: Update) -> list[ChatChunkChoice]:
        outputs = update.tokens
        deltas = self.see(update)
        if not deltas and outputs and (self._tokens or self._body.return_token_ids):
            deltas = [Delta(content="")]
        choices = [
            ChatChunkChoice(index=self._index, delta=delta, finish_reason=None) for delta in deltas
        ]
        if choices and self._tokens:
            choices[0].logprobs = self._tokens.chat(outputs)
        if choices and self._body.return_token_ids:
            choices[0].token_ids = [output.token for output in outputs]
        if self._progress.finish_reason:
            choices.append(
                ChatChunkChoice(index=self._index, delta=Delta(), **finished(self._progress))
            )
        return choices
