"""How much a model should think goes to the chat template, if that reads it; else it is refused."""

import json
from pathlib import Path
from typing import Any

import pytest
from openai import BadRequestError
from support.chat_templates import CONVERSATIONS, TEMPLATES
from support.constrained import with_new_lines
from support.serving import Served, served
from tokenizers import Tokenizer, models
from transformers import AutoTokenizer

from eesd.runtime.text import TextCodec

GRADED = "{% for m in messages %}{{ m.content }}{% endfor %}[{{ reasoning_effort | default('medium') }}]"
SWITCHED = "{% for m in messages %}{{ m.content }}{% endfor %}{% if enable_thinking is false %}[off]{% else %}[on]{% endif %}"


def test_the_templates_variable_is_set_as_in_transformers(tmp_path: Path) -> None:
    Tokenizer(models.BPE({"<s>": 0, "</s>": 1, "a": 2}, [])).save(str(tmp_path / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": TEMPLATES["qwen3"]}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    reference, codec = AutoTokenizer.from_pretrained(tmp_path), TextCodec(tmp_path)
    texts = set()
    for value in (True, False):
        expected = reference.apply_chat_template(
            CONVERSATIONS["user"], tokenize=False, add_generation_prompt=True, enable_thinking=value
        )
        texts.add(codec.render(CONVERSATIONS["user"], variables={"enable_thinking": value}))
        assert expected in texts
    assert len(texts) == 2 and codec.chat_template and "enable_thinking" in codec.chat_template.names


def shown(server: Served, effort: str | None, **more: Any) -> str:
    """The prompt of a chat, which is also that of a response."""
    messages: Any = [{"role": "user", "content": "Hi"}]
    body = {"messages": messages, "max_tokens": 1, "return_token_ids": True, "reasoning_effort": effort, **more}
    response = server.post("/v1/chat/completions", body)
    assert response.status_code == 200, response.text
    tokens = response.json()["choices"][0]["prompt_token_ids"]
    options: Any = {} if effort is None else {"reasoning": {"effort": effort}}
    found = server.openai.responses.create(model="", input="Hi", max_output_tokens=1, **options)
    assert found.usage is not None
    assert more or found.usage.input_tokens == len(tokens)
    return server.llm.codec.decode(tokens)


def test_an_effort_reaches_the_template_or_is_refused(engine: Path, tmp_path: Path) -> None:
    with served(with_new_lines(engine, tmp_path / "graded", GRADED)) as server:
        assert [shown(server, effort) for effort in (None, "low", "none")] == ["Hi[medium]", "Hi[low]", "Hi[none]"]
        tool = {"type": "function", "function": {"name": "f"}}
        assert shown(server, "high", tools=[tool]).endswith("Hi[high]")  # the template reads no tools
    with served(with_new_lines(engine, tmp_path / "switched", SWITCHED)) as server:
        assert [shown(server, effort) for effort in (None, "none", "high")] == ["Hi[on]", "Hi[off]", "Hi[on]"]
        found = server.post("/v1/completions", {"prompt": "Hi", "reasoning_effort": "low"})
        assert found.status_code == 400 and "reasoning_effort 'low' is not supported" in found.text
    with served(engine) as server:
        for effort, words in (("low", "knows no reasoning effort"), ("much", "reasoning_effort cannot be used")):
            options: Any = {"model": "", "messages": [{"role": "user", "content": "Hi"}], "reasoning_effort": effort}
            with pytest.raises(BadRequestError, match=words):
                server.openai.chat.completions.create(**options)
