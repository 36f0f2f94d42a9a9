"""Tests of what all commands have in common. They cover the help, the version, the limits of
options, and the single line that bad input gives."""

import importlib
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import Result
from support.command import assert_refused, run, succeed

import eesd
from eesd.common import cli
from lab import shapes

pytestmark = pytest.mark.fast

ROOT = Path(__file__).parent.parent.parent
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def command(script: str) -> click.Command:
    module, _, attribute = script.partition(":")
    found = importlib.import_module(
        getattr(importlib.import_module(module), attribute).args[0]
    ).main
    assert isinstance(found, click.Command)
    return found


SCRIPTS = {name: command(script) for name, script in PYPROJECT["project"]["scripts"].items()}


def lines() -> Iterator[tuple[str, click.Command, click.Command, tuple[str, ...]]]:
    """Yields the name, the main command, the command itself, and the arguments that select it.
    There is an entry for every command and subcommand."""
    for name, main in (SCRIPTS | {"shapes": shapes.main}).items():
        yield name, main, main, ()
        for sub in getattr(main, "commands", {}).values():
            yield f"{name} {sub.name}", main, sub, (sub.name,)


def parameters(*kinds: type) -> list[Any]:
    """Returns every option and argument of one of these types, together with its command."""
    return [
        pytest.param(main, prefix, parameter, id=f"{name} {parameter.opts[0]}")
        for name, main, leads_to, prefix in lines()
        for parameter in leads_to.params
        if isinstance(parameter.type, kinds)
    ]


NUMERIC = (click.types.IntParamType, click.types.FloatParamType)
API = [SCRIPTS["eesd-run"], SCRIPTS["eesd-serve"]]
"""The Python API checks the numbers that these commands take
(tests/round/test_cli_bad_input.py)."""


def give(
    main: click.Command, prefix: tuple[str, ...], parameter: click.Parameter, value: str
) -> Result:
    is_option = isinstance(parameter, click.Option)
    return run(main, *prefix, *((parameter.opts[0], value) if is_option else (value,)))


@pytest.mark.parametrize("name", SCRIPTS)
def test_every_command_explains_itself_and_has_a_version(name: str) -> None:
    for flag in ("-h", "--help"):
        shown = succeed(SCRIPTS[name], flag).stdout
        assert shown.startswith("Usage: ") and "--version" in shown
    assert succeed(SCRIPTS[name], "--version").stdout.split()[-1] == eesd.__version__


def test_the_version_is_written_once() -> None:
    assert "version" in PYPROJECT["project"]["dynamic"]
    assert PYPROJECT["tool"]["setuptools"]["dynamic"]["version"] == {"attr": "eesd.__version__"}


def test_commands_run_as_modules() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "eesd.runtime.cli", "--version"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.endswith(f" {eesd.__version__}\n")


@pytest.mark.parametrize(
    ("main", "prefix"), [pytest.param(main, prefix, id=name) for name, main, _, prefix in lines()]
)
def test_an_unknown_option_is_one_line(main: click.Command, prefix: tuple[str, ...]) -> None:
    assert_refused(
        run(main, *prefix, "--no-such-option"), "No such option", "--no-such-option", "--help"
    )


@pytest.mark.parametrize(
    ("main", "prefix", "parameter"),
    [case for case in parameters(*NUMERIC) if case.values[0] not in API],
)
def test_every_number_has_limits(
    main: click.Command, prefix: tuple[str, ...], parameter: click.Parameter
) -> None:
    kind = parameter.type
    assert isinstance(kind, click.IntRange | cli.Number), (
        f"{parameter.opts}: use click.IntRange or cli.Number"
    )
    assert kind.min is not None and kind.max is not None
    for value in ("nan", "-inf", "1e400", "-1", str(2**70), "9" * 5000, "", "0x4"):
        assert_refused(
            give(main, prefix, parameter, value), "Invalid value", parameter.opts[-1], "--help"
        )


@pytest.mark.parametrize(("main", "prefix", "parameter"), parameters(click.Path))
def test_no_path_is_empty(
    main: click.Command, prefix: tuple[str, ...], parameter: click.Parameter
) -> None:
    """ "$UNSET" must not mean the current directory."""
    assert type(parameter.type) is not click.Path, "paths are made in eesd.common.cli"
    assert_refused(give(main, prefix, parameter, ""), "it is empty; give a path")


@pytest.mark.parametrize("name", ["eesd-distill", "eesd-export"])
def test_no_model_is_empty(name: str) -> None:
    assert_refused(run(SCRIPTS[name], "--model", ""), "it is empty; give a name")


@pytest.mark.parametrize(
    ("option", "values"),
    [
        ("--temperatures", ("nan", "-1", "inf", "0,nan", "1e999", "101", "0,,1", "x", ",")),
        ("--deep", ("nan", "1.5", "1,", "0", "-1", str(2**70), "1,1")),
    ],
)
def test_lists_of_numbers_have_limits(option: str, values: tuple[str, ...], tmp_path: Path) -> None:
    given = ("--model", tmp_path, "-o", tmp_path / "out", "--exit-layer", 1)
    for value in values:
        assert_refused(run(SCRIPTS["eesd-distill"], *given, option, value), option, value)
