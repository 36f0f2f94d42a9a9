"""``/v1/models``, ``/tokenize`` and ``/detokenize``."""

from time import time
from typing import Annotated

from fastapi import APIRouter, Depends
from fastapi.concurrency import run_in_threadpool

from eesd.serve.answers import serving_of
from eesd.serve.errors import ERRORS, APIError
from eesd.serve.json_route import JSONRoute
from eesd.serve.options import Serving
from eesd.serve.params import check_model
from eesd.serve.schemas import DetokenizeAnswer, DetokenizeBody, ModelCard, ModelList, TokenizeAnswer, TokenizeBody

router = APIRouter(route_class=JSONRoute, responses=ERRORS)
STARTED = int(time())
Shared = Annotated[Serving, Depends(serving_of)]


def _card(serving: Serving) -> ModelCard:
    name, most = serving.model_name, serving.max_model_len
    return ModelCard(id=name, object="model", created=STARTED, owned_by="eesd", max_model_len=most)


@router.get("/v1/models")
async def models(serving: Shared) -> ModelList:
    """The model that is served."""
    return ModelList(object="list", data=[_card(serving)])


@router.get("/v1/models/{model:path}")
async def model(model: str, serving: Shared) -> ModelCard:
    """The model of this name."""
    check_model(model, serving)
    return _card(serving)


@router.post("/tokenize")
async def tokenize(body: TokenizeBody, serving: Shared) -> TokenizeAnswer:
    """The tokens of a text, or of chat messages as the model sees them."""
    check_model(body.model, serving)
    if (body.prompt is None) == (body.messages is None):
        raise APIError(400, "Give either prompt or messages.", "prompt", "invalid_value")
    messages = [message.given() for message in body.messages or ()]
    tokens = await run_in_threadpool(serving.service.llm.encode, messages if body.prompt is None else body.prompt)
    return TokenizeAnswer(count=len(tokens), max_model_len=serving.max_model_len, tokens=tokens)


@router.post("/detokenize")
async def detokenize(body: DetokenizeBody, serving: Shared) -> DetokenizeAnswer:
    """The text of tokens, without special tokens."""
    check_model(body.model, serving)
    llm = serving.service.llm
    size = llm.manifest.geometry.vocab_size
    if any(token >= size for token in body.tokens):
        raise APIError(400, f"A token is too large; the model has {size} tokens.", "tokens", "invalid_value")
    return DetokenizeAnswer(prompt=await run_in_threadpool(llm.codec.decode, body.tokens))
