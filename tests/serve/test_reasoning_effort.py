"""Tests that the reasoning effort is passed to chat templates that read it, and that thoughts are
separated from answers."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest
from openai import BadRequestError
from support.chat_templates import CONVERSATIONS, TEMPLATES
from support.constrained import with_new_lines
from support.serving import Served, served
from tokenizers import Tokenizer, models
from transformers import AutoTokenizer

from eesd.runtime.request import Request, TokenOutput, Update
from eesd.runtime.text import TextCodec
from eesd.serve.grammar.thinking import ThinkParser
from eesd.serve.grammar.tools import _warn_of_effort
from eesd.serve.openai.chat import Reader
from eesd.serve.openai.generations import Progress

HI: Any = [{"role": "user", "content": "Hi"}]
GRADED = (
    "{% for m in messages %}{{ m.content }}{% endfor %}[{{ reasoning_effort | default('medium') }}]"
)
SWITCHED = (
    "{% for m in messages %}{{ m.content }}{% endfor %}{% if enable_thinking is false %}[off]{% "
    "else %}[on]{% endif %}"
)


def test_the_templates_variable_is_set_as_in_transformers(tmp_path: Path) -> None:
    Tokenizer(models.BPE({"<s>": 0, "</s>": 1, "a": 2}, [])).save(str(tmp_path / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": TEMPLATES["qwen3"]}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    reference = AutoTokenizer.from_pretrained(tmp_path)
    codec = TextCodec(tmp_path)
    texts = set()
    for value in (True, False):
        expected = reference.apply_chat_template(
            CONVERSATIONS["user"], tokenize=False, add_generation_prompt=True, enable_thinking=value
        )
        texts.add(codec.render(CONVERSATIONS["user"], variables={"enable_thinking": value}))
        assert expected in texts
    assert (
        len(texts) == 2 and codec.chat_template and "enable_thinking" in codec.chat_template.names
    )


def shown(server: Served, effort: str | None, **more: Any) -> str:
    """Returns the prompt of a chat, after a check that a response has the same prompt."""
    body = {
        "messages": HI,
        "max_tokens": 1,
        "return_token_ids": True,
        "reasoning_effort": effort,
        **more,
    }
    response = server.post("/v1/chat/completions", body)
    assert response.status_code == 200, response.text
    tokens = response.json()["choices"][0]["prompt_token_ids"]
    options: Any = {} if effort is None else {"reasoning": {"effort": effort}}
    found = server.openai.responses.create(model="", input="Hi", max_output_tokens=1, **options)
    assert found.usage is not None
    assert more or found.usage.input_tokens == len(tokens)
    return server.llm.codec.decode(tokens)


def test_an_effort_reaches_the_template_or_is_ignored(
    engine: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with served(with_new_lines(engine, tmp_path / "graded", GRADED)) as server:
        assert [shown(server, effort) for effort in (None, "low", "none")] == [
            "Hi[medium]",
            "Hi[low]",
            "Hi[none]",
        ]
        tool = {"type": "function", "function": {"name": "f"}}
        # The template reads no tools.
        assert shown(server, "high", tools=[tool]).endswith("Hi[high]")
    with served(with_new_lines(engine, tmp_path / "switched", SWITCHED)) as server:
        assert [shown(server, effort) for effort in (None, "none", "high")] == [
            "Hi[on]",
            "Hi[off]",
            "Hi[on]",
        ]
        others: list[dict[str, Any]] = [
            {"think": False},
            {"enable_thinking": False},
            {"thinking": {"type": "disabled"}},
        ]
        others += [{"chat_template_kwargs": {"enable_thinking": False, "unknown": 1}}]
        assert {shown(server, None, **more) for more in others} == {"Hi[off]"}
        assert shown(server, None, think=True) == "Hi[on]"
        found = server.post("/v1/completions", {"prompt": "Hi", "reasoning_effort": "low"})
        assert found.status_code == 400 and "reasoning_effort 'low' is not supported" in found.text
    with served(engine) as server:
        with pytest.raises(BadRequestError, match="reasoning_effort cannot be used"):
            server.openai.chat.completions.create(
                model="", messages=HI, extra_body={"reasoning_effort": "much"}
            )
        _warn_of_effort.cache_clear()
        with caplog.at_level(logging.WARNING, "eesd.serve"):
            assert shown(server, "low") == shown(server, "none") == shown(server, None)
        assert len(caplog.records) == 1 and "reasoning_effort of requests is ignored" in caplog.text


CLOSED = (
    "{% for m in messages %}<{{ m.content }}>{% endfor %}{% if add_generation_prompt "
    "%}<assistant>{% endif %}"
)


def test_a_prompt_can_go_on_with_the_last_message(engine: Path, tmp_path: Path) -> None:
    """As in transformers, the prompt ends with the message's content, whatever the template writes
    after it."""
    said: Any = [*HI, {"role": "assistant", "content": " Well, "}]
    with served(with_new_lines(engine, tmp_path / "closed", CLOSED)) as server:
        for more, text in (
            ({}, "<Hi>< Well, ><assistant>"),
            ({"add_generation_prompt": False}, "<Hi>< Well, >"),
        ):
            found = server.post("/tokenize", {"messages": said, **more}).json()["tokens"]
            assert server.llm.codec.decode(found) == text
        body = {"messages": said, "continue_final_message": True}
        tokens = server.post("/tokenize", body).json()["tokens"]
        assert server.llm.codec.decode(tokens) == "<Hi>< Well, "
        answer = server.post(
            "/v1/chat/completions", {**body, "max_tokens": 5, "temperature": 0}
        ).json()["choices"][0]
        assert answer["message"]["content"] == server.llm.generate(tokens, max_new_tokens=5).text
        lost = server.post(
            "/v1/chat/completions",
            {**body, "messages": [*HI, {"role": "assistant", "content": " "}]},
        )
        assert lost.status_code == 400 and "cannot be continued" in lost.text


THOUGHT = [
    ("<think>\nwell\n</think>\n\nyes", False, ("well", "yes")),
    ("well\n</think>yes </think>", True, ("well", "yes </think>")),
    (" a <think>b</think>", False, ("", " a <think>b</think>")),
    ("<think>cut o", False, ("cut o", "")),
    ("<think></think>", False, ("", "")),
    ("<thin", False, ("", "<thin")),
    ("a </thi", True, ("a </thi", "")),
    ("<think>a\n\nb </thinks> c</think>\n", False, ("a\n\nb </thinks> c", "")),
    ("", True, ("", "")),
]


@pytest.mark.parametrize(("text", "begun", "wanted"), THOUGHT)
def test_thoughts_are_told_apart_wherever_the_text_is_cut(
    text: str, begun: bool, wanted: tuple[str, str]
) -> None:
    for size in (1, 2, 3, 7, 100):
        parser = ThinkParser(begun)
        pieces = [text[at : at + size] for at in range(0, len(text), size)]
        found = [parser.push(piece, last=False) for piece in pieces] + [parser.push("", last=True)]
        assert (
            "".join(thought for thought, _ in found),
            "".join(answer for _, answer in found),
        ) == wanted, size


def test_thoughts_reach_the_client(engine: Path, tmp_path: Path) -> None:
    """The prompt opens the thoughts, and the model of this test never closes them, so its whole
    output is thought."""
    template = "{% for m in messages %}{{ m.content }}{% endfor %}{# </think> #}<think>"
    with served(with_new_lines(engine, tmp_path / "thinking", template)) as server:
        expected = server.llm.generate(HI, max_new_tokens=12, ignore_eos=True).text.strip()
        options: Any = {
            "model": "",
            "max_tokens": 12,
            "temperature": 0,
            "extra_body": {"ignore_eos": True},
        }
        message: Any = (
            server.openai.chat.completions.create(messages=HI, **options).choices[0].message
        )
        assert (message.reasoning_content, message.content) == (expected, "")
        deltas: list[Any] = [
            c.choices[0].delta
            for c in server.openai.chat.completions.create(messages=HI, stream=True, **options)
        ]
        assert (
            "".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas) == expected
        )
        options["max_output_tokens"] = options.pop("max_tokens")
        response = server.openai.responses.create(input=HI, **options)
        assert response.usage and response.usage.output_tokens_details.reasoning_tokens == 12
        thought, said = response.output
        assert (
            thought.type == "reasoning" and thought.content and thought.content[0].text == expected
        )
        assert said.type == "message"
        events = list(server.openai.responses.create(input=HI, stream=True, **options))
        assert (
            "".join(
                event.delta for event in events if event.type == "response.reasoning_text.delta"
            )
            == expected
        )
        yes = server.post("/v1/chat/completions", {"messages": HI, "guided_choice": ["yes"]}).json()
        assert yes["choices"][0]["message"]["content"] == "yes"
        assert "completion_tokens_details" not in yes["usage"]


def test_tokens_of_thoughts_are_counted(engine: Path, tmp_path: Path) -> None:
    """The count includes the marks around thoughts, whether a round adds one token or several."""
    directory = with_new_lines(engine, tmp_path / "plans", "{{ messages[0].content }}</think>")
    codec = TextCodec(directory)
    pieces = [" ", "<think>", "a", "b", "</think>", "\n", "c", "d"]
    outputs = [TokenOutput(5, piece, "verify") for piece in pieces]
    for size in (1, 2, 3, 8):
        progress = Progress(Request(tokens=[5]))
        reader = Reader(progress, None, codec, streaming=True)
        deltas = []
        for start in range(0, 8, size):
            end = "stop" if start + size >= 8 else None
            update = Update(tokens=tuple(outputs[start : start + size]), finish_reason=end)
            deltas += reader.see(update)
        thought = "".join(delta.thought for delta in deltas)
        said = "".join(delta.content for delta in deltas)
        assert (thought, said, progress.thought_tokens) == ("ab", "cd", 4)
