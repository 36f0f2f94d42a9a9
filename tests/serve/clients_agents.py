"""This program uses the unchanged Agents SDK of OpenAI. It runs in the environment ``agents``,
which has a version of ``openai`` that other clients refuse."""

import asyncio
import json
from typing import Any

from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from clients_shared import BASE, COUNT, KEY, MODEL, ROOM, TEXT, City, show
from openai import AsyncOpenAI

set_tracing_disabled(True)


@function_tool(name_override="City")  # type: ignore[untyped-decorator]
def city(name: str, big: bool) -> str:
    """Remember a city."""
    return json.dumps({"name": name[:4], "big": big})


def ask(model: Any, client: str) -> None:
    def final(room: int, text: str = TEXT, turns: int = 1, **options: Any) -> Any:
        settings = {"temperature": 0, "max_tokens": room, **options.pop("settings", {})}
        agent = Agent("agent", model=model, model_settings=ModelSettings(**settings), **options)
        found = loop.run_until_complete(Runner.run(agent, text, max_turns=turns)).final_output
        return json.loads(found) if options and isinstance(found, str) else found

    async def streamed() -> str:
        settings = ModelSettings(temperature=0, max_tokens=COUNT)
        run = Runner.run_streamed(Agent("agent", model=model, model_settings=settings), TEXT)
        parts = [
            event.data async for event in run.stream_events() if event.type == "raw_response_event"
        ]
        text = "".join(part.delta for part in parts if part.type == "response.output_text.delta")
        assert text == run.final_output
        return text

    if model is chats:  # the SDK raises an error if max_output_tokens ends a response
        show(client, "chat", lambda: final(COUNT))
        show(client, "stream", lambda: loop.run_until_complete(streamed()))
    show(client, "object", lambda: final(ROOM, output_type=City))
    once: Any = {"tools": [city], "tool_use_behavior": "stop_on_first_tool"}
    forced = {"tool_choice": "required", "parallel_tool_calls": False}
    show(client, "function", lambda: final(ROOM, **once, settings=forced))
    shaped = {**once, "output_type": City, "settings": {"parallel_tool_calls": False}}
    show(client, "function_or_object", lambda: final(ROOM, **shaped))


loop = asyncio.new_event_loop()
asyncio.set_event_loop(loop)
openai = AsyncOpenAI(base_url=BASE, api_key=KEY)
chats = OpenAIChatCompletionsModel(MODEL, openai)
ask(chats, "openai-agents")
ask(OpenAIResponsesModel(MODEL, openai), "openai-agents by responses")
