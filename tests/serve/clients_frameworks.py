"""This program uses unchanged versions of LlamaIndex and DSPy. It runs in the environment
``frameworks``."""

from typing import Any

import dspy
from clients_shared import BASE, CHAT, COUNT, KEY, MODEL, PROMPT, ROOM, TEXT, City, show
from llama_index.core.llms import ChatMessage
from llama_index.llms.openai_like import OpenAILike, OpenAILikeResponses


def ask_llama_index() -> None:
    options: Any = {"model": MODEL, "api_base": BASE, "api_key": KEY, "temperature": 0}
    chats = {"is_chat_model": True, "is_function_calling_model": True, **options}
    brief = OpenAILike(max_tokens=COUNT, **chats)
    long = OpenAILike(max_tokens=ROOM, **chats)
    messages = [ChatMessage(**message) for message in CHAT]
    show("llama-index", "chat", lambda: brief.chat(messages).message.content)
    show(
        "llama-index", "stream", lambda: "".join(p.delta or "" for p in brief.stream_chat(messages))
    )
    show("llama-index", "function", lambda: long.as_structured_llm(City).chat(messages).raw)
    strict = OpenAILike(max_tokens=ROOM, should_use_structured_outputs=True, **chats)
    show("llama-index", "object", lambda: strict.as_structured_llm(City).chat(messages).raw)
    show(
        "llama-index",
        "completion",
        lambda: OpenAILike(max_tokens=COUNT, **options).complete(PROMPT).text,
    )
    responses = OpenAILikeResponses(max_output_tokens=COUNT, **options)
    show("llama-index", "responses", lambda: responses.chat(messages).message.content)


class Asked(dspy.Signature):  # type: ignore[misc]
    """Name a city."""

    text: str = dspy.InputField()
    city: City = dspy.OutputField()


def ask_dspy() -> None:
    options: Any = {"api_base": BASE, "api_key": KEY, "temperature": 0, "cache": False}

    def brief(model: str, kind: str, prompt: str) -> Any:
        return dspy.LM(f"{model}/{MODEL}", model_type=kind, max_tokens=COUNT, **options)(prompt)[0]

    show("dspy", "chat", lambda: brief("openai", "chat", TEXT))
    show("dspy", "responses", lambda: brief("openai", "responses", TEXT)["text"])
    # DSPy sends a schema only if litellm says that the provider reads it.
    shaped = dspy.LM(f"lm_studio/{MODEL}", max_tokens=ROOM, **options)
    with dspy.context(lm=shaped, adapter=dspy.JSONAdapter()):
        show("dspy", "object", lambda: dspy.Predict(Asked)(text=TEXT).city)


ask_llama_index()
ask_dspy()
