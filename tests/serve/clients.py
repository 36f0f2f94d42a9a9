"""This program uses unchanged third-party clients. It runs in the environment ``clients``."""

import asyncio
import json
from typing import Any

import anthropic
import instructor
import litellm
import openai
from clients_shared import BASE, CHAT, COUNT, KEY, MODEL, PROMPT, ROOM, TEXT, City, show
from langchain_openai import ChatOpenAI, OpenAI
from pydantic_ai import Agent, NativeOutput
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider

SCHEMA = City.model_json_schema()
TOOL: Any = {"type": "function", "function": {"name": "City", "parameters": SCHEMA}}
FORMAT: Any = {
    "type": "json_schema",
    "json_schema": {"name": "City", "schema": SCHEMA, "strict": True},
}


def joined(stream: Any) -> str:
    """Returns the text of a streamed chat."""
    return "".join(part.choices[0].delta.content or "" for part in stream)


def ask_openai() -> None:
    client = openai.OpenAI(base_url=BASE, api_key=KEY)
    chat: Any = {"model": MODEL, "messages": CHAT, "temperature": 0}
    create = client.chat.completions.create
    show("openai", "chat", lambda: create(**chat, max_tokens=COUNT).choices[0].message.content)
    show("openai", "stream", lambda: joined(create(**chat, max_tokens=COUNT, stream=True)))
    parse = client.chat.completions.parse
    show(
        "openai",
        "object",
        lambda: parse(**chat, max_tokens=ROOM, response_format=City).choices[0].message.parsed,
    )
    options: Any = {"model": MODEL, "input": CHAT, "temperature": 0, "max_output_tokens": COUNT}
    show("openai", "responses", lambda: client.responses.create(**options).output_text)


def ask_anthropic() -> None:
    client = anthropic.Anthropic(base_url=BASE.removesuffix("/v1"), api_key=KEY)
    chat: Any = {"model": MODEL, "messages": CHAT, "extra_body": {"temperature": 0}}
    create = client.messages.create
    show("anthropic", "chat", lambda: create(**chat, max_tokens=COUNT).content[0].text)

    def streamed() -> str:
        with client.messages.stream(**chat, max_tokens=COUNT) as stream:
            text = "".join(stream.text_stream)
            assert stream.get_final_message().content[0].text == text
            return text

    show("anthropic", "stream", streamed)
    tool = {"name": "City", "input_schema": SCHEMA}
    choice = {"type": "any", "disable_parallel_tool_use": True}
    show(
        "anthropic",
        "function",
        lambda: create(**chat, max_tokens=ROOM, tools=[tool], tool_choice=choice).content[0].input,
    )
    form = {"format": {"type": "json_schema", "schema": SCHEMA}}
    show(
        "anthropic",
        "object",
        lambda: json.loads(create(**chat, max_tokens=ROOM, output_config=form).content[0].text),
    )


def ask_as_claude_code() -> None:
    """A turn with the fields, tools and system blocks that Claude Code sends."""
    client = anthropic.Anthropic(base_url=BASE.removesuffix("/v1"), auth_token=KEY)
    cached = {"cache_control": {"type": "ephemeral"}}
    header = "x-anthropic-billing-header: cc_version=2.1.0; cc_entrypoint=cli; cch=0f3a1;"
    turn: Any = {
        "model": MODEL,
        "betas": ["claude-code-20250219", "context-management-2025-06-27"],
        "system": [
            {"type": "text", "text": header},
            {"type": "text", "text": "You are a helpful agent.", **cached},
        ],
        "messages": [{"role": "user", "content": [{"type": "text", "text": TEXT, **cached}]}],
        "tools": [
            {
                "name": "City",
                "description": "Remember a city.",
                "input_schema": {
                    "$schema": "https://json-schema.org/draft/2020-12/schema",
                    **SCHEMA,
                },
            }
        ],
        "metadata": {"user_id": "user_0_account__session_0"},
        "thinking": {"type": "adaptive"},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "extra_body": {"temperature": 0},
    }

    def streamed(**more: Any) -> Any:
        with client.beta.messages.stream(**turn, **more) as stream:
            return stream.get_final_message().content

    name = "anthropic as Claude Code"
    show(name, "answered", lambda: len(streamed(max_tokens=COUNT)) > 0)
    choice = {"type": "tool", "name": "City", "disable_parallel_tool_use": True}
    show(name, "function", lambda: streamed(max_tokens=ROOM, tool_choice=choice)[0].input)


def ask_litellm() -> None:
    options: Any = {"model": f"openai/{MODEL}", "api_base": BASE, "api_key": KEY, "temperature": 0}
    chat = options | {"messages": CHAT}
    complete = litellm.completion
    show("litellm", "chat", lambda: complete(**chat, max_tokens=COUNT).choices[0].message.content)
    show("litellm", "stream", lambda: joined(complete(**chat, max_tokens=COUNT, stream=True)))

    def message(**more: Any) -> Any:
        return complete(**chat, max_tokens=ROOM, **more).choices[0].message

    def called() -> Any:
        return message(tools=[TOOL], tool_choice="required").tool_calls[0].function.arguments

    show("litellm", "function", lambda: City.model_validate_json(called()))
    show(
        "litellm",
        "object",
        lambda: City.model_validate_json(message(response_format=FORMAT).content),
    )
    answer: Any = {**options, "input": CHAT, "max_output_tokens": COUNT}
    show("litellm", "responses", lambda: litellm.responses(**answer).output[0].content[0].text)
    options |= {"model": f"text-completion-openai/{MODEL}", "prompt": PROMPT, "max_tokens": COUNT}
    show("litellm", "completion", lambda: litellm.text_completion(**options).choices[0].text)


def ask_langchain(responses: bool) -> None:
    options: Any = {"model": MODEL, "base_url": BASE, "api_key": KEY, "temperature": 0}
    client = "langchain-openai" + " by responses" * responses
    brief = ChatOpenAI(use_responses_api=responses, max_tokens=COUNT, **options)
    long = ChatOpenAI(use_responses_api=responses, max_tokens=ROOM, **options)
    show(client, "chat", lambda: brief.invoke(CHAT).text)
    show(client, "stream", lambda: "".join(part.text for part in brief.stream(CHAT)))
    forced = long.bind_tools([TOOL], tool_choice="required")
    show(client, "function", lambda: City(**forced.invoke(CHAT).tool_calls[0]["args"]))
    show(
        client,
        "object",
        lambda: long.with_structured_output(City, method="json_schema").invoke(CHAT),
    )
    if not responses:
        show(client, "completion", lambda: OpenAI(max_tokens=COUNT, **options).invoke(PROMPT))


def ask_instructor(call: str, mode: instructor.Mode) -> None:
    options: Any = {
        "model": MODEL,
        "messages": CHAT,
        "response_model": City,
        "temperature": 0,
        "max_tokens": ROOM,
    }
    client = instructor.from_openai(openai.OpenAI(base_url=BASE, api_key=KEY), mode=mode)
    show("instructor", call, lambda: client.chat.completions.create(**options, max_retries=0))


def ask_pydantic_ai(kind: Any, client: str) -> None:
    model = kind(MODEL, provider=OpenAIProvider(base_url=BASE, api_key=KEY))
    settings = {"max_tokens": COUNT, "temperature": 0}
    brief: Any = Agent(model, model_settings=settings)

    async def stream() -> Any:
        async with brief.run_stream(TEXT) as result:
            return await result.get_output()

    def shaped(wanted: Any) -> Any:
        return (
            Agent(model, output_type=wanted, model_settings=settings | {"max_tokens": ROOM})
            .run_sync(TEXT)
            .output
        )

    show(client, "chat", lambda: brief.run_sync(TEXT).output)
    show(client, "stream", lambda: asyncio.run(stream()))
    show(client, "function", lambda: shaped(City))
    show(client, "object", lambda: shaped(NativeOutput(City)))


ask_openai()
ask_anthropic()
ask_as_claude_code()
ask_litellm()
ask_langchain(responses=False)
ask_langchain(responses=True)
ask_instructor("object", instructor.Mode.JSON_SCHEMA)
ask_instructor("function", instructor.Mode.TOOLS)
ask_pydantic_ai(OpenAIChatModel, "pydantic-ai")
ask_pydantic_ai(OpenAIResponsesModel, "pydantic-ai by responses")
