"""Tests that the names in the documentation can be imported, and that each line of docs/threats.md
names tests that exist."""

import re
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

import eesd

pytestmark = pytest.mark.fast

ROOT = Path(__file__).parent.parent.parent
PAGES = [
    ROOT / "README.md",
    *sorted((ROOT / "docs").glob("*.md")),
    *sorted((ROOT / "examples").glob("*/README.md")),
]
IMPORT = re.compile(r"^ *from (eesd[\w.]*) import \(?([\w, ]+)", re.MULTILINE)
NAME = re.compile(r"(?<![\w./-])eesd((?:\.[A-Za-z_]\w*)+)")
OTHERS = {"eesd.json", "eesd.service", "eesd.tensorrt"}
"""Two files and a logger whose names look like Python names."""


def resolve(name: str) -> Any:
    """Returns the module or the object with a dotted name."""
    found: Any = eesd
    parts = name.split(".")
    for number, part in enumerate(parts[1:], 2):
        if not hasattr(found, part):
            import_module(".".join(parts[:number]))
        found = getattr(found, part)
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_name_that_a_page_shows_exists(page: Path) -> None:
    text = page.read_text("utf-8")
    names = {f"eesd{tail}" for tail in NAME.findall(text)} - OTHERS
    names |= {
        f"{home}.{name}"
        for home, found in IMPORT.findall(text)
        for name in found.replace(" ", "").strip(",").split(",")
    }
    for name in sorted(names):
        try:
            assert resolve(name) is not None, name
        except ModuleNotFoundError as error:
            # Only some installations have this package, such as tensorrt.
            assert not str(error.name).startswith("eesd"), f"{name}: {error}"


def test_all_exported_names_have_a_home() -> None:
    assert set(eesd.__all__) == {"__version__", *eesd._HOMES}
    for name, home in eesd._HOMES.items():
        assert getattr(eesd, name) is getattr(import_module(home), name)


def test_each_threat_has_a_test() -> None:
    defined = {
        name
        for path in (ROOT / "tests").rglob("test_*.py")
        for name in re.findall(r"^(?:async )?def (test_\w+)", path.read_text(), re.M)
    }
    lines = [
        line
        for line in (ROOT / "docs/threats.md").read_text().splitlines()
        if line.startswith("| ") and not line.startswith("| tries")
    ]
    assert len(lines) > 15
    for line in lines:
        named = set(re.findall(r"`(test_\w+)`", line.rpartition("|")[0].rpartition("|")[2]))
        assert named and named <= defined, line
