"""What was used lately, such as bound calls, so that it is not made again."""

from collections.abc import Callable
from typing import Generic, TypeVar

K = TypeVar("K")
V = TypeVar("V")


class Recent(Generic[K, V]):
    """Values by key. Of more than ``most``, the one that was not used for longest is dropped."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._values: dict[K, V] = {}

    def get(self, key: K, make: Callable[[], V]) -> V:
        """The value of a key, made if there is none."""
        value = self._values.pop(key) if key in self._values else make()
        self._values[key] = value  # the last one used is the last one dropped
        if len(self._values) > self._most:
            del self._values[next(iter(self._values))]
        return value

    def clear(self) -> None:
        self._values.clear()
