"""Fixtures shared by the tests: random checkpoints, built once and never changed."""

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
from families import FAMILIES, build


@pytest.fixture(scope="session")
def family_dir(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Give a family's name, get its checkpoint directory. Copy it before changing anything in it."""

    @cache
    def directory(name: str) -> Path:
        return build(FAMILIES[name], tmp_path_factory.mktemp(name))

    return directory
