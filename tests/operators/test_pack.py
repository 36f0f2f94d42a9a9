"""Tests of packing weights into panels. They cover GGUF blocks, arrays in any order of memory, and
inputs that are refused.

``test_operators.py`` compares the bytes with those that SPECIFICATION.md lists.
"""

import subprocess
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from numpy.typing import NDArray
from onnx import TensorProto
from support.operators import one_node, run
from support.without_operators import needs_operators, without_operators

from eesd.common.errors import EESDError
from eesd.export.cpu.panels import (
    BFLOAT16,
    BITS4,
    BITS5,
    BITS6,
    BITS8,
    FLOAT16,
    FLOAT32,
    NARROW,
    PLANES,
    SPLIT,
    Packed,
    pack_floats,
    pack_gguf,
    pack_levels,
)
from eesd.model.gguf_file import _unpack_blocks
from eesd.runtime.engines import operators
from eesd.runtime.engines.operators import make_session

HALVES = {
    "Q4_0": (0,),
    "Q4_1": (0, 2),
    "Q5_0": (0,),
    "Q5_1": (0, 2),
    "Q8_0": (0,),
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q6_K": (208,),
}
"""Offsets of the float16 values in a block."""
FORMATS = {"Q5_0": BITS5, "Q5_1": BITS5, "Q5_K": BITS5, "Q6_K": BITS6, "Q8_0": BITS8}
SPLITS = ("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K")

pytestmark = needs_operators()


def seeded(*values: object) -> np.random.Generator:
    return np.random.default_rng(sum(map(ord, repr(values))))


def random_blocks(kind: str, rows: int, inputs: int, most: float = 0.1) -> NDArray[np.uint8]:
    """[rows, bytes]"""
    values, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    random = seeded(kind, rows, inputs)
    blocks = random.integers(0, 256, (rows * inputs // values, size), np.uint8)
    for at in HALVES[kind]:
        halves = random.uniform(-most, most, (len(blocks), 1)).astype(np.float16)
        halves[-3:, 0] = (0, 1e-7, 6e4)[-len(halves) :]  # none, subnormal, nearly the largest
        blocks[:, at : at + 2] = halves.view(np.uint8)
    return blocks.reshape(rows, -1)


def levels_of(kind: str, blocks: NDArray[np.uint8]) -> tuple[Any, Any, Any]:
    """Returns the levels, the scales and the minimums that numpy reads from the blocks."""
    size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]][1]
    found = _unpack_blocks(kind, blocks.reshape(-1, size))
    parts: list[Any] = [None if part is None else part.reshape(len(blocks), -1).T for part in found]
    levels, scales, minimums = parts
    least = None if minimums is None else minimums.astype(np.float32)
    return levels.view(np.int8), scales.astype(np.float32), least


def table_of(packed: Packed, path: Path) -> NDArray[np.float32]:
    """Returns the table [outputs, inputs] that the operator Embed reads from the panels."""
    given: list[tuple[str, Any]] = [("ids", TensorProto.INT64), ("table", packed.data)]
    session = make_session(one_node(path, "Embed", given, matrices=packed.numbers), 1, True)
    found: NDArray[np.float32] = run(session, ids=np.arange(packed.numbers[2]))
    return found


def assert_equal(found: Packed, expected: Packed) -> None:
    assert found.numbers == expected.numbers
    np.testing.assert_array_equal(found.data, expected.data)


@pytest.mark.parametrize("kind", HALVES)
@pytest.mark.parametrize("rows, inputs", [(1, 256), (33, 1280)])
def test_blocks_of_a_file_become_panels(tmp_path: Path, kind: str, rows: int, inputs: int) -> None:
    """Integer scales and factors in the file are kept as they are."""
    blocks = random_blocks(kind, rows, inputs)
    packed = pack_gguf(blocks, kind, (rows, inputs))
    levels, scales, minimums = levels_of(kind, blocks)
    assert packed.numbers[1:3] == (inputs, rows)
    if rows > 1:
        form = FORMATS.get(kind, BITS4)
        assert (packed.numbers[0], packed.numbers[5]) == (form, SPLIT if kind in SPLITS else NARROW)
    values = levels * np.repeat(scales, inputs // len(scales), 0)
    if minimums is not None:
        values = values + np.repeat(minimums, inputs // len(minimums), 0)
    np.testing.assert_array_equal(table_of(packed, tmp_path / "model"), values.T)  # 0 is -0
    assert_equal(packed, pack_levels(levels, scales, minimums))


def test_a_mapped_tensor_is_packed_in_two_planes(tmp_path: Path) -> None:
    blocks = random_blocks("Q8_0", 20, 64)
    (tmp_path / "tensor").write_bytes(blocks.tobytes())
    packed = pack_gguf(np.memmap(tmp_path / "tensor", mode="r"), "Q8_0", (20, 64), planes=True)
    assert packed.numbers[0] == PLANES
    assert_equal(packed, pack_levels(*levels_of("Q8_0", blocks), planes=True))


def in_every_order(array: NDArray[Any]) -> list[NDArray[Any]]:
    """Returns three arrays with the same values. One is stored by rows, one by columns, and one has
    gaps between the values."""
    apart = np.zeros((array.shape[0] + 2, 2 * array.shape[1] + 1), array.dtype)
    between = apart[1:-1, 1::2]
    between[:] = array
    return [np.ascontiguousarray(array), np.asfortranarray(array), between]


@pytest.mark.parametrize("dtype, least, most", [("int8", -128, 127), ("uint8", 0, 255)])
@pytest.mark.parametrize("block", [16, 32, 64])
def test_the_order_of_memory_changes_nothing(dtype: str, least: int, most: int, block: int) -> None:
    random = seeded(dtype, block)
    levels = random.integers(least, most + 1, (192, 35)).astype(dtype)
    scales = random.normal(0, 1, (192 // block, 35)).astype(np.float32)
    expected = pack_levels(levels, scales)
    for values, own in zip(in_every_order(levels), in_every_order(scales)[::-1], strict=True):
        assert_equal(pack_levels(values, own), expected)


@pytest.mark.parametrize("form", [FLOAT32, FLOAT16, BFLOAT16])
@pytest.mark.parametrize("inputs, outputs", [(1, 1), (20, 16), (300, 37)])
def test_floats_stay_as_they_are(form: int, inputs: int, outputs: int) -> None:
    bits = seeded(form).integers(0, 65536, (inputs, outputs))
    weight = bits.astype(np.float32) if form == FLOAT32 else bits.astype(np.uint16)
    padded = np.pad(weight, ((0, 0), (0, -outputs % 16)))
    panels = [padded[:, at : at + 16].tobytes() for at in range(0, outputs, 16)]
    for values in in_every_order(weight):
        packed = pack_floats(values, form)
        assert packed.numbers == (form, inputs, outputs, 0, 0, 0, 0)
        assert packed.data.tobytes() == b"".join(panels)


def weight(levels: Any = 0, scales: Any = 1, minimums: Any = None, block: int = 32) -> list[Any]:
    """Returns levels [64, 3], scales and minimums. A number fills the whole array, and an array is
    used as it is."""

    def filled(value: Any, shape: tuple[int, int], dtype: str) -> Any:
        return value if isinstance(value, np.ndarray) else np.full(shape, value, dtype)

    shared = (64 // block, 3)
    least = None if minimums is None else filled(minimums, shared, "float32")
    return [filled(levels, (64, 3), "int8"), filled(scales, shared, "float32"), least]


WRONG = {
    "levels of 16 bits": weight(np.zeros((64, 3), np.int16)),
    "one dimension": weight(np.zeros(64, np.int8)),
    "no levels": weight(np.zeros((0, 3), np.int8)),
    "no outputs": weight(np.zeros((64, 0), np.int8), np.zeros((2, 0), np.float32)),
    "33 inputs": weight(np.zeros((33, 3), np.int8), np.ones((1, 3), np.float32)),
    "other scales": weight(scales=np.ones((3, 3), np.float32)),
    "scales of other outputs": weight(scales=np.ones((2, 4), np.float32)),
    "scales of a small block": weight(block=8),
    "scales of 16 bits": weight(scales=np.ones((2, 3), np.float16)),
    "no scales": weight(scales=np.ones((0, 3), np.float32)),
    "infinite scales": weight(scales=np.inf),
    "scales that are no numbers": weight(scales=np.nan),
    "infinite minimums": weight(minimums=-np.inf),
    "other minimums": weight(minimums=np.ones((1, 3), np.float32)),
    "minimums and levels below 0": weight(-1, minimums=1),
}


@pytest.mark.parametrize("name", WRONG)
def test_levels_that_do_not_fit_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match=r"level|scale|minimum|size|dimension"):
        pack_levels(*WRONG[name])


def test_blocks_that_do_not_fit_are_refused() -> None:
    blocks = random_blocks("Q4_K", 3, 512)
    shape = (3, 512)
    for wrong in ((2, 512), (3, 256), (3, 500), (0, 512), (-3, -512), (3 << 40, 512)):
        with pytest.raises(ValueError, match=r"size|block|inputs"):
            pack_gguf(blocks, "Q4_K", wrong)
    for kind in ("IQ4_XS", "int8", ""):
        with pytest.raises(ValueError, match="cannot be packed"):
            pack_gguf(blocks, kind, shape)
    with pytest.raises(ValueError, match="another size"):
        pack_gguf(blocks.reshape(-1)[:-1], "Q4_K", shape)
    for kind, halves in HALVES.items():
        damaged = random_blocks(kind, 3, 512)
        damaged[2, halves[-1] : halves[-1] + 2] = (0, 0x7C)
        with pytest.raises(ValueError, match="not a finite number"):
            pack_gguf(damaged, kind, shape)


def test_floats_of_another_type_are_refused() -> None:
    for form, dtype in (
        (FLOAT32, "float16"),
        (FLOAT16, "float32"),
        (BITS4, "uint16"),
        (-1, "uint16"),
    ):
        with pytest.raises(ValueError, match="cannot be"):
            pack_floats(np.zeros((2, 2), dtype), form)
    with pytest.raises(ValueError, match="size"):
        pack_floats(np.zeros((0, 2), np.float32), FLOAT32)


def test_without_the_library_a_sentence_says_so() -> None:
    with without_operators(), pytest.raises(EESDError, match="install a C\\+\\+ compiler"):
        pack_floats(np.zeros((2, 2), np.float32), FLOAT32)


@pytest.mark.slow
@pytest.mark.parametrize("sanitizers", ["address,undefined", "thread"])
def test_sanitizers_find_nothing(tmp_path: Path, sanitizers: str) -> None:
    """Blocks of all types and odd sizes are packed on several threads, in memory of exactly their
    size. The test also tries wrong sizes."""
    sources = Path(operators.__file__).parents[1] / "operators"
    files = [sources / "pack.cpp", Path(__file__).with_name("check_pack.cpp")]
    flags = [
        "-std=c++17",
        "-O1",
        "-g1",
        "-ffp-contract=off",
        f"-I{sources}",
        "-pthread",
        f"-fsanitize={sanitizers}",
        "-fno-sanitize-recover=all",
    ]
    subprocess.run(["g++", *flags, *files, "-o", tmp_path / "check"], check=True)
    done = subprocess.run([tmp_path / "check"], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "packed\n"), done.stdout + done.stderr[-3000:]
