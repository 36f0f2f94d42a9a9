"""``POST /v1/completions``."""

from collections.abc import Sequence

from fastapi import APIRouter, Request
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import Response

from eesd.runtime.llm import LLM
from eesd.runtime.request import TokenOutput, Update
from eesd.serve.grammar.fill_in import ends_between, fill_in
from eesd.serve.http.errors import ANSWERS, APIError
from eesd.serve.http.json_route import JSONRoute, Shared
from eesd.serve.http.options import Serving
from eesd.serve.openai.answers import finished, new_answer, respond
from eesd.serve.openai.generations import Generations, Progress
from eesd.serve.openai.logprobs import TokenWriter
from eesd.serve.openai.params import admit, check_ids, requests_of
from eesd.serve.openai.schemas import (
    CompletionAnswer,
    CompletionBody,
    CompletionChoice,
    CompletionLogprobs,
)

router = APIRouter(route_class=JSONRoute)


@router.post("/v1/completions", response_model=CompletionAnswer, responses=ANSWERS)
async def completions(body: CompletionBody, request: Request, serving: Shared) -> Response:
    """Continue one prompt, or several."""
    admit(body, request, serving)
    if body.max_tokens == 0 and not body.echo:
        raise APIError(
            400, "max_tokens is 0; give at least 1, or set echo.", "max_tokens", "invalid_value"
        )
    prompts = await run_in_threadpool(_encode, body, serving.service.llm)
    if body.suffix and not body.ignore_eos:
        ends = ends_between(serving.service.llm.codec)
        body = body.model_copy(update={"stop_token_ids": [*(body.stop_token_ids or ()), *ends]})
    shown = body.logprobs if body.echo else None
    tokens = [tokens for tokens, _ in prompts]
    key = request.state.key
    # In a thread, because a grammar may take long to read.
    requests = await run_in_threadpool(
        requests_of, body, tokens, serving, body.max_tokens, body.logprobs, shown, key=key
    )
    generations = Generations(serving, requests, body.choices, body.max_tokens != 0)
    request.state.generations = generations
    echoed = [text for _, text in prompts for _ in range(body.choices)]
    places = enumerate(zip(generations.progress, echoed, strict=True))
    writers = [_Writer(body, serving, index, progress, text) for index, (progress, text) in places]
    new = new_answer(CompletionAnswer, "text_completion", "cmpl", serving, generations)
    return await respond(body, request, generations, writers, new)


def _encode(body: CompletionBody, llm: LLM) -> list[tuple[Sequence[int], str]]:
    """Return the tokens of each prompt and, with ``echo``, its text. A long text takes long to
    encode, so call this in a thread."""
    prompt = body.prompt
    prompts = prompt if isinstance(prompt, list) and not isinstance(prompt[0], int) else [prompt]
    found: list[tuple[Sequence[int], str]] = []
    if body.suffix:
        if body.echo or not all(isinstance(item, str) for item in prompts):
            raise APIError(
                400,
                "suffix needs text prompts without echo; give text, and leave echo out.",
                "suffix",
                "invalid_value",
            )
        return [(fill_in(str(item), body.suffix, llm.codec), "") for item in prompts]
    for item in prompts:
        if isinstance(item, str) and body.add_special_tokens is False:
            tokens = llm.codec.ids(item, special=False)
        else:
            tokens = llm.encode(item)
        check_ids(tokens, llm, "prompt")
        text = ""
        if body.echo:
            text = item if isinstance(item, str) else llm.codec.decode(tokens)
        found.append((tokens, text))
    return found


class _Writer:
    """Builds one choice of a completion."""

    def __init__(
        self, body: CompletionBody, serving: Serving, index: int, progress: Progress, echoed: str
    ) -> None:
        self._body = body
        self._index = index
        self._progress = progress
        self._echoed = echoed
        prompt = () if body.echo else progress.request.tokens
        self._tokens = TokenWriter(serving.codec, prompt) if body.logprobs is not None else None
        self._begun = False

    def see(self, update: Update) -> str:
        return self._progress.see(update)

    def choice(self) -> CompletionChoice:
        return self._part("".join(self._progress.text), self._progress.outputs)

    def chunks(self, update: Update) -> list[CompletionChoice]:
        choice = self._part(self.see(update), update.tokens)
        says = (
            choice.text
            or choice.token_ids
            or (choice.logprobs and choice.logprobs.tokens)
            or choice.finish_reason
        )
        return [choice] if says else []

    def _part(self, text: str, outputs: Sequence[TokenOutput]) -> CompletionChoice:
        """Return a choice that has the new text and its tokens. The first part also has the echoed
        prompt."""
        first = not self._begun
        self._begun = True
        progress = self._progress
        logprobs = self._logprobs(outputs, first)
        if first:
            text = self._echoed + text
        choice = CompletionChoice(
            index=self._index, text=text, logprobs=logprobs, **finished(progress)
        )
        if self._body.return_token_ids:
            choice.token_ids = [output.token for output in outputs]
            if first:
                choice.prompt_token_ids = list(progress.request.tokens)
        return choice

    def _logprobs(self, outputs: Sequence[TokenOutput], first: bool) -> CompletionLogprobs | None:
        if not self._tokens:
            return None
        prompt = self._progress.prompt_logprobs if first and self._body.echo else ()
        return self._tokens.completion(
            [*prompt, *(output.logprob for output in outputs if output.logprob)]
        )
