"""Makes damaged JSON. Values at random places of a valid document are replaced, removed or added,
and some texts are no longer JSON."""

import json
import random
from typing import Any

from hypothesis import strategies as st

ODD: list[Any] = [
    *(None, True, False, 0, 1, -1, 2, 3, 7, 97, 10**12, -(10**12), 2**63, 10**400),
    *(0.0, -0.5, 1e-320, 1e308, float("nan"), float("inf")),
    *(
        "",
        "x",
        "float16",
        "../secret",
        "\x00",
        "\ud800",
        "a" * 300,
        "[bold]",
        "2",
        "{{",
        "..",
        "draft.onnx",
    ),
    *([], [1], [[]], ["x"], [None], [1.5], {}, {"a": 1}, {"a": {"b": []}}, [-1] * 3),
]


def damaged_json(document: Any) -> st.SearchStrategy[str]:
    """Returns the JSON text of ``document`` with one to three random edits. Sometimes the text is
    cut, garbled or nested very deeply."""
    text = json.dumps(document)
    return st.integers(0, 2**32).map(lambda seed: _damage(text, random.Random(seed)))


def _damage(text: str, rng: random.Random) -> str:
    kind = rng.random()
    if kind < 0.05:
        cut = rng.randrange(len(text) + 1)
        return text[:cut] + rng.choice(
            ["", "\x00", "\ufeff", "]", "}", '"', "9" * 5000, "[" * 2000]
        )
    value = json.loads(text)
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        value = _edited(value, rng)
    if kind < 0.07:
        value = [value]
    for _ in range(200 if kind > 0.99 else 0):
        value = {"a": value}
    return json.dumps(value)


def _edited(value: Any, rng: random.Random) -> Any:
    """Returns the value with one edit somewhere inside it."""
    if not isinstance(value, (dict, list)) or not value or rng.random() < 0.03:
        return _other(value, rng)
    if isinstance(value, dict):
        key = rng.choice(list(value))
        action = rng.random()
        if action < 0.1:
            return {name: item for name, item in value.items() if name != key}
        if action < 0.15:
            return value | {
                rng.choice(["unknown", "", "trained", "dtype", "\x00"]): rng.choice(ODD)
            }
        return value | {key: _edited(value[key], rng)}
    index = rng.randrange(len(value))
    action = rng.random()
    if action < 0.1:
        return value[:index] + value[index + 1 :]
    if action < 0.2:
        return [*value, value[index]]
    return [*value[:index], _edited(value[index], rng), *value[index + 1 :]]


def _other(value: Any, rng: random.Random) -> Any:
    if type(value) in (int, float) and rng.random() < 0.5:
        return rng.choice(
            [value + 1, value - 1, -value, value * 2, value // 2, str(value), value * 10**9]
        )
    return rng.choice(ODD)
