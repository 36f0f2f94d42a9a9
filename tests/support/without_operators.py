"""Functions for tests with and without the library of operators. Without a C++ compiler, the
library is missing."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest

from eesd.runtime.engines import operators

LIBRARY = operators.LIBRARY


def without_operators() -> AbstractContextManager[None]:
    """Act in this process as if the library were not built."""
    return _looking_at(Path("missing.so"))


def with_operators() -> AbstractContextManager[None]:
    """Use the library, even inside ``without_operators``."""
    return _looking_at(LIBRARY)


@contextmanager
def _looking_at(library: Path) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(operators, "LIBRARY", library)
        operators._library.cache_clear()
        try:
            yield
        finally:
            operators._library.cache_clear()


def float32_activations(backend: str) -> str | None:
    """Returns the argument ``activations`` for products with float32 activations, or None if there
    is no choice."""
    return "float32" if backend == "ort" and not operators.missing() else None


def needs_operators() -> pytest.MarkDecorator:
    """Returns a mark for tests that need the library."""
    return pytest.mark.skipif(bool(operators.missing()), reason="the operators are not built")
