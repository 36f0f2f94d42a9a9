"""Servers that the tests of this folder share. No test changes a result that another test sees."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from support.constrained import SHORT_TEMPLATE, with_new_lines
from support.serving import Served, served

from eesd.runtime.batch.scheduler import BatchOptions


@pytest.fixture(scope="package")
def server(engine: Path) -> Iterator[Served]:
    """Each round drafts three levels, and does not depend on the cost of calls on the machine."""
    with served(engine, batch=BatchOptions(levels=3)) as running:
        yield running


@pytest.fixture(scope="package")
def lined(engine: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A server whose model has a token for new lines, and a chat template of a few letters."""
    with served(
        with_new_lines(engine, tmp_path_factory.mktemp("lines") / "plans", SHORT_TEMPLATE)
    ) as running:
        yield running
