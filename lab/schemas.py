"""Check constrained output against the JSON Schema Test Suite, draft 2020-12.

    git clone https://github.com/json-schema-org/JSON-Schema-Test-Suite
    python -m lab.schemas JSON-Schema-Test-Suite

A schema is *broken* if its grammar allows a text that does not fit it. The text may come from the
suite or be random. No schema may be broken. The package jsonschema_rs checks random texts. Formats
are annotations, as the draft defines. A schema is *narrow* if the grammar forbids a text of the
suite that fits it, for example because the text has the properties in a different order.
"""

import json
import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import jsonschema_rs
import numpy as np

from eesd.common import cli
from eesd.common.errors import EESDError
from eesd.common.markdown import table
from eesd.runtime.constraint import GrammarConstraint
from eesd.runtime.json_schema import BYTES, Bytes, read_schema
from eesd.runtime.json_text import JSONTokens

EOS = Bytes.eos_token_id
RANDOM_TEXTS = 20
"""Number of random texts for each schema."""
MOST_BYTES = 400
"""Maximum length of a random text. Longer texts are left out."""


JSON_TOKENS = JSONTokens(BYTES)


def allows(made: GrammarConstraint, text: str) -> bool:
    """Return whether a constraint allows a whole text."""
    tokens = [*text.encode(), EOS]
    return all(made.allowed(tokens[:at])[tokens[at]] for at in range(len(tokens)))


def random_text(made: GrammarConstraint, chance: random.Random) -> str | None:
    """Return a text of random allowed bytes, or None if it became too long."""
    tokens: list[int] = []
    while len(tokens) < MOST_BYTES:
        mask = made.allowed(tokens)
        token = (
            EOS if mask[EOS] and chance.random() < 0.5 else int(chance.choice(np.flatnonzero(mask)))
        )
        if token == EOS:
            return bytes(tokens).decode(errors="replace")
        tokens.append(token)
    return None


def unfit(made: GrammarConstraint, schema: Any, tests: Any) -> Iterator[str]:
    """Yield the texts that a constraint allows although they do not fit the schema."""
    written = [(json.dumps(test["data"], ensure_ascii=False), test["valid"]) for test in tests]
    validator = jsonschema_rs.Draft202012Validator(schema, validate_formats=False)
    chance = random.Random(0)
    for text, valid in written:  # in some tests of the suite, formats are more than annotations
        if (
            not valid
            and allows(made, text)
            and not ("format" in schema and validator.is_valid(json.loads(text)))
        ):
            yield text
    for _ in range(RANDOM_TEXTS):
        found = random_text(made, chance)
        if found is not None and not validator.is_valid(json.loads(found)):
            yield found


def count(suite: Path) -> tuple[Counter[str], list[list[str]]]:
    """Return the numbers of schemas that are followed, refused and broken, and a list of the broken
    schemas."""
    found = Counter[str]()
    broken = []
    folder = suite / "tests" / "draft2020-12"
    files = [*sorted(folder.glob("*.json")), *sorted((folder / "optional").glob("*.json"))]
    if not files:
        raise EESDError(
            f"{suite} has no tests/draft2020-12; give a checkout of JSON-Schema-Test-Suite."
        )
    for file in files:
        for case in json.loads(file.read_text("utf-8")):
            schema = case["schema"]
            try:
                made = GrammarConstraint(
                    read_schema(schema, lenient=False)[1], BYTES, [EOS], JSON_TOKENS
                )
            except EESDError:
                found["refused"] += 1
                continue
            texts = list(unfit(made, schema, case["tests"]))
            found["broken" if texts else "followed"] += 1
            valid = [
                json.dumps(test["data"], ensure_ascii=False)
                for test in case["tests"]
                if test["valid"]
            ]
            found["of them narrow"] += not texts and not all(allows(made, text) for text in valid)
            broken += [[f"{file.stem}: {case['description']}", texts[0][:60]]] if texts else []
    return found, broken


@cli.command()
@click.argument("suite", type=cli.PATH)
def main(suite: Path) -> None:
    """Print the numbers of a test suite's schemas that are followed, refused and broken."""
    found, broken = count(suite)
    kinds = ("followed", "of them narrow", "refused", "broken")
    click.echo("\n".join(table(kinds, [[str(found[kind]) for kind in kinds]])))
    if broken:
        click.echo("\n" + "\n".join(table(["broken", "a text that it allows"], broken)))


if __name__ == "__main__":
    main()
