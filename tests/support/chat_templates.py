"""Chat templates like those of published models, and conversations. Each template is chosen for
its constructs."""

from pathlib import Path
from typing import Any

TEMPLATES = {
    path.stem: path.read_bytes().decode()
    for path in sorted((Path(__file__).parent.parent / "data/chat_templates").iterdir())
}

CONVERSATIONS: dict[str, list[dict[str, Any]]] = {
    "user": [{"role": "user", "content": "Hello there"}],
    "system": [{"role": "system", "content": " Be brief. "}, {"role": "user", "content": "Hi"}],
    "turns": [
        {"role": "user", "content": "Hi\n"},
        {"role": "assistant", "content": "<think>\nhm\n</think>\n\nYes?"},
        {"role": "user", "content": "  More  "},
    ],
    "wrong_order": [
        {"role": "user", "content": "a"},
        {"role": "user", "content": "b"},
        {"role": "critic", "content": "c"},
    ],
    "unicode": [{"role": "user", "content": "naïve 日本語 🙂 \u2028 <b>&'\"</b> \\n"}],
    "brackets": [{"role": "user", "content": "{{ 7*7 }} {% raw %} [INST] <|im_end|> </s> {} %s"}],
    "empty": [{"role": "user", "content": ""}],
    "parts": [
        {
            "role": "user",
            "content": [{"type": "text", "text": "first"}, {"type": "text", "text": "second"}],
        },
        {"role": "assistant", "content": "x"},
        {"role": "user", "content": [{"type": "text", "text": "third"}]},
    ],
    "tools": [
        {"role": "user", "content": "Weather?"},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [
                {
                    "id": "abcdefghi",
                    "type": "function",
                    "function": {"name": "weather", "arguments": {"city": "Zürich <1>"}},
                }
            ],
        },
        {"role": "tool", "content": '{"degrees": 20}', "tool_call_id": "abcdefghi"},
    ],
    "no_content": [{"role": "user"}, {"role": "assistant", "content": None, "name": None}],
    "reasoning": [
        {"role": "user", "content": "Why?"},
        {"role": "assistant", "reasoning": "because", "content": "So."},
        {"role": "assistant", "thinking": "t", "reasoning_content": None, "content": "A."},
        {"role": "assistant", "reasoning_content": "r", "thinking": "u", "content": "B."},
    ],
    "none": [],
}
