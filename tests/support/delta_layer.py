"""A layer with the gated delta rule or a state space as two nodes, and rounds that use it."""

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from onnx import TensorProto

from eesd.runtime.engines.operators import make_session
from support.operators import assert_same, one_node, or_nothing
from support.specification import Rule

SLOTS = 192
HEAD_DIM = 12
KV_HEADS = 2
Floats = NDArray[np.float32]


class Layer:
    """Two nodes for the same layer, as in the verify and draft graphs, and the caches of these
    nodes. A state space has biases of its convolution, and the delta rule has none."""

    def __init__(self, path: Path, sizes: tuple[int, ...], kernels: str, space: bool) -> None:
        random = np.random.default_rng(sum(sizes))
        key_heads, value_heads, key_dim, value_dim, taps = sizes
        self.values = value_heads * value_dim
        self.mixed = 2 * key_heads * key_dim + self.values
        weights = random.standard_normal((self.mixed, taps)).astype(np.float32)
        numbers = random.standard_normal((3, max(value_heads, value_dim))).astype(np.float32)
        decay, bias = numbers[:2, :value_heads]
        sizes_of_heads = (key_heads, value_heads, key_dim, value_dim)
        norm = numbers[2, : value_heads if space else value_dim]
        biases = random.standard_normal(self.mixed).astype(np.float32) if space else None
        self.rule = Rule(
            *sizes_of_heads, weights, decay - 1, bias, norm, 1e-5, taps_bias=biases, space=space
        )
        size = self.mixed + key_heads * key_dim + self.values + value_heads
        self.caches = -(-size // (2 * KV_HEADS * HEAD_DIM))
        self.tiles = (1 + self.caches) * 2 * KV_HEADS * SLOTS * 16
        state = value_heads * key_dim * -(-value_dim // 16) * 16
        self.floats = self.tiles + 16 + 2 * state
        inputs: list[Any] = [("x", TensorProto.FLOAT), ("tokens", TensorProto.INT64)]
        inputs += [("paths", TensorProto.INT32), ("w", weights[:, None]), ("a", self.rule.decay)]
        inputs += [("b", bias), ("n", self.rule.norm), ("t", or_nothing(biases))]
        self.nodes = []
        for keeps in (0, 1):
            one_node(
                path / f"{keeps}",
                "DeltaRule",
                inputs,
                kv_heads=KV_HEADS,
                head_dim=HEAD_DIM,
                slots=SLOTS,
                layer=1,
                size=size,
                key_heads=key_heads,
                value_heads=value_heads,
                key_dim=key_dim,
                value_dim=value_dim,
                taps=taps,
                epsilon=1e-5,
                space=int(space),
                states_at=4 * self.tiles,
                keeps=keeps,
            )
            self.nodes.append(make_session(path / f"{keeps}", 3, True, kernels))

    def cache(self) -> Floats:
        memory = np.full(self.floats + 16, np.nan, np.float32)
        found = memory[-memory.ctypes.data % 64 // 4 :][: self.floats]
        found[self.tiles : self.tiles + 16] = 0
        return found

    def call(
        self,
        x: Floats,
        cache: Floats,
        first: int,
        paths: list[list[int]] | None = None,
        verify: bool = True,
        context: int = -1,
    ) -> Floats:
        """Run tokens in the slots from ``first`` on. They run as a chain. If there are ``paths``,
        they run as nodes that see these slots after a context."""
        count = len(x)
        rows = np.zeros((count, 5), np.int64)
        rows[:, 0] = cache.ctypes.data
        rows[:, 1] = rows[:, 2] = first + np.arange(count)
        rows[:, 3] = rows[:, 2] + 1
        padded = np.zeros((count, max(map(len, paths or [[0]]))), np.int32)
        for row, number, path in zip(padded, rows, paths or [], strict=False):
            row[: len(path)] = path
            number[3:] = first if context < 0 else context, len(path)
        given = {"x": x, "tokens": rows, "paths": padded}
        found: Floats = self.nodes[verify].run(None, given)[0]
        return found

    def tokens(self, count: int, seed: int) -> Floats:
        steps = 1 if self.rule.space else 2
        columns = self.mixed + self.values + steps * self.rule.value_heads
        return np.random.default_rng(seed).standard_normal((count, columns)).astype(np.float32)


def check_rounds(path: Path, sizes: tuple[int, ...], space: bool) -> None:
    """Run a prompt in pieces, then chains and trees that are drafted, verified and rejected in
    part. After each round the records of the kept tokens are moved together, as in caches."""
    path.mkdir(parents=True, exist_ok=True)
    layer = Layer(path, sizes, "", space)
    text = layer.tokens(90, 2)
    expected = layer.rule.outputs(text)
    cache = layer.cache()
    for first, stop in ((0, 66), (66, 69)):
        found = layer.call(text[first:stop], cache, first)
        assert_same(found, expected[first:stop])
    header = cache[layer.tiles : layer.tiles + 16].view(np.int64)
    records = cache[layer.tiles // (1 + layer.caches) : layer.tiles].reshape(SLOTS, -1)
    wrong = layer.tokens(8, 3)
    root = 69
    for accepted, tree in ((0, False), (2, False), (3, True), (1, True), (0, True), (2, False)):
        if tree:  # the root and its second child have two children each, the wrong child first
            drafted = np.stack([wrong[0], text[root + 1], wrong[1], text[root + 2]])
            paths = [[1], [2], [2, 3], [2, 4]]
            order = [2, 4]
        else:
            drafted = text[root + 1 : root + 4].copy()
            drafted[accepted:] = wrong[: 3 - accepted]
            paths = [[1], [1, 2], [1, 2, 3]]
            order = [1, 2, 3]
        accepted = min(accepted, len(order))
        whole = np.concatenate((text[root : root + 1], drafted))
        paths = [[0], *([0, *path] for path in paths)]
        slots = [[root + one for one in path] for path in paths]
        wanted = [
            layer.rule.outputs(np.concatenate((text[:root], whole[path])))[-1] for path in paths
        ]
        # The draft runs level by level. Its inputs differ from the inputs of the verify pass.
        done = 0
        for level in sorted({len(path) for path in paths}):
            stop = max(at for at, path in enumerate(paths) if len(path) == level) + 1
            other = whole[done:stop] + np.float32(0.5)
            found = layer.call(other, cache, root + done, slots[done:stop], False, context=root)
            pasts = [
                np.concatenate((text[:root], whole[path] + np.float32(0.5)))
                for path in paths[done:stop]
            ]
            for row, past in zip(found, pasts, strict=True):
                assert_same(row, layer.rule.outputs(past)[-1])
            done = stop
        found = layer.call(whole, cache, root, slots if tree else None)
        assert_same(found, np.array(wanted))
        kept = [root + one for one in order[:accepted]]
        records[root + 1 : root + 1 + accepted] = records[kept]
        header[:2][header[:2] > root + 1] = 0
        root += 1 + accepted
    for one in range(root, 90):  # plain decoding
        found = layer.call(text[one : one + 1], cache, one)
        assert_same(found, expected[one : one + 1])
