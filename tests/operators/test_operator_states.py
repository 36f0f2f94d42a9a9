"""The operators of deep states: what they write and carry, in caches of all shapes; what they
refuse without writing."""

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
SLOTS, LAYERS, LAYER = 48, 3, 1
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
    """Of two sequences in one call: a state behind a prompt is that of every drafted token, and
    nothing else is touched."""
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

    # The root is in slot 17: the state is that of slot 16.
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
    """Over several layers, of chains and of trees; the first token of a text follows none."""
    kv_heads, head_dim = 2, 8
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


def test_bad_calls_are_refused_and_write_nothing(tmp_path: Path) -> None:
    write, carry = (session(tmp_path / kind, kind, 2, 16) for kind in ("WriteState", "CarryState"))
    cache = Cache(LAYERS, 2, SLOTS, 16)
    good, states = tokens((cache, 3), (cache, 4)), np.ones((2, 64), np.float32)
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
    kv_heads, head_dim = sizes.pop("kv_heads"), sizes.pop("head_dim")
    with pytest.raises(EESDError, match="cannot load"):
        session(tmp_path / "model", "CarryState", kv_heads, head_dim, "float32", **sizes)
