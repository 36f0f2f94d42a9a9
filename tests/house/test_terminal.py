"""Tests that text is shown unchanged in every table, progress bar and message."""

import ast
import io
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from support.command import succeed
from support.imports import imports, modules

from eesd.common import terminal
from eesd.export.cli import main as export_main
from eesd.export.inspect import main as inspect_main

pytestmark = pytest.mark.fast

TRICKY = "[red]x[/red] [/] [bold :smile: \\[b] 1.5 'eesd[tensorrt]' https://x.y"
NAME = TRICKY.replace("/", "|")
"""The same text with ``|`` instead of ``/``, so that it can be a file name."""


def test_only_one_module_uses_rich_and_colours() -> None:
    for _, path in modules():
        if path.name == "terminal.py":
            continue
        nodes = list(ast.walk(ast.parse(path.read_text("utf-8"))))
        used = {node.attr for node in nodes if isinstance(node, ast.Attribute)}
        found = {name.partition(".")[0] for name, _ in imports(path)} & {"rich"}
        found |= used & {"style", "secho", "progressbar"}
        assert not found, f"{path}: use eesd.common.terminal"


def shown(show: Callable[[terminal.Console], None]) -> str:
    console = terminal.Console()
    console.file = file = io.StringIO()
    console.width = 200
    show(console)
    return file.getvalue()


def test_tables_show_text_as_it_is() -> None:
    def show(console: terminal.Console) -> None:
        table = terminal.Table(TRICKY, title=TRICKY)
        table.add_row(TRICKY)
        console.print(table)
        console.print(TRICKY)

    assert shown(show).count(TRICKY) == 4


@pytest.mark.parametrize("label", ["[red]x[/red]", "[/]", ":smile:", "{task.total}", "[bold"])
def test_progress_bars_show_their_label_as_it_is(label: str) -> None:
    def show(console: terminal.Console) -> None:
        with terminal.progress() as bar:
            bar.add_task(label, total=10, completed=3)
            console.print(bar.get_renderable())

    assert label in shown(show) and "30%" in shown(show)


def test_inspect_shows_names_as_they_are(engine: Path, tmp_path: Path) -> None:
    directory = shutil.copytree(engine, tmp_path / NAME)
    manifest = json.loads((directory / "manifest.json").read_text())
    manifest["model"] = TRICKY
    (directory / "manifest.json").write_text(json.dumps(manifest))
    for options in ((), ("--verify",)):
        output = "".join(succeed(inspect_main, directory, *options).stdout.split())
        assert "".join(TRICKY.split()) in output.replace("│", "")


def test_an_export_shows_names_as_they_are(text_model: Path, tmp_path: Path) -> None:
    model = shutil.copytree(text_model, tmp_path / "[red]model")
    output = tmp_path / NAME
    result = succeed(export_main, "--model", model, "--exit-layer", 1, "-o", output, "--no-check")
    assert NAME in result.stdout and output.is_dir()


@pytest.mark.parametrize(
    ("environment", "is_coloured"),
    [({}, True), ({"NO_COLOR": "1"}, False), ({"TERM": "dumb"}, False), ({"NO_COLOR": ""}, True)],
)
def test_colours_can_be_switched_off(
    environment: dict[str, str], is_coloured: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (
        {"TERM": "xterm", "NO_COLOR": "", "FORCE_COLOR": "1"} | environment
    ).items():
        monkeypatch.setenv(name, value)
    assert (terminal.coloured("x", "green") != "x") == is_coloured
    assert ("[32m" in shown(lambda console: console.print("x", style="green"))) == is_coloured
