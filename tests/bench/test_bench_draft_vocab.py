"""``python -m eesd.bench.tools.draft_vocab``."""

import json
from pathlib import Path

import pytest
from support.command import assert_refused, run, succeed

from eesd.bench.tools.draft_vocab import main


def cells(table: str) -> list[list[str]]:
    """The rows of a Markdown table, without its heading."""
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.strip().splitlines()[2:]]


def test_coverage_is_counted_by_category(text_model: Path, tmp_path: Path) -> None:
    (tmp_path / "own.txt").write_text("aaaa bbb cc d")
    lines = [
        {"category": "near", "turns": ["aab", "a"]},
        {"category": "far", "messages": [{"role": "user", "content": "xyaa"}]},
        {"category": "near", "prompt": "ab"},
    ]
    (tmp_path / "tested.jsonl").write_text("\n".join(map(json.dumps, lines)))
    options = ("--model", text_model, "--count", tmp_path / "own.txt", "--text", tmp_path / "tested.jsonl")
    found = cells(succeed(main, *options, "--sizes", "3 97").stdout)
    # A vocabulary of three: a, b or blank (three each), and the token that ends a text. The newline is unknown.
    assert found == [["near", "7", "57.1%", "100.0%"], ["far", "4", "50.0%", "100.0%"]]


@pytest.mark.parametrize(
    ("text", "sizes", "words"),
    [
        ('{"turns": [1]}', "3", ("line 1, has no text", "give a text, or JSON lines")),
        ('{"text": "a"}', "1", ("--sizes '1'", "from 2 to 97")),
        ('{"text": "a"}', "x", ("--sizes 'x'",)),
    ],
)
def test_bad_input_is_refused(text_model: Path, tmp_path: Path, text: str, sizes: str, words: tuple[str, ...]) -> None:
    path = tmp_path / "text.jsonl"
    path.write_text(text)
    options = ("--model", text_model, "--count", path, "--text", path, "--sizes", sizes)
    assert_refused(run(main, *options), *words)
