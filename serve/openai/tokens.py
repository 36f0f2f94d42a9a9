"""``/v1/models``, ``/tokenize``, ``/detokenize`` and ``/tokenizer_info``."""

from time import time

from fastapi import APIRouter, Request
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import Response

from eesd.serve.http.errors import ERRORS, NO_PATH, APIError
from eesd.serve.http.json_route import JSONRoute, Shared
from eesd.serve.http.options import Serving
from eesd.serve.http.streaming import json_response
from eesd.serve.openai.chat import encode
from eesd.serve.openai.params import admit, check_ids, check_model, check_supported
from eesd.serve.openai.schemas import (
    DetokenizeAnswer,
    DetokenizeBody,
    ModelCard,
    ModelList,
    TokenizeAnswer,
    TokenizeBody,
    TokenizerInfo,
)

router = APIRouter(route_class=JSONRoute, responses=ERRORS)
STARTED = int(time())


def _card(name: str, serving: Serving) -> ModelCard:
    return ModelCard(
        id=name,
        object="model",
        created=STARTED,
        owned_by="eesd",
        max_model_len=serving.max_model_len,
    )


@router.get("/v1/models")
async def models(serving: Shared) -> ModelList:
    """List the served model under each of its names."""
    return ModelList(object="list", data=[_card(name, serving) for name in serving.model_names])


@router.get("/v1/models/{model:path}")
async def model(model: str, serving: Shared) -> ModelCard:
    """Return the model with this name."""
    if not model:
        raise APIError(404, NO_PATH)
    check_model(model, serving)
    return _card(model, serving)


@router.post("/tokenize", response_model=TokenizeAnswer)
async def tokenize(body: TokenizeBody, request: Request, serving: Shared) -> Response:
    """Return the tokens of a text, or the tokens that chat messages and tools become in the
    prompt."""
    admit(body, request, serving)
    if (body.prompt is None) == (body.messages is None):
        raise APIError(400, "Give either prompt or messages.", "prompt", "invalid_value")
    check_supported(body)
    if body.messages is not None and body.add_special_tokens:
        raise APIError(
            400,
            "The chat template already adds special tokens; leave add_special_tokens out.",
            "add_special_tokens",
            "invalid_value",
        )
    codec = serving.service.llm.codec
    if body.prompt is None:
        _, tokens = await run_in_threadpool(encode, body, codec)
    else:
        tokens = await run_in_threadpool(
            codec.ids, body.prompt, body.add_special_tokens is not False
        )
    answer = TokenizeAnswer(count=len(tokens), max_model_len=serving.max_model_len, tokens=tokens)
    if body.return_token_strs:
        answer.token_strs = [codec.tokenizer.id_to_token(token) for token in tokens]
    return json_response(answer)


@router.get("/tokenizer_info")
async def tokenizer_info(serving: Shared) -> TokenizerInfo:
    """Return the tokenizer's special tokens."""
    llm = serving.service.llm
    bos = llm.manifest.bos_token_id
    (eos, *_) = (*llm.manifest.eos_token_ids, None)
    bos_token, eos_token = (
        None if token is None else llm.codec.tokenizer.id_to_token(token) for token in (bos, eos)
    )
    return TokenizerInfo(bos_token=bos_token, eos_token=eos_token, pad_token=None)


@router.post("/detokenize")
async def detokenize(body: DetokenizeBody, request: Request, serving: Shared) -> DetokenizeAnswer:
    """Return the text of the given tokens without special tokens."""
    admit(body, request, serving)
    llm = serving.service.llm
    check_ids(body.tokens, llm, "tokens")
    return DetokenizeAnswer(prompt=await run_in_threadpool(llm.codec.decode, body.tokens))
