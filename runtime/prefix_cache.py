"""Keep the keys and values of earlier texts for requests with the same beginning, such as a system
prompt or a conversation."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count

from eesd.runtime.engines.base import Values

BLOCK = 32
"""Number of tokens whose keys and values are kept together."""
Key = tuple[int | str, ...]
"""The tokens of a block. In the first block of a text, the salt comes before the tokens."""


@dataclass(eq=False)
class _Block:
    """A block has the keys and values [L+E, 2, KV, BLOCK, D] of the tokens that follow the tokens
    of ``parent``."""

    parent: "_Block | None"
    key: Key
    values: Values | None
    following: "dict[Key, _Block]" = field(default_factory=dict)
    used: int = 0


class PrefixCache:
    """A tree of blocks whose size in bytes is limited. The least recently used blocks are dropped
    first. Within a text, the last blocks are dropped first.

    A token's keys and values have the same bits however its text was split into calls, so a request
    that takes them from the cache gets the same tokens as without the cache.

    Attributes:
        queries: Number of tokens of all prompts that were looked up.
        hits: Number of these tokens that were found.
        bytes_used: Bytes of the keys and values that are kept.
    """

    def __init__(self, capacity: int) -> None:
        """``capacity`` is in bytes. If it is 0, nothing is kept."""
        self.queries = 0
        self.hits = 0
        self._capacity = capacity
        self.bytes_used = 0
        self._root = _Block(None, (), None)
        self._clock = count(1)

    def find(self, tokens: Sequence[int], salt: str = "", taken: int | None = None) -> list[Values]:
        """Return the keys and values of the longest cached beginning of ``tokens``, in blocks of
        :data:`BLOCK` tokens.

        Args:
            tokens: The text.
            salt: Only texts added with the same salt are found.
            taken: Number of tokens that an earlier call found. Their blocks are left out. It is
                None in the first call for this text.
        """
        found = []
        block = self._root
        now = next(self._clock)
        if taken is None:
            self.queries += len(tokens)
            taken = 0
        for key in _keys(tokens, salt):
            following = block.following.get(key)
            if following is None:
                break
            block, block.used = following, now
            assert block.values is not None
            found.append(block.values)
        found = found[taken // BLOCK :]
        self.hits += BLOCK * len(found)
        return found

    def add(
        self, tokens: Sequence[int], read: Callable[[int, int], Values], salt: str = ""
    ) -> None:
        """Keep the keys and values of a text.

        Args:
            tokens: The text's tokens whose keys and values have been computed.
            read: A function that returns the keys and values [L+E, 2, KV, n, D] of the slots
                ``start`` to ``stop - 1``. They are copied.
            salt: See :meth:`find`.
        """
        if not self._capacity:
            return
        block = self._root
        now = next(self._clock)
        for number, key in enumerate(_keys(tokens, salt)):
            following = block.following.get(key)
            if following is None:
                values = read(number * BLOCK, (number + 1) * BLOCK)
                if not self._make_room(values.nbytes, now):
                    return
                following = block.following[key] = _Block(block, key, values.copy())
                self.bytes_used += values.nbytes
            following.used = now
            block = following

    def _make_room(self, size: int, now: int) -> bool:
        """Drop blocks until ``size`` bytes are free. Return False if only blocks that were used at
        the time ``now`` are left."""
        while self.bytes_used + size > self._capacity:
            blocks = [*self._root.following.values()]
            for block in blocks:  # the list grows while it is read
                blocks += block.following.values()
            ends = [block for block in blocks if not block.following and block.used < now]
            if not ends:
                return False
            for oldest in sorted(ends, key=lambda block: block.used)[: max(len(ends) // 4, 1)]:
                assert oldest.parent is not None and oldest.values is not None
                del oldest.parent.following[oldest.key]
                self.bytes_used -= oldest.values.nbytes
        return True


def _keys(tokens: Sequence[int], salt: str) -> list[Key]:
    """Return the keys of a text's whole blocks. The first key includes the salt."""
    found: list[Key] = [
        tuple(tokens[start : start + BLOCK]) for start in range(0, len(tokens) - BLOCK + 1, BLOCK)
    ]
    return [*((salt, *key) for key in found[:1]), *found[1:]]
