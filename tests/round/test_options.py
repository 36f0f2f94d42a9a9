"""Options of every command: limits, empty paths, and one line for whatever does not fit."""

import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import Result
from support.command import assert_refused, run

import eesd.bench.tools.shapes
from eesd.common import cli

pytestmark = pytest.mark.fast

MODULES = {
    "distill": "eesd.distill.cli",
    "export": "eesd.export.cli",
    "build": "eesd.export.build",
    "inspect": "eesd.export.inspect",
    "cache": "eesd.export.cache_cli",
    "run": "eesd.runtime.cli",
    "doctor": "eesd.runtime.doctor",
    "bench": "eesd.bench.cli",
}


def commands() -> Iterator[tuple[str, click.Command, tuple[str, ...]]]:
    """Name, command and the arguments that lead to it, of every command and subcommand."""
    yield "shapes", eesd.bench.tools.shapes.main, ()
    for name, module in MODULES.items():
        main: click.Command = importlib.import_module(module).main
        yield name, main, ()
        for sub in getattr(main, "commands", {}).values():
            yield f"{name} {sub.name}", sub, (sub.name,)


def parameters(*kinds: type) -> list[Any]:
    """Every option and argument whose type is one of these, with its command."""
    return [
        pytest.param(name, prefix, parameter, id=f"{name} {parameter.opts[0]}")
        for name, command, prefix in commands()
        for parameter in command.params
        if isinstance(parameter.type, kinds)
    ]


NUMERIC = (click.types.IntParamType, click.types.FloatParamType)
NUMBERS = [case for case in parameters(*NUMERIC) if case.values[0] != "run"]
"""The numbers of eesd-run are checked by the Python API (tests/round/test_cli_bad_input.py)."""


def give(name: str, prefix: tuple[str, ...], parameter: click.Parameter, value: str) -> Result:
    main = eesd.bench.tools.shapes.main if name == "shapes" else importlib.import_module(MODULES[name.split()[0]]).main
    is_option = isinstance(parameter, click.Option)
    return run(main, *prefix, *((parameter.opts[0], value) if is_option else (value,)))


@pytest.mark.parametrize(("name", "prefix", "parameter"), NUMBERS)
def test_every_number_has_limits(name: str, prefix: tuple[str, ...], parameter: click.Parameter) -> None:
    kind = parameter.type
    assert isinstance(kind, click.IntRange | cli.Number), f"{name} {parameter.opts}: use click.IntRange or cli.Number"
    assert kind.min is not None and kind.max is not None
    values = ["nan", "inf", "-inf", "1e400", "-1", str(2**70), "9" * 5000, "", "x", "0x4", "1e30"]
    for value in values:
        assert_refused(give(name, prefix, parameter, value), "Invalid value", parameter.opts[-1], "--help")


@pytest.mark.parametrize(("name", "prefix", "parameter"), parameters(click.Path))
def test_no_path_is_empty(name: str, prefix: tuple[str, ...], parameter: click.Parameter) -> None:
    """ "$UNSET" must not mean the current directory."""
    assert_refused(give(name, prefix, parameter, ""), "it is empty; give a path")


def test_paths_are_made_in_one_place() -> None:
    found = parameters(click.Path)
    assert len(found) > 20 and all(type(case.values[2].type) is not click.Path for case in found)


@pytest.mark.parametrize("name", ["distill", "export"])
def test_no_model_is_empty(name: str) -> None:
    [case] = [case for case in parameters(click.types.StringParamType) if case.id == f"{name} --model"]
    _, prefix, parameter = case.values
    assert_refused(give(name, prefix, parameter, ""), "it is empty; give a name")


@pytest.mark.parametrize(("name", "prefix"), [pytest.param(name, prefix, id=name) for name, _, prefix in commands()])
def test_a_wrong_command_line_is_one_line(name: str, prefix: tuple[str, ...]) -> None:
    main = eesd.bench.tools.shapes.main if name == "shapes" else importlib.import_module(MODULES[name.split()[0]]).main
    assert_refused(run(main, *prefix, "--no-such-option"), "No such option", "--no-such-option", "--help")


@pytest.mark.parametrize("value", ["nan", "-1", "inf", "0,nan", "1e999", "101", "0,,1", "x", ","])
def test_temperatures_are_numbers(value: str, tmp_path: Path) -> None:
    distill = importlib.import_module(MODULES["distill"]).main
    result = run(distill, "--model", tmp_path, "-o", tmp_path / "out", "--exit-layer", 1, "--temperatures", value)
    assert_refused(result, "--temperatures", value)


@pytest.mark.parametrize("value", ["nan", "1.5", "1,", "0", "-1", str(2**70), "1,1"])
def test_deep_layers_are_whole_numbers(value: str, tmp_path: Path) -> None:
    distill = importlib.import_module(MODULES["distill"]).main
    assert_refused(run(distill, "--model", tmp_path, "-o", tmp_path / "out", "--deep", value), "--deep", value)
