"""What every command has in common: help, version, and one sentence for bad input."""

import importlib
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from click import Command
from support.command import run, succeed

import eesd

pytestmark = pytest.mark.fast

ROOT = Path(__file__).parent.parent.parent
COMMANDS: dict[str, str] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]


def command(name: str) -> Command:
    module, _, attribute = COMMANDS[name].partition(":")
    start = getattr(importlib.import_module(module), attribute)
    found = importlib.import_module(start.args[0]).main
    assert isinstance(found, Command)
    return found


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_a_version(name: str) -> None:
    assert succeed(command(name), "--version").stdout.split()[-1] == eesd.__version__


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_explains_itself(name: str) -> None:
    for flag in ("-h", "--help"):
        shown = succeed(command(name), flag).stdout
        assert shown.startswith("Usage: ") and "--version" in shown


@pytest.mark.parametrize("name", COMMANDS)
def test_an_unknown_option_is_one_line_and_exit_code_2(name: str) -> None:
    result = run(command(name), "--no-such-option")
    assert result.exit_code == 2 and "--no-such-option" in result.stderr and "Traceback" not in result.stderr


def test_the_version_is_written_once() -> None:
    pyproject = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert "version" in pyproject["project"]["dynamic"]
    assert pyproject["tool"]["setuptools"]["dynamic"]["version"] == {"attr": "eesd.__version__"}


def test_commands_run_as_modules() -> None:
    done = subprocess.run([sys.executable, "-m", "eesd.runtime.cli", "--version"], capture_output=True, text=True, check=True)
    assert done.stdout.endswith(f" {eesd.__version__}\n")
