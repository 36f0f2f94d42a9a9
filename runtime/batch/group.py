"""Rows with texts of similar length: who is in which place of their memory."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from eesd.runtime.batch.row import Row
from eesd.runtime.engines.base import KVCache, Rows, RowsBinding, Values


class RowCache:
    """What a session in a group sees of its keys and values. The group makes room; drafts are chains, so nothing is moved."""

    def reserve(self, slots: int) -> None:
        pass

    def reset(self) -> None:
        raise AssertionError("a row begins with its prompt's keys and values")

    def compact(self, start: int, sources: list[int]) -> None:
        raise AssertionError("the accepted nodes of a chain are in their place")

    def read(self, index: int) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        raise AssertionError("the group owns the keys and values")

    def values(self, start: int, stop: int) -> Values:
        raise AssertionError("the group owns the keys and values")

    def fill(self, start: int, values: Values) -> None:
        raise AssertionError("the group owns the keys and values")


ROW_CACHE = RowCache()


class Group:
    """Rows over one piece of memory. Those in use are the first ones.

    Attributes:
        active: The rows, in the order of the memory.
        rows: The memory.
        verify, draft: The engines bound to it; the draft engine if there is one.
        most_slots: Texts longer than this belong to another group; None: there is no other.
        drafted: Levels that the last round verified.
    """

    def __init__(
        self, rows: Rows, verify: RowsBinding, draft: RowsBinding | None, longest: int, most_slots: int | None
    ) -> None:
        """``longest`` is the most nodes that a round verifies besides the root."""
        self.active: list[Row] = []
        self.rows, self.verify, self.draft = rows, verify, draft
        self.most_slots = most_slots
        self.drafted = 0
        self._longest = longest

    def join(self, row: Row, kv_cache: KVCache) -> None:
        """Take a row whose prompt is in a cache of its own."""
        used = row.session.prefilled
        self.make_room(1, used + 1)
        self.rows.take(len(self.active), kv_cache, used)
        row.session.move_to(ROW_CACHE)
        self.active.append(row)

    def take_over(self, other: "Group", row: Row) -> None:
        """Take a row from another group."""
        used, at = used_slots(row), other.active.index(row)
        self.make_room(1, used + 1)
        self.rows.take_over(len(self.active), other.rows, at, used)
        other.leave(row)
        self.active.append(row)

    def leave(self, row: Row) -> None:
        """Give up a row. The last one takes its place."""
        at, last = self.active.index(row), self.active.pop()
        if last is not row:
            self.rows.move(len(self.active), at, used_slots(last))
            self.active[at] = last

    def values(self, row: Row, start: int, stop: int) -> Values:
        """Keys and values of a row's slots from ``start`` to ``stop - 1``."""
        return self.rows.values(self.active.index(row), start, stop)

    def has_outgrown(self, row: Row) -> bool:
        return self.most_slots is not None and used_slots(row) + 1 + self._longest > self.most_slots

    def make_room(self, nodes: int, slots: int = 0) -> None:
        """Have at least so many slots, and room for ``nodes`` nodes of a round behind each text; what those in front of the
        last one wrote is kept."""
        used = [used_slots(row) for row in self.active]
        written = [min(count + nodes - 1, self.rows.slots) for count in used]
        self.rows.resize(max(slots, max(used, default=0) + nodes), written)


def used_slots(row: Row) -> int:
    """Slots whose keys and values count: all but the last token's."""
    return len(row.session.tokens) - 1


def mean_slots(groups: Sequence[Group]) -> float:
    """Slots of a row that attention pays for, on average: its own, or those of the longest row."""
    slots = [used_slots(row) + 1 if group.rows.ragged else group.rows.slots for group in groups for row in group.active]
    return sum(slots) / len(slots)
