"""Tests of the operator of the gated delta rule and of state spaces. It gives equal bits in calls
of any kind, and it refuses bad inputs."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.delta_layer import SLOTS, Layer, check_rounds

from eesd.runtime.engines import operators

pytestmark = pytest.mark.skipif(operators._library() is None, reason="the operators are not built")
SIZES = [(1, 1, 5, 7, 4), (2, 4, 20, 17, 3), (1, 3, 16, 80, 1), (2, 2, 33, 130, 2)]
"""Each tuple has the number of key heads, the number of value heads, the sizes of both kinds of
heads, and the number of taps."""


@pytest.fixture(params=[False, True], ids=["rule", "space"])
def space(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_all_kernels_compute_the_specification(
    tmp_path: Path, sizes: tuple[int, ...], space: bool
) -> None:
    for name in operators.supported():
        (tmp_path / name).mkdir()
        layer = Layer(tmp_path / name, sizes, name, space)
        x = layer.tokens(9, 1)
        x[4] *= 40  # exponentials at both ends
        np.testing.assert_array_equal(layer.call(x, layer.cache(), 0), layer.rule.outputs(x))


@pytest.mark.parametrize("sizes", SIZES[:2], ids=str)
def test_rounds_of_any_kind_have_the_bits_of_one_pass(
    tmp_path: Path, sizes: tuple[int, ...], space: bool
) -> None:
    check_rounds(tmp_path, sizes, space)


def test_sequences_of_a_call_do_not_meet(tmp_path: Path) -> None:
    """A call uses two caches. One of them begins with the records of an earlier text."""
    layer = Layer(tmp_path, SIZES[1], "", False)
    one, other = layer.cache(), layer.cache()
    x = layer.tokens(12, 5)
    layer.call(x[:6], one, 0)
    other[:] = one
    other[layer.tiles : layer.tiles + 16] = 0  # states were not kept, and are computed again
    rows = np.zeros((5, 5), np.int64)
    rows[:, 0] = [one.ctypes.data] * 3 + [other.ctypes.data] * 2
    rows[:, 1] = rows[:, 2] = [6, 7, 8, 6, 7]
    rows[:, 3] = rows[:, 2] + 1
    given = {"x": x[[6, 7, 8, 9, 10]], "tokens": rows, "paths": np.zeros((5, 1), np.int32)}
    found = layer.nodes[1].run(None, given)[0]
    np.testing.assert_array_equal(found[:3], layer.rule.outputs(x[:9])[6:])
    np.testing.assert_array_equal(found[3:], layer.rule.outputs(x[[*range(6), 9, 10]])[6:])


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ((0, 3, 3, 4, 0), "aligned"),
        ((4, 3, 3, 4, 0), "aligned"),
        ((1, 3, SLOTS, 4, 0), "slot"),
        ((1, 3, -1, 4, 0), "slot"),
        ((1, 3, 3, 5, 0), "later"),
        ((1, 3, 3, 0, 0), "later"),
        ((1, 3, 3, 2, 3), "path"),
        ((1, 3, 3, -1, 2), "path"),
        ((1, 3, 3, 2, 2), "slot"),
        ((1, 3, 3, 2, 1), "all tokens"),
    ],
)
def test_bad_calls_are_refused(tmp_path: Path, row: tuple[int, ...], words: str) -> None:
    layer = Layer(tmp_path, SIZES[0], "", False)
    cache = layer.cache()
    before = cache.copy()
    address = {0: 0, 1: cache.ctypes.data, 4: cache.ctypes.data + 4}[row[0]]
    given: dict[str, Any] = {"tokens": np.array([[address, *row[1:]]], np.int64)}
    given["paths"] = np.array([[3, 2] if words == "all tokens" else [-3, 2]], np.int32)
    x = layer.tokens(1, 6)
    with pytest.raises(Exception, match=words):
        layer.nodes[1].run(None, {"x": x, **given})
    assert cache.tobytes() == before.tobytes()


def test_slots_that_do_not_follow_each_other_are_refused(tmp_path: Path) -> None:
    layer = Layer(tmp_path, SIZES[0], "", False)
    address = layer.cache().ctypes.data
    rows = np.array([[address, 0, 0, 1, 0], [address, 2, 2, 3, 0]], np.int64)
    x = layer.tokens(2, 7)
    given: dict[str, Any] = {"x": x, "tokens": rows, "paths": np.zeros((2, 1), np.int32)}
    with pytest.raises(Exception, match="do not follow"):
        layer.nodes[1].run(None, given)
    with pytest.raises(Exception, match="x has another size"):
        layer.nodes[1].run(None, given | {"x": x[:, 1:].copy()})
