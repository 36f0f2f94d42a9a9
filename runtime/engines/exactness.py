"""Check whether an engine gives a token's logits the same bits in every call, so that drafting
cannot change them.

A call has one token in plain decoding, several in a round, and many in prefill. The logits have the
same bits only if the kernels add numbers in an order that depends neither on the number of rows of
a call nor on the size of the cache. The check runs calls of all three kinds.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

import numpy as np

from eesd.common.manifest import Manifest
from eesd.runtime.engines.base import Call, Engine, KVCache, Logits

PROMPT = 40
CHUNKS = (PROMPT, 16, 7, 1)
SLOTS = (0, 256, 512)
"""The cache sizes to reserve. 0 is the size of a new cache."""
TREE_NODES = 12


@dataclass(frozen=True)
class Differences:
    """The result of comparing rows of logits.

    Attributes:
        calls: Number of calls of the engine.
        positions: Number of rows that were compared.
        differing: Number of rows in which a bit differs.
        largest: Largest absolute difference of a logit.
        kinds: The kinds of variation for which logits differ. They are ``rows`` (of a call),
            ``slots`` (of the cache), ``chunks`` (of the prompt), and ``threads``.
    """

    calls: int = 0
    positions: int = 0
    differing: int = 0
    largest: float = 0.0
    kinds: frozenset[str] = frozenset()

    def with_rows(self, kind: str, found: Logits, expected: Logits) -> "Differences":
        """Return these differences together with those between a call's rows [n, V] and the
        expected rows. There are n or more expected rows."""
        expected = expected[: len(found)]
        # Compare bits and not values, because -0 and 0 are equal values, and NaN does not equal any
        # value.
        wrong = (found.view(np.uint32) != expected.view(np.uint32)).any(1)
        largest = float(np.abs(found[wrong] - expected[wrong]).max()) if wrong.any() else 0.0
        return replace(
            self,
            calls=self.calls + 1,
            positions=self.positions + len(found),
            differing=self.differing + int(wrong.sum()),
            largest=max(self.largest, largest),
            kinds=self.kinds | {kind} if wrong.any() else self.kinds,
        )

    def __str__(self) -> str:
        if not self.differing:
            return f"equal in every bit at {self.positions} positions of {self.calls} calls"
        what = (
            f"differ at {self.differing} of {self.positions} positions of {self.calls} calls, by "
            f"at most {self.largest:.1e}"
        )
        return f"{what} (other {', '.join(sorted(self.kinds))})"


@dataclass
class Exactness:
    """Checks several engines of a directory with the same tokens.

    Attributes:
        chains: Differences among calls over consecutive tokens, as in plain decoding, prefill and
            drafted chains.
        trees: Differences between a tree's nodes and their paths, which are run as chains.
    """

    manifest: Manifest
    chains: Differences = field(default_factory=Differences)
    trees: Differences = field(default_factory=Differences)

    def __post_init__(self) -> None:
        slots = self.manifest.max_seq_len
        self._rows = min(self.manifest.max_tree_nodes + 1, slots)
        self._prompt = min(PROMPT, slots - self._rows)
        random = np.random.default_rng(0)
        self._tokens: list[int] = random.integers(
            self.manifest.geometry.vocab_size, size=self._prompt + self._rows
        ).tolist()
        self._expected: Logits | None = None

    @property
    def layouts(self) -> int:
        """Number of combinations of cache size and chunks that :meth:`check` runs."""
        return len(list(self._layouts()))

    def check(self, engine: Engine, progress: Callable[[], object] = lambda: None) -> None:
        """Compare calls of 1 to M + 1 rows, for several cache sizes and prompt chunks. Also compare
        a tree with its paths.

        Later engines are compared with the rows of the first engine. The engines may have different
        numbers of threads.

        Args:
            engine: A verify engine.
            progress: A function that is called after each layout of cache and chunks.
        """
        kind = "threads"
        for slots, chunk in self._layouts():
            [kv_cache] = engine.new_kv_caches()
            kv_cache.reserve(min(slots, self.manifest.max_seq_len))
            self._prefill(engine, kv_cache, chunk)
            several = self._forward(engine, kv_cache, self._rows)
            if self._expected is None:
                self._expected = several
            self.chains = self.chains.with_rows(kind, several, self._expected)
            every = chunk == PROMPT and slots == 0
            for rows in range(1, self._rows) if every else (1, 2, 3):
                if rows < self._rows:
                    self.chains = self.chains.with_rows(
                        "rows", self._forward(engine, kv_cache, rows), several
                    )
            self._one_by_one(engine, kv_cache, several)
            if every:
                self._tree(engine, kv_cache)
            kind = "chunks" if slots == 0 else "slots"
            progress()

    def check_quickly(self, engine: Engine) -> bool:
        """Compare a few calls of one and two rows with a call of all rows that begins at slot 0.
        Returns whether all bits are equal."""
        [kv_cache] = engine.new_kv_caches()
        kv_cache.reserve(self._rows)
        tokens = self._tokens[: self._rows]
        every = _logits(engine, Call(kv_cache, tokens, range(len(tokens)), 0))
        middle = len(tokens) // 2
        last = len(tokens) - 1
        for start, count in ((0, 1), (0, 2), (middle, 1), (last - 1, 2), (last - 1, 1), (last, 1)):
            found = _logits(
                engine,
                Call(kv_cache, tokens[start : start + count], range(start, start + count), start),
            )
            self.chains = self.chains.with_rows("rows", found, every[start:])
        return not self.chains.differing

    def _layouts(self) -> Iterator[tuple[int, int]]:
        yield from ((0, chunk) for chunk in CHUNKS)
        yield from ((slots, PROMPT) for slots in SLOTS[1:])

    def _prefill(self, engine: Engine, kv_cache: KVCache, chunk: int) -> None:
        for start in range(0, self._prompt, chunk):
            stop = min(start + chunk, self._prompt)
            engine.forward(
                [Call(kv_cache, self._tokens[start:stop], range(start, stop), start, logits=False)]
            )

    def _forward(self, engine: Engine, kv_cache: KVCache, rows: int, skip: int = 0) -> Logits:
        """Return the logits of ``rows`` tokens after the prompt and ``skip`` further tokens."""
        first = self._prompt + skip
        stop = self._prompt + skip + rows
        return _logits(engine, Call(kv_cache, self._tokens[first:stop], range(first, stop), first))

    def _one_by_one(self, engine: Engine, kv_cache: KVCache, several: Logits) -> None:
        """Decode the first few tokens as plain decoding does, so that one-row calls have written
        the cache."""
        for row in range(min(4, self._rows)):
            self.chains = self.chains.with_rows(
                "rows", self._forward(engine, kv_cache, 1, row), several[row:]
            )

    def _tree(self, engine: Engine, kv_cache: KVCache) -> None:
        """Run a random tree after the prompt, then the path of each of its nodes as a chain."""
        random = np.random.default_rng(1)
        count = min(TREE_NODES, self._rows)
        prompt = self._prompt
        paths = [[0]]
        for node in range(1, count):
            paths.append([*paths[int(random.integers(node))], node])
        seen = np.zeros((count, count), np.bool_)
        for node, path in enumerate(paths):
            seen[node, path] = True
        tokens = self._tokens[prompt : prompt + count]
        positions = [prompt + len(path) - 1 for path in paths]
        found = _logits(engine, Call(kv_cache, tokens, positions, prompt, prompt, seen))
        for node, path in enumerate(paths):
            chain = _logits(
                engine,
                Call(
                    kv_cache, [tokens[i] for i in path], range(prompt, prompt + len(path)), prompt
                ),
            )
            self.trees = self.trees.with_rows("slots", found[node : node + 1], chain[-1:])


def _logits(engine: Engine, call: Call) -> Logits:
    """Return a copy of the logits [n, V] of a call."""
    logits: Logits = engine.forward([call])[0].logits.copy()
    return logits
