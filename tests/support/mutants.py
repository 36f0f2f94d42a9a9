"""Makes deliberate mistakes. One expression in the source of the runtime is replaced."""

import inspect
import textwrap
from collections.abc import Callable
from typing import Any

import pytest


def mutant(function: Callable[..., Any], old: str, new: str) -> Callable[..., Any]:
    """Returns a copy of the function in whose source ``old`` is replaced by ``new``."""
    source = textwrap.dedent(inspect.getsource(function))
    assert source.count(old) == 1, (
        f"{function.__qualname__} no longer holds {old!r} once: rewrite the mutation"
    )
    namespace: dict[str, Any] = dict(function.__globals__)
    exec(source.replace(old, new), namespace)
    made: Callable[..., Any] = namespace[function.__name__]
    return made


def mutate(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, old: str, new: str) -> None:
    monkeypatch.setattr(owner, name, mutant(getattr(owner, name), old, new))


def then(
    monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, action: Callable[[Any], object]
) -> None:
    """Make a method run an action on its object at the end. The method itself returns nothing."""
    original = getattr(owner, name)
    monkeypatch.setattr(
        owner, name, lambda self, *arguments: (original(self, *arguments), action(self))[0]
    )
