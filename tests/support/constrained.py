"""Makes a model whose tokens can write JSON, function calls and several lines. It also makes random
texts that a constraint allows."""

import json
import random
import shutil
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from hypothesis import strategies as st

from eesd.runtime.llm import LLM
from eesd.runtime.request import Constraint
from support.engine_dirs import record

NAMES = st.text("abc", min_size=1, max_size=3)
LEAVES = st.one_of(
    st.builds(
        lambda low, more: {"type": "integer", "minimum": low, "maximum": low + more},
        st.integers(-30, 30),
        st.integers(0, 40),
    ),
    st.builds(
        lambda low, more: {"type": "string", "minLength": low, "maxLength": low + more},
        st.integers(0, 3),
        st.integers(0, 3),
    ),
    st.sampled_from(
        [
            {"type": "boolean"},
            {"type": "null"},
            {"const": 'a"b\\'},
            {"type": "string", "pattern": "^[ab]{1,3}$"},
        ]
    ),
    st.lists(st.sampled_from(["x", 1, None, True, 2.5]), min_size=1, max_size=3).map(
        lambda values: {"enum": values}
    ),
)
SCHEMAS = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.builds(
            lambda item, most: {"type": "array", "items": item, "maxItems": most},
            inner,
            st.integers(0, 3),
        ),
        st.lists(inner, min_size=1, max_size=2).map(lambda schemas: {"anyOf": schemas}),
        st.builds(
            lambda properties, required: {
                "type": "object",
                "properties": properties,
                "required": [name for name in properties if name in required],
                "additionalProperties": False,
            },
            st.dictionaries(NAMES, inner, max_size=3),
            st.sets(NAMES),
        ),
    ),
    max_leaves=5,
)
"""Small JSON schemas."""
KEYS = st.sampled_from(["a", "b", "c", "ab"])
LIMITED_OBJECTS = st.fixed_dictionaries(
    {
        "type": st.just("object"),
        "properties": st.dictionaries(KEYS, LEAVES, max_size=3),
        "required": st.lists(KEYS, max_size=2, unique=True),
    },
    optional={
        "additionalProperties": st.sampled_from([False, False, {"const": 1}]),
        "unevaluatedProperties": st.just(False),
        "patternProperties": st.dictionaries(
            st.sampled_from(["^(a|b)$", "^a$", "b", "^x_", "^(a|b|c|ab)$"]), LEAVES, max_size=2
        ),
        "minProperties": st.integers(0, 3),
        "maxProperties": st.integers(0, 3),
        "dependentRequired": st.dictionaries(KEYS, st.lists(KEYS, max_size=1), max_size=2),
    },
)
"""Objects whose keys depend on patterns, counts and each other. Some have no valid value."""
TOO_MUCH = "((([ab]{1,9}b?){1,7}a?){1,8}b?[ab]{3,8}){50,60}"
"""An expression that llguidance accepts. It exceeds the limits of llguidance after some dozens of
letters, whatever these letters are."""

SHORT_TEMPLATE = (
    "{% for tool in tools or [] %}[{{ tool.function.name }}]{% endfor %}{% for m in messages "
    "%}<{{ m.role }}>{{ m.content }}"
    "{% for call in m.tool_calls or [] %}<tool_call>{{ call.function.name }}{{ "
    "call.function.arguments.city }}{% endfor %}"
    "{% endfor %}<assistant>"
)
"""Tools with short descriptions, because each letter is a token of the test model."""


def with_new_lines(engine: Path, directory: Path, template: str | None = None) -> Path:
    """Returns a copy of the text model's engines. In this copy, a token for the end of a line
    replaces the token for a backtick."""
    shutil.copytree(engine, directory)
    file = directory / "tokenizer.json"
    tokenizer = json.loads(file.read_text())
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary["\n"] = vocabulary.pop("`")
    file.write_text(json.dumps(tokenizer))
    record(directory, "tokenizer.json")
    if template is not None:
        file = directory / "chat_template.jinja"
        file.write_text(template)
        record(directory, "chat_template.jinja")
    return directory


def random_text(constraint: Constraint, llm: LLM, seed: int, most: int = 2000) -> str:
    """Returns a text of random allowed tokens, which ends when EOS is drawn."""
    (eos,) = llm.manifest.eos_token_ids
    draw = random.Random(seed)
    tokens = list[int]()
    while len(tokens) < most:
        token = draw.choice(allowed(constraint, tokens))
        if token == eos:
            return llm.codec.decode(tokens)
        tokens.append(token)
    raise AssertionError(f"no end in {most} tokens: {llm.codec.decode(tokens)}")


def allowed(constraint: Constraint, tokens: Sequence[int]) -> list[int]:
    """Returns the tokens that a constraint allows."""
    mask = constraint.allowed(tokens)
    assert mask is not None and mask.dtype == np.bool_
    return [int(token) for token in np.flatnonzero(mask)]
