"""Tests of the operators of deep states. They check the values that these operators write and
carry, in caches of all shapes. They also check that bad inputs are refused before anything is
written."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from onnx import TensorProto
from support.operators import UNWRITTEN, Cache, one_node
from support.specification import round_rows

from eesd.common.errors import EESDError
from eesd.runtime.engines import operators
from eesd.runtime.engines.cpu_cache import KV_CACHE_DTYPES
from eesd.runtime.engines.operators import make_session

pytestmark = pytest.mark.skipif(operators._library() is None, reason="the operators are not built")
SLOTS = 48
LAYERS = 3
LAYER = 1
SHAPES = [(1, 16), (3, 20), (2, 64), (3, 2)]


def session(
    path: Path, kind: str, kv_heads: int, head_dim: int, dtype: str = "float32", **changes: int
) -> Any:
    inputs = [("states", TensorProto.FLOAT)] if kind == "WriteState" else []
    attributes: dict[str, Any] = {
        "kv_heads": kv_heads,
        "head_dim": head_dim,
        "slots": SLOTS,
        "layer": LAYER,
        "size": 2 * kv_heads * head_dim,
    } | changes
    one_node(path, kind, [*inputs, ("tokens", TensorProto.INT64)], **attributes)
    return make_session(path, 1, True, "", dtype)


def tokens(*places: tuple[Cache, int]) -> NDArray[np.int64]:
    return np.array([(cache.address, slot, slot, slot + 1, 0) for cache, slot in places], np.int64)


def state_at(cache: Cache, slot: int, head_dim: int) -> NDArray[np.float32]:
    keys, values = cache.rows(LAYER, slot, head_dim)
    return np.concatenate([keys.ravel(), values.ravel()])


@pytest.mark.parametrize("dtype", KV_CACHE_DTYPES)
@pytest.mark.parametrize(("kv_heads", "head_dim"), SHAPES)
def test_states_are_written_and_carried(
    tmp_path: Path, kv_heads: int, head_dim: int, dtype: str
) -> None:
    """A call has two sequences. Every drafted token gets the state after the prompt, and nothing
    else is changed."""
    write, carry = (
        session(tmp_path / kind, kind, kv_heads, head_dim, dtype=dtype)
        for kind in ("WriteState", "CarryState")
    )
    one, other = (Cache(LAYERS, kv_heads, SLOTS, head_dim, dtype) for _ in range(2))
    states = (
        np.random.default_rng(head_dim)
        .standard_normal((4, 2 * kv_heads * head_dim))
        .astype(np.float32)
    )
    written = tokens((one, 15), (one, 16), (other, 30), (one, 17))
    assert write.run(None, {"states": states, "tokens": written})[0].shape == (4, 0)
    if dtype == "int8":
        levels, scales = round_rows(states.reshape(-1, head_dim), 127)
        expected = (
            (levels * (scales.view(np.uint32) & ~np.uint32(255)).view(np.float32)[:, None])
            .astype(np.float32)
            .reshape(states.shape)
        )
    else:
        expected = states.astype(dtype).astype(np.float32)
    for (cache, slot), state in zip(
        ((one, 15), (one, 16), (other, 30), (one, 17)), expected, strict=True
    ):
        np.testing.assert_array_equal(state_at(cache, slot, head_dim), state)
    np.testing.assert_array_equal(state_at(one, 14, head_dim), state_at(one, 18, head_dim))
    layers = one.array.reshape(LAYERS, -1)
    assert (
        np.delete(layers, LAYER, 0)
        == np.delete(
            Cache(LAYERS, kv_heads, SLOTS, head_dim, dtype).array.reshape(layers.shape), LAYER, 0
        )
    ).all()

    # The root is in slot 17, so the state comes from slot 16.
    drafted = ((one, 17), (one, 18), (one, 19), (other, 31), (other, 0))
    [found] = carry.run(None, {"tokens": tokens(*drafted)})
    np.testing.assert_array_equal(
        found, [expected[1]] * 3 + [expected[2], np.zeros(len(states[0]))]
    )
    for (cache, slot), state in zip(drafted, found, strict=True):
        np.testing.assert_array_equal(state_at(cache, slot, head_dim), state)
    [found] = carry.run(None, {"tokens": tokens((one, 20))})  # the next step of the draft
    np.testing.assert_array_equal(found, expected[1:2])


@pytest.mark.parametrize("size", [7, 32, 64, 90])
def test_states_of_any_size_are_those_of_the_token_before(tmp_path: Path, size: int) -> None:
    """States span several layers, in chains and trees. The first token of a text has no
    predecessor."""
    kv_heads = 2
    head_dim = 8
    write = session(tmp_path / "write", "WriteState", kv_heads, head_dim, size=size)
    inputs = [("tokens", TensorProto.INT64), ("paths", TensorProto.INT32)]
    sizes: dict[str, Any] = {
        "kv_heads": kv_heads,
        "head_dim": head_dim,
        "slots": SLOTS,
        "layer": LAYER,
        "size": size,
    }
    one_node(tmp_path / "read", "ParentState", inputs, **sizes)
    read = make_session(tmp_path / "read", 1, True)
    cache = Cache(LAYER + -(-size // 32), kv_heads, SLOTS, head_dim)
    states = np.random.default_rng(size).standard_normal((6, size)).astype(np.float32)
    write.run(None, {"states": states, "tokens": tokens(*((cache, slot) for slot in range(6)))})
    assert (cache.keys[:LAYER] == 0).sum() + (
        cache.keys[:LAYER] == np.float32(UNWRITTEN)
    ).sum() == cache.keys[:LAYER].size
    chain = [(cache.address, slot, slot, slot + 1, 0) for slot in (0, 1, 5)]
    tree = [
        (cache.address, 3, 3, 3, 1),
        (cache.address, 4, 4, 3, 2),
        (cache.address, 4, 5, 3, 2),
        (cache.address, 5, 6, 3, 3),
    ]
    paths = np.zeros((7, 3), np.int32)
    for row, path in enumerate(([3], [3, 4], [3, 5], [3, 5, 6]), start=3):
        paths[row, : len(path)] = path
    [found] = read.run(None, {"tokens": np.array([*chain, *tree], np.int64), "paths": paths})
    np.testing.assert_array_equal(found, [np.zeros(size), *states[[0, 4, 2, 3, 3, 5]]])
    for bad in ((cache.address, 9, 9, SLOTS + 5, 1), (cache.address, 9, 9, 9, 4)):
        with pytest.raises(Exception, match=r"slot|path"):
            read.run(None, {"tokens": np.array([bad], np.int64), "paths": paths[:1]})


@pytest.mark.parametrize("dtype", KV_CACHE_DTYPES)
@pytest.mark.parametrize(("size", "taps"), [(7, 3), (32, 1), (50, 2), (90, 4)])
def test_convolutions_follow_the_path_of_each_token(
    tmp_path: Path, size: int, taps: int, dtype: str
) -> None:
    """The bits are the same in one call and token by token, and in a chain and in a tree. They do
    not change if there is another sequence, or if several threads compute them."""
    kv_heads = 2
    head_dim = 8
    random = np.random.default_rng(size)
    weights = random.standard_normal((size, 1, taps)).astype(np.float32)
    inputs = [("x", TensorProto.FLOAT), ("tokens", TensorProto.INT64), ("paths", TensorProto.INT32)]
    sizes: dict[str, Any] = {"kv_heads": kv_heads, "head_dim": head_dim, "slots": SLOTS}
    model = tmp_path / "one"
    one_node(model, "Convolution", [*inputs, ("w", weights)], **sizes, layer=LAYER, size=size)
    node = make_session(model, 3, True, "", dtype)
    x = random.standard_normal((12, 3 * size)).astype(np.float32)
    texts = [[0], [0, 1], [0, 1, 2], [0, 1, 2, 3], [0, 1, 2, 3, 4]]
    # The context has three tokens. A root, two branches, and a node after the second branch follow.
    trees = [[0, 1, 2, 5], [0, 1, 2, 5, 6], [0, 1, 2, 5, 7], [0, 1, 2, 5, 7, 8]]
    slots = {5: 3, 6: 4, 7: 5, 8: 6}

    def cache() -> Cache:
        return Cache(LAYER + -(-size // 32), kv_heads, SLOTS, head_dim, dtype)

    def call(numbers: list[int], rows: Sequence[tuple[int, ...]], paths: list[list[int]]) -> Any:
        padded = np.zeros((len(rows), max(map(len, paths), default=0) or 1), np.int32)
        for row, own in zip(padded, paths, strict=True):
            row[: len(own)] = own
        given = {"x": x[numbers], "tokens": np.array(rows, np.int64), "paths": padded}
        return node.run(None, given)[0]

    def expected(path: list[int]) -> Any:
        states = [x[one, :size] * x[one, 2 * size :] for one in path[-taps:]]
        held = [rounded(state, head_dim, dtype) for state in states[:-1]] + states[-1:]
        total = np.zeros(size, np.float32)
        for distance, state in zip(reversed(range(len(held))), held, strict=True):
            total = total + weights[:, 0, taps - 1 - distance] * state
        return total * x[path[-1], size : 2 * size]

    whole = cache()
    pieces = cache()
    other = cache()
    chain = [(of.address, slot, slot, slot + 1, 0) for of in (whole, other) for slot in range(5)]
    found = call([*range(5)] * 2, chain, [[]] * 10)
    for number, path in enumerate([*texts, *texts]):
        np.testing.assert_array_equal(found[number], expected(path))
    for slot in range(5):
        row = (pieces.address, slot, slot, slot + 1, 0)
        np.testing.assert_array_equal(call([slot], [row], [[]])[0], found[slot])
    nodes = [path[-1] for path in trees]
    paths = [[slots[one] for one in path[3:]] for path in trees]
    rows = [(whole.address, 2 + len(own), own[-1], 3, len(own)) for own in paths]
    tree = call(nodes, rows, paths)
    for number, path in enumerate(trees):
        np.testing.assert_array_equal(tree[number], expected(path))
    for bad in ((whole.address, 9, 9, SLOTS + 5, 1), (whole.address, 9, 9, -1, 1)):
        if taps > 1:
            with pytest.raises(Exception, match=r"slot|path"):
                call([0], [bad], [[9]])
    with pytest.raises(Exception, match="x has another size"):
        node.run(None, {"x": x[:1, 1:].copy(), "tokens": np.array(rows[:1]), "paths": paths_of(1)})


def paths_of(count: int) -> NDArray[np.int32]:
    return np.zeros((count, 1), np.int32)


def rounded(state: NDArray[np.float32], head_dim: int, dtype: str) -> NDArray[np.float32]:
    """Returns a state that is rounded as a cache stores it."""
    if dtype != "int8":
        return state.astype(dtype).astype(np.float32)
    rows = np.zeros((-(-len(state) // head_dim), head_dim), np.float32)
    rows.reshape(-1)[: len(state)] = state
    levels, scales = round_rows(rows, 127)
    whole = (scales.view(np.uint32) & ~np.uint32(255)).view(np.float32)
    found: NDArray[np.float32] = (levels * whole[:, None]).astype(np.float32).reshape(-1)
    return found[: len(state)]


def test_bad_calls_are_refused_and_write_nothing(tmp_path: Path) -> None:
    write, carry = (session(tmp_path / kind, kind, 2, 16) for kind in ("WriteState", "CarryState"))
    cache = Cache(LAYERS, 2, SLOTS, 16)
    good = tokens((cache, 3), (cache, 4))
    states = np.ones((2, 64), np.float32)
    for column, value in ((0, 0), (0, cache.address + 4), (2, -1), (2, SLOTS)):
        bad = good.copy()
        bad[1, column] = value
        for node, given in ((write, {"states": states}), (carry, {})):
            with pytest.raises(Exception, match=r"slot|aligned"):
                node.run(None, {"tokens": bad, **given})
    with pytest.raises(Exception, match="states have another size"):
        write.run(None, {"states": states[:, 1:].copy(), "tokens": good})
    with pytest.raises(Exception, match="tokens are"):
        carry.run(None, {"tokens": good[:, :4].copy()})
    assert (cache.array == np.float32(UNWRITTEN)).all()


@pytest.mark.parametrize(
    "changes", [{"slots": 40}, {"layer": -1}, {"kv_heads": 0}, {"head_dim": 600}], ids=str
)
def test_bad_attributes_are_refused(tmp_path: Path, changes: dict[str, int]) -> None:
    sizes = {"kv_heads": 2, "head_dim": 16} | changes
    kv_heads = sizes.pop("kv_heads")
    head_dim = sizes.pop("head_dim")
    with pytest.raises(EESDError, match="cannot load"):
        session(tmp_path / "model", "CarryState", kv_heads, head_dim, "float32", **sizes)
