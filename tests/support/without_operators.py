"""Tests with and without the library of operators, which is not built where there is no C++
compiler."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from eesd.runtime.engines import operators


@contextmanager
def without_operators() -> Iterator[None]:
    """As if the library were not built, in this process."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(operators, "LIBRARY", Path("missing.so"))
        operators._library.cache_clear()
        yield
    operators._library.cache_clear()


def float32_activations(backend: str) -> str | None:
    """The argument ``activations`` for products with float32, where there is a choice; without one
    they are with float32."""
    return "float32" if backend == "ort" and not operators.missing() else None


def needs_operators() -> pytest.MarkDecorator:
    """A mark of tests that need the library."""
    return pytest.mark.skipif(bool(operators.missing()), reason="the operators are not built")
