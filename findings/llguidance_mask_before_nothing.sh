#!/usr/bin/env bash
# llguidance 1.9.1: a mask can allow a comma after which no key can come.
#
# Behaviour: a JSON schema requires the property "a", forbids others and has the pattern "^a$",
# which fits "a" alone. After {"a":1 the mask allows a comma and the closing brace. After the
# comma nothing is allowed but the end, which is an error: the text is no JSON. A caller that takes
# any token of each mask expects that a text can always be finished.
#
# Output seen:
#   after {"a":1   [',', '}']
#   after {"a":1,  error: True
set -euo pipefail
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
python3 -m venv "$place/venv"
"$place/venv/bin/pip" install --quiet llguidance==1.9.1
"$place/venv/bin/python" - 2>/dev/null <<'PYTHON'
import json

from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper


class Bytes:
    """A tokenizer whose tokens are the 256 bytes and an end."""

    eos_token_id, bos_token_id, special_token_ids = 256, None, (256,)
    tokens = (*(bytes([byte]) for byte in range(256)), b"</s>")

    def __call__(self, text):
        return list(text.encode())


tokenizer = LLTokenizer(TokenizerWrapper(Bytes()), 257, [256])
schema = {
    "type": "object",
    "properties": {"a": {"const": 1}},
    "required": ["a"],
    "additionalProperties": False,
    "patternProperties": {"^a$": {}},
}
grammar = LLMatcher.grammar_from_json_schema(
    json.dumps(schema), overrides={"whitespace_flexible": False}
)


def after(text):
    matcher = LLMatcher(tokenizer, grammar, log_level=0)
    matcher.consume_tokens(list(text.encode()))
    bits = matcher.compute_bitmask()
    allowed = [chr(token) for token in range(256) if bits[token // 8] >> (token % 8) & 1]
    return allowed, matcher.is_error()


allowed, _ = after('{"a":1')
print('after {"a":1  ', allowed)
_, failed = after('{"a":1,')
print('after {"a":1,  error:', failed)
assert allowed == [",", "}"] and failed, "the behaviour changed"
PYTHON
