"""Runs commands in this process, and checks how they refuse bad input."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from click import Command
from click.testing import CliRunner, Result
from tokenizers import Tokenizer, decoders
from tokenizers.models import BPE

from eesd.common.errors import EESDError
from eesd.export.cli import main as export_main
from eesd.runtime.engines import operators

SPECIAL = ["<unk>", "<s>", "</s>"]
TEMPLATE = (
    "{% for message in messages %}<{{ message['role'] }}>{{ message['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def run(command: Command, *arguments: object, stdin: str | bytes = "") -> Result:
    """Run a click command with these arguments, converted to strings."""
    return CliRunner().invoke(command, [str(argument) for argument in arguments], input=stdin)


def succeed(command: Command, *arguments: object, stdin: str | bytes = "") -> Result:
    result = run(command, *arguments, stdin=stdin)
    assert result.exit_code == 0, (result.output, result.exception)
    return result


def assert_refused(result: Result, *words: str) -> None:
    """Check that stderr is one line with all these words, that the exit code is 2 (so there is no
    traceback), and that stdout is empty, except for an export's lines before its long work."""
    assert result.exit_code == 2, (result.output, result.exception)
    assert_one_line(result.stderr, *words)
    said = result.stdout.splitlines()
    assert not said or (len(said) == 2 and said[1].startswith("will take "))


def refused(action: Callable[[], object], *words: str) -> None:
    """Check that the action raises an EESDError of one line that contains all these words."""
    with pytest.raises(EESDError) as caught:
        action()
    message = str(caught.value)
    assert "\n" not in message and message.endswith("."), message
    for word in words:
        assert word in message


def notice() -> str:
    """Returns the first line that commands print on stderr if the operators are not built. Tests in
    this process find this line in their log."""
    return f"{operators.missing()}\n" if operators.missing() else ""


def assert_one_line(stderr: str, *words: str) -> None:
    """Check that a text has one line, apart from the :func:`notice` and the steps that have
    begun."""
    stderr = stderr.removeprefix(notice())
    while stderr.partition("\n")[0].endswith(" ...") and not stderr.startswith("error: "):
        stderr = stderr.partition("\n")[2]
    assert stderr.startswith("error: ") and stderr.endswith("\n"), stderr
    assert stderr.count("\n") == 1, stderr
    assert "Traceback" not in stderr
    for word in words:
        assert word in stderr, stderr


def export_engine(model: Path, output: Path, *options: object) -> Path:
    """Run ``eesd-export`` with an exit after the first layer, unless ``options`` have --exit-head.

    The check of the graphs takes most of the time, so pass --check only to test it.
    """
    exits = () if "--exit-head" in options else ("--exit-layer", 1)
    succeed(export_main, "--model", model, "--output", output, *exits, "--no-check", *options)
    return output


def add_tokenizer(model: Path, template: str | None = TEMPLATE) -> None:
    """Add a tokenizer to a model of 97 tokens. It has three special tokens, and a token for each
    character from the blank to the right brace."""
    vocabulary = {token: index for index, token in enumerate([*SPECIAL, *map(chr, range(32, 126))])}
    tokenizer = Tokenizer(BPE(vocabulary, [], unk_token="<unk>"))
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(SPECIAL)
    tokenizer.save(str(model / "tokenizer.json"))
    config = {"bos_token": "<s>", "eos_token": "</s>"} | (
        {"chat_template": template} if template else {}
    )
    (model / "tokenizer_config.json").write_text(json.dumps(config))


def listing(directory: Path) -> Sequence[str]:
    """Returns the names of everything in a directory, including hidden leftovers."""
    return sorted(path.name for path in directory.iterdir())


def exported_files(directory: Path) -> Sequence[str]:
    """Returns the names of everything in an engine directory except packed weights."""
    return [name for name in listing(directory) if not name.startswith("cpu-")]


def contents(directory: Path) -> dict[str, bytes]:
    """Returns the content of every file below a directory."""
    return {
        str(path.relative_to(directory)): path.read_bytes()
        for path in directory.rglob("*")
        if path.is_file()
    }


def slow_but(cases: Sequence[Any], *quick: Any) -> list[Any]:
    """Returns parameters for a test. Only the ``quick`` parameters run in ``make test``, and the
    others run in ``make test-slow``."""
    assert set(quick) <= set(cases)
    marked = []
    for case in cases:
        values = case if isinstance(case, tuple) else (case,)
        marked.append(pytest.param(*values, marks=[] if case in quick else pytest.mark.slow))
    return marked
