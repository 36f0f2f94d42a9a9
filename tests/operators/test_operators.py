"""Tests that the operators of this project give the bits of their NumPy specification, and that
their results are close to results in float64. Bad inputs are refused."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import product as combinations
from pathlib import Path
from threading import Thread
from typing import Any

import numpy as np
import pytest
from onnx import TensorProto
from support import specification
from support.operators import (
    MOST,
    NOTHING,
    PLANES_OF,
    UNWRITTEN,
    Attention,
    Mixture,
    Product,
    assert_same,
    attend,
    chain,
    check_float16,
    check_mixture,
    check_product,
    one_node,
    pack,
    prefill,
    random_weight,
    run,
    top,
    tree,
)
from support.specification import BITS, Weight

from eesd.common.errors import EESDError
from eesd.export.cpu.panels import NARROW, PLANES, SPLIT, UPPER, WIDE
from eesd.runtime.engines import operators
from eesd.runtime.engines.operators import make_session

pytestmark = pytest.mark.skipif(operators._library() is None, reason="the operators are not built")

SIZES = [(32, 1), (64, 49), (96, 16), (160, 33), (32, 97), (128, 80)]
SPLIT_SIZES = [(256, 17), (512, 33)]
VARIANTS = list(combinations((False, True), (NARROW, WIDE, SPLIT), (False, True)))
FORMS = [
    (form, *of) for form in BITS for of in VARIANTS if form not in PLANES_OF or not (of[0] or of[2])
]


@pytest.fixture(scope="module")
def names() -> list[str]:
    return operators.supported()


def seeded(*values: object) -> np.random.Generator:
    return np.random.default_rng(sum(map(ord, repr(values))))


@pytest.mark.parametrize("int8", [True, False], ids=["int8", "float32"])
@pytest.mark.parametrize("form, fine, kind, minimums", FORMS)
def test_products_with_levels(
    tmp_path: Path, names: list[str], form: str, fine: bool, kind: int, minimums: bool, int8: bool
) -> None:
    number = VARIANTS.index((fine, kind, minimums))
    random = seeded(form, number)
    sizes = SPLIT_SIZES if kind == SPLIT else SIZES
    inputs, outputs = sizes[(number + int8) % len(sizes)]
    weight = random_weight(
        random, form, inputs, outputs, fine, kind, minimums, signed=number % 3 != 1
    )
    packed = pack(weight)
    expected = (list(BITS).index(form) + 3, inputs, outputs, weight.zero, fine, kind, minimums)
    assert packed.numbers == expected
    check_product(Product([weight], seed=number), tmp_path / "model", int8, names)


@pytest.mark.parametrize("inputs, outputs", [(1, 1), (20, 49), (48, 16), (33, 97), (129, 65)])
@pytest.mark.parametrize("form", ["float32", "float16", "bfloat16"])
def test_products_with_floats(
    tmp_path: Path, names: list[str], form: str, inputs: int, outputs: int
) -> None:
    weight = random_weight(seeded(form, inputs), form, inputs, outputs, False, NARROW, False)
    check_product(Product([weight]), tmp_path / "model", True, names)


def parts(random: np.random.Generator, inputs: int, *forms: str, outputs: int = 0) -> list[Weight]:
    sizes = (49, 16, 33, 5)
    return [
        random_weight(
            random, form, inputs, outputs or sizes[i % 4], i % 2 == 1, i % 3 % 2, i % 2 == 0
        )
        for i, form in enumerate(forms)
    ]


@pytest.mark.parametrize("int8", [True, False], ids=["int8", "float32"])
@pytest.mark.parametrize(
    "forms",
    [
        ("bits4", "bits6", "bits8"),
        ("upper", "bits5", "planes"),
        ("float32", "bits5", "float16", "bits4"),
        ("bfloat16", "float32"),
    ],
)
@pytest.mark.parametrize(
    "norm, bias, residual", [(True, False, False), (False, True, True), (True, True, True)]
)
def test_products_of_several_parts(
    tmp_path: Path,
    names: list[str],
    forms: tuple[str, ...],
    norm: bool,
    bias: bool,
    residual: bool,
    int8: bool,
) -> None:
    random = seeded(forms, norm, bias)
    own = parts(random, 96, *forms)
    columns = sum(part.shape[1] for part in own)
    weight = random.normal(1, 0.3, 96).astype(np.float32) if norm else None
    added = random.normal(0, 1, columns).astype(np.float32) if bias else None
    check_product(Product(own, weight, added, residual), tmp_path / "model", int8, names)


@pytest.mark.parametrize("int8", [True, False], ids=["int8", "float32"])
@pytest.mark.parametrize(
    "forms",
    [
        ("bits4", "bits4"),
        ("bits6", "bits8"),
        ("planes", "planes"),
        ("upper", "bits4"),
        ("float32", "float32"),
        ("bfloat16", "bfloat16"),
    ],
)
@pytest.mark.parametrize(
    "norm, bias, residual, gating",
    [
        (False, False, False, 1),
        (True, True, False, 2),
        (True, False, True, 1),
        (True, True, True, 3),
    ],
)
def test_gates(
    tmp_path: Path,
    names: list[str],
    forms: tuple[str, ...],
    norm: bool,
    bias: bool,
    residual: bool,
    gating: int,
    int8: bool,
) -> None:
    random = seeded(forms, norm, bias)
    own = parts(random, 64, *forms, outputs=49)
    weight = random.normal(1, 0.3, 64).astype(np.float32) if norm else None
    added = random.normal(0, 1, 98).astype(np.float32) if bias else None
    check_product(Product(own, weight, added, residual, gating), tmp_path / "model", int8, names)


@pytest.mark.parametrize("int8", [True, False], ids=["int8", "float32"])
@pytest.mark.parametrize("kind", [NARROW, WIDE, SPLIT])
def test_two_planes_have_the_bits_and_bytes_of_one(
    tmp_path: Path, names: list[str], kind: int, int8: bool
) -> None:
    inputs, outputs = (512, 33) if kind == SPLIT else (160, 49)
    weight = random_weight(seeded(kind), "bits8", inputs, outputs, False, kind, False)
    whole = Product([weight])
    planes = Product([replace(weight, form="planes")])
    assert pack(whole.parts[0]).data.nbytes == pack(planes.parts[0]).data.nbytes
    whole.write(tmp_path / "whole")
    planes.write(tmp_path / "planes")
    for name in names:
        one, other = (make_session(tmp_path / file, 2, int8, name) for file in ("whole", "planes"))
        for rows in range(1, 34):
            assert_same(planes.run(other, 0, rows), whole.run(one, 0, rows), f"{name}, {rows} rows")


@pytest.mark.parametrize("int8", [True, False], ids=["int8", "float32"])
def test_the_upper_plane_is_read_alone(tmp_path: Path, names: list[str], int8: bool) -> None:
    """The lower halves of the levels are stored after the upper halves, and do not change the
    result."""
    weight = random_weight(seeded("upper"), "upper", 96, 49, False, NARROW, False)
    other = replace(
        weight,
        levels=weight.levels - weight.levels % 16 + seeded("lower").integers(0, 16, (96, 49)),
    )
    packed = pack(weight).data
    changed = pack(other).data
    lower = 4 * 3 * 256
    assert (packed[:-lower] == changed[:-lower]).all() and (
        packed[-lower:] != changed[-lower:]
    ).any()
    products = Product([weight]), Product([other])
    for name in names:
        found = [
            own.run(make_session(own.write(tmp_path / "model"), 1, int8, name)) for own in products
        ]
        assert_same(found[1], found[0], name)


def experts(count: int, hidden: int, inner: int, *forms: str) -> list[list[Weight]]:
    """Returns the weights gate, up and down of ``count`` experts in these formats."""
    random = seeded(count, forms)
    sizes = ((hidden, inner), (hidden, inner), (inner, hidden))
    return [
        [
            random_weight(random, form, *size, i % 2 == 1, NARROW, i % 2 == 0)
            for form, size in zip(forms, sizes, strict=True)
        ]
        for i in range(count)
    ]


ANY = np.zeros(0, np.float32)


def choice_bias(count: int) -> Any:
    """Returns biases for the choice of experts. Some of them are equal."""
    return np.rint(seeded("choice").normal(0, 2, count)).astype(np.float32) / 4


@pytest.mark.parametrize(
    "forms, hidden, inner, count, used, normed, norm, residual, gating, int8, choice",
    [
        (("float32",) * 3, 20, 13, 3, 2, True, True, True, 1, True, None),
        (("bfloat16", "bfloat16", "float16"), 33, 49, 17, 3, False, True, False, 2, True, None),
        (("float32",) * 3, 16, 1, 1, 1, True, False, True, 1, True, None),
        (("bits4", "bits4", "bits8"), 64, 96, 5, 5, True, True, True, 1, True, None),
        (("bits4", "bits6", "bits5"), 96, 64, 40, 18, False, True, True, 1, False, None),
        (("bits8", "bits8", "float32"), 64, 20, 4, 1, False, True, True, 2, True, None),
        (("planes", "upper", "upper"), 64, 96, 5, 2, True, True, True, 1, True, None),
        (("float32",) * 3, 20, 13, 7, 3, True, True, True, 3, True, None),
        (("bits5", "bits5", "bits5"), 64, 96, 5, 2, True, True, True, 3, True, None),
        (
            ("float32",) * 3,
            20,
            13,
            7,
            3,
            True,
            True,
            True,
            1,
            True,
            specification.Choice(0, ANY),
        ),
        (
            ("float32",) * 3,
            20,
            13,
            18,
            3,
            False,
            True,
            True,
            1,
            True,
            specification.Choice(1, ANY, scale=2.5),
        ),
        (
            ("float32",) * 3,
            20,
            13,
            40,
            5,
            True,
            True,
            True,
            1,
            True,
            specification.Choice(1, ANY, 4, 2, 2, 1e-2, 2.5),
        ),
        (
            ("float32",) * 3,
            20,
            13,
            6,
            2,
            True,
            True,
            True,
            1,
            True,
            specification.Choice(0, ANY, 6, 3, 1),
        ),
        (
            ("float32",) * 3,
            20,
            13,
            17,
            3,
            False,
            True,
            True,
            1,
            True,
            specification.Choice(2, ANY, margin=0.3),
        ),
    ],
)
def test_mixtures(
    tmp_path: Path,
    names: list[str],
    forms: tuple[str, ...],
    hidden: int,
    inner: int,
    count: int,
    used: int,
    normed: bool,
    norm: bool,
    residual: bool,
    gating: int,
    int8: bool,
    choice: specification.Choice | None,
) -> None:
    weight = seeded("norm").normal(1, 0.3, hidden).astype(np.float32) if norm else None
    own = experts(count, hidden, inner, *forms)
    mixture = Mixture(own, used, normed, weight, residual, gating)
    if gating == 2:  # Gemma 4, whose experts have factors
        factors = seeded("factors").normal(0, 1, count).astype(np.float32)
        mixture = replace(mixture, factors=factors)
    if gating == 3:  # gpt-oss, whose experts have biases
        random = seeded("biases")
        sizes = (2 * inner, hidden)
        inner_bias, bias = (random.normal(0, 2, (count, size)).astype(np.float32) for size in sizes)
        mixture = replace(mixture, biases=(inner_bias, bias))
    if choice is not None:
        bias = ANY if choice.scores == 2 else choice_bias(count)
        mixture = replace(mixture, choice=replace(choice, bias=bias))
    check_mixture(mixture, tmp_path / "model", int8, names)


def test_bad_mixtures_are_refused(tmp_path: Path) -> None:
    own = experts(3, 32, 16, *["float32"] * 3)
    mixture = Mixture(own, 2, residual=True)
    path = tmp_path / "model"
    numbers = [number for expert in own for weight in expert for number in pack(weight).numbers]
    wrong: dict[str, tuple[Any, ...]] = {
        "used": (0, -1, 4, 1 << 40, None),
        "gating": (0, 4),
        "normed": (None,),
        "scores": (-1, 3, None),
        "groups": (0, 2, None),
        "used_groups": (0, 2),
        "group_best": (0, 4),
        "norm_eps": (None,),
        "scale": (None,),
        "margin": (None,),
        "epsilon": (None,),
        "matrices": (None, *(numbers[:-count] for count in (1, 7, 14))),
    }
    for name, values in wrong.items():
        for value in values:
            unloadable(path, "Mixture", mixture.inputs(), **mixture.attributes() | {name: value})
    random = seeded("other")
    for place, size, form in (
        (1, (32, 17), "float32"),
        (4, (31, 16), "float32"),
        (8, (16, 31), "float32"),
    ):
        others = [list(expert) for expert in own]
        others[place // 3][place % 3] = random_weight(random, form, *size, False, NARROW, False)
        odd = Mixture(others, 2)
        unloadable(path, "Mixture", odd.inputs(), "same sizes", **odd.attributes())
    others = [
        own[0],
        [own[1][0], random_weight(random, "float16", 32, 16, False, NARROW, False), own[1][2]],
        own[2],
    ]
    odd = Mixture(others, 2)
    unloadable(path, "Mixture", odd.inputs(), "one kind", **odd.attributes())
    session = make_session(mixture.write(path), 2, True)
    call = {
        "x": mixture.x[:3].copy(),
        "logits": mixture.logits[:3].copy(),
        "residual": mixture.added[:3],
    }
    for change in (
        {"x": mixture.x[:3, :31]},
        {"logits": mixture.logits[:2]},
        {"logits": mixture.logits[:3, :2]},
        {"residual": mixture.added[:2]},
        {"x": np.zeros((), np.float32)},
        {"logits": mixture.logits[:3].astype(np.float64)},
    ):
        refused(session, "width|size|data type", **(call | change))
    assert run(session, **{name: values[:0] for name, values in call.items()}).shape == (0, 32)
    call["x"][1, 3] = np.nan
    call["logits"][1] = np.nan
    found = run(session, **call)
    assert np.isnan(found[1]).all()
    assert_same(found[[0, 2]], mixture.specified(True)[[0, 2]])


def test_no_rows_give_none(tmp_path: Path) -> None:
    product = Product(parts(seeded(), 64, "bits4"))
    assert product.run(make_session(product.write(tmp_path / "model"), 2, True), 0, 0).shape == (
        0,
        49,
    )


KINDS = {NARROW: np.float16, WIDE: np.float32, SPLIT: np.int8}


def random_logits(random: np.random.Generator, rows: int, columns: int) -> specification.Floats:
    """Some are equal."""
    found = random.normal(0, 4, (rows, columns)).astype(np.float32)
    found[:, ::3] = np.rint(found[:, ::3])
    return found


@pytest.mark.parametrize(
    "columns, k", [(1, 1), (16, 16), (63, 8), (64, 3), (200, 8), (1001, 70), (49152, 8)]
)
def test_top_k(tmp_path: Path, names: list[str], columns: int, k: int) -> None:
    random = seeded("top", columns, k)
    logits = random_logits(random, 9, columns)
    logits[3] = 1
    logits[4, columns // 2 + 1 :] = -np.inf
    ids = random.permutation(10 * columns)[:columns]
    expected, logprobs = specification.top_k(logits, k)
    exact = logits.astype(np.float64) - np.logaddexp.reduce(logits.astype(np.float64), 1)[:, None]
    assert np.allclose(np.take_along_axis(exact, expected, 1), logprobs, 1e-6, 2e-5, equal_nan=True)
    for name in names:
        for threads in (1, 2):
            found = top(tmp_path / "model", k, NOTHING, threads, name).run(None, {"logits": logits})
            assert (found[0] == expected).all()
            assert_same(found[1], logprobs, name)
            named = top(tmp_path / "model", k, ids, threads, name)
            for row in range(len(logits)):
                found = named.run(None, {"logits": logits[row : row + 1]})
                assert (found[0] == ids[expected[row]]).all()
                assert_same(found[1], logprobs[row : row + 1], name)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_top_k_of_values_that_are_not_finite(
    tmp_path: Path, names: list[str], value: float
) -> None:
    """The columns equal the columns of the specification, so they are never out of range. If there
    are no infinities, the log-probabilities also equal those of the specification."""
    logits = random_logits(seeded("finite"), 5, 300)
    logits[0] = value
    logits[1, ::2] = value
    logits[2, 17:220] = value
    logits[3, 299] = value
    expected, logprobs = specification.top_k(logits, 8)
    for name in names:
        found = top(tmp_path / "model", 8, kernels=name).run(None, {"logits": logits})
        assert (found[0] == expected).all()
        finite = [1, 2, 3, 4] if value != np.inf else [4]
        assert_same(found[1][finite], logprobs[finite], name)


def test_bad_top_k_is_refused(tmp_path: Path) -> None:
    wrong: list[Any] = [np.arange(9, dtype=np.int32), np.ones(9, np.float32)]
    for k, ids in ((0, NOTHING), (-1, NOTHING), (1 << 40, NOTHING), *((2, ids) for ids in wrong)):
        with pytest.raises(EESDError, match="cannot load"):
            top(tmp_path / "model", k, ids)
    session = top(tmp_path / "model", 4, np.arange(9))
    for shape in ((2, 8), (2, 10), (9,), (1, 2, 9)):
        refused(session, "width|logits are", logits=np.zeros(shape, np.float32))
    refused(session, "data type", logits=np.zeros((2, 9)))
    assert session.run(None, {"logits": np.zeros((0, 9), np.float32)})[0].shape == (0, 4)
    refused(top(tmp_path / "model", 4), "width", logits=np.zeros((1, 3), np.float32))


def factor_of(values: Any) -> tuple[float, list[int]]:
    """Returns the first float16 factor that divides all values, and the integer multiple for each
    value."""
    largest = max(values, key=abs)
    if largest == 0:
        return 0, [0] * len(values)
    for most in (63, -128, 127, 15, *range(126, 0, -1)):
        factor = float(np.float16(largest / most))
        integers = [round(value / factor) for value in values.tolist()]
        if all(
            -128 <= i <= 127 and i * factor == value
            for i, value in zip(integers, values.tolist(), strict=True)
        ):
            return factor, integers
    raise AssertionError


def packed_by_hand(weight: Weight, scales: int) -> bytes:
    """Returns the bytes of a weight's panels, in the order that SPECIFICATION.md defines."""
    inputs, outputs = weight.shape
    found = bytearray()
    lower = bytearray()
    halves = 2 if weight.fine else 1
    shared = [part for part in (weight.scales, weight.minimums) if part is not None]

    def level(k: int, column: int) -> int:
        return int(weight.levels[k, column]) if column < outputs else 0

    for panel in range(-(-outputs // 16)):
        for block in range(inputs // 32):
            for values in shared if scales == SPLIT and block % 8 == 0 else ():
                columns = values[
                    block * halves : (block + 8) * halves, panel * 16 : panel * 16 + 16
                ].T
                factors = np.array([factor_of(column)[0] for column in columns])
                found += np.pad(factors, (0, 16 - len(factors))).astype(np.float16).tobytes()
            every = [
                level(block * 32 + group * 4 + i, panel * 16 + c)
                for group in range(8)
                for c in range(16)
                for i in range(4)
            ]
            if weight.form == "bits8":
                found += bytes(every)
            elif weight.form in PLANES_OF:
                found += bytes(every[j] >> 4 | every[j + 256] >> 4 << 4 for j in range(256))
                lower += bytes(every[j] & 15 | (every[j + 256] & 15) << 4 for j in range(256))
            else:
                found += bytes(every[j] & 15 | (every[j + 256] & 15) << 4 for j in range(256))
            if weight.form == "bits5":
                found += bytes(
                    sum((every[8 * j + i] >> 4) << i for i in range(8)) for j in range(64)
                )
            if weight.form == "bits6":
                found += bytes(
                    sum((every[half * 256 + i * 64 + j] >> 4) << 2 * i for i in range(4))
                    for half in range(2)
                    for j in range(64)
                )
            for values in shared:
                for half in range(halves):
                    row = values[block * halves + half, panel * 16 : panel * 16 + 16]
                    if scales == SPLIT:
                        first = block // 8 * 8 * halves
                        columns = values[first : first + 8 * halves, panel * 16 : panel * 16 + 16].T
                        row = np.array(
                            [
                                factor_of(column)[1][(block % 8) * halves + half]
                                for column in columns
                            ]
                        )
                    found += np.pad(row, (0, 16 - len(row))).astype(KINDS[scales]).tobytes()
    return bytes(found + lower)


@pytest.mark.parametrize("form, fine, kind, minimums", FORMS)
def test_panels_have_the_specified_bytes(form: str, fine: bool, kind: int, minimums: bool) -> None:
    weight = random_weight(
        seeded(form), form, 512 if kind == SPLIT else 64, 37, fine, kind, minimums, signed=False
    )
    packed = pack(weight)
    assert packed.numbers[5] == kind
    assert packed.data.tobytes() == packed_by_hand(weight, kind)


@pytest.mark.parametrize(
    "form, fine, kind, minimums",
    [*FORMS, *((form, False, NARROW, False) for form in ("float32", "float16", "bfloat16"))],
)
def test_embed_gives_the_table(
    tmp_path: Path, form: str, fine: bool, kind: int, minimums: bool
) -> None:
    weight = random_weight(
        seeded(form), form, 512 if kind == SPLIT else 96, 49, fine, kind, minimums
    )
    packed = pack(weight)
    given: list[tuple[str, Any]] = [("ids", TensorProto.INT64), ("table", packed.data)]
    path = one_node(tmp_path / "model", "Embed", given, matrices=packed.numbers)
    for threads in (1, 3):
        session = make_session(path, threads, True)
        for ids in (np.arange(49), np.array([48]), np.array([7, 7, 0])):
            assert_same(run(session, ids=ids), weight.dequantized().T[ids])


BORDERS = (1, 2, 15, 16, 17, 63, 64, 65, 127, 128, 129, 255, 256, 257, 300)
LAYERS = {
    "grouped": Attention(),
    "MQA, 8": Attention(heads=3, kv_heads=1, head_dim=8),
    "MHA, 20": Attention(heads=3, kv_heads=3, head_dim=20),
    "64": Attention(heads=2, kv_heads=1, head_dim=64, norms=True),
    "80": Attention(heads=2, kv_heads=2, head_dim=80),
    "128": Attention(heads=5, kv_heads=1, head_dim=128),
    "512": Attention(heads=2, kv_heads=1, head_dim=512),
    "norms": Attention(head_dim=20, norms=True, layer=0),
    "sinks": Attention(sinks=True),
    "sinks, window": Attention(heads=3, kv_heads=1, sinks=True, window=40),
    "sinks, int8": Attention(head_dim=64, sinks=True, dtype="int8"),
    "norms after the rotation": Attention(head_dim=20, norms=True, norms_last=True),
    "many heads": Attention(heads=36, kv_heads=1, head_dim=2),
    "float16": Attention(heads=6, kv_heads=2, head_dim=64, dtype="float16"),
    "float16, norms, 20": Attention(head_dim=20, norms=True, dtype="float16"),
    "int8": Attention(heads=6, kv_heads=2, head_dim=64, dtype="int8"),
    "int8, norms, 6": Attention(heads=9, kv_heads=1, head_dim=6, norms=True, dtype="int8"),
    "int8, 512": Attention(heads=2, kv_heads=1, head_dim=512, dtype="int8"),
    "int8, first hidden": Attention(head_dim=20, hides_first=True, dtype="int8"),
    "int8, cap, window of 130": Attention(cap=2.0, window=130, dtype="int8"),
    "wider than a cache's heads": Attention(cache_heads=6, cache_dim=8, norms=True),
    "fewer than a cache's heads": Attention(cache_heads=5, layer=0, dtype="int8"),
    "first hidden": Attention(heads=6, kv_heads=2, head_dim=20, hides_first=True),
    "cap, window of 9": Attention(cap=2.0, window=9),
    "unrotated, window of 130": Attention(rotates=False, window=130),
}


@pytest.mark.parametrize("kind", LAYERS)
def test_attention_over_chains(tmp_path: Path, names: list[str], kind: str) -> None:
    layer = LAYERS[kind]
    path = layer.write(tmp_path / "model")
    text = layer.text(300)
    some = [length - 1 for length in BORDERS]
    expected = layer.specified(text, some)
    tolerances = {"float32": 2e-5, "float16": 2e-2, "int8": 6e-2}
    np.testing.assert_allclose(
        expected, layer.in_float64(text, some), rtol=0, atol=tolerances[layer.dtype]
    )
    first = prefill(layer.session(path, 1, names[0]), text, 300)
    assert_same(first[some], expected)
    for name, threads in [*((name, 1) for name in names[1:]), (names[0], 2), (names[0], 3)]:
        session = layer.session(path, threads, name)
        for pieces in ((300,), (64, 1, 7), (17, 33)) if name != "scalar" else ((90, 1, 40),):
            text.cache.array[:] = UNWRITTEN
            assert_same(prefill(session, text, 300, pieces), first, (name, threads, pieces))
    session = layer.session(path, 1, names[0])
    for length in BORDERS:
        assert_same(
            attend(session, chain(text, length - 1, length))[0], first[length - 1 : length], length
        )


@pytest.mark.parametrize("kind", ["grouped", "float16", "int8", "wider than a cache's heads"])
def test_attention_of_queries_alone_reads_what_another_layer_wrote(
    tmp_path: Path, kind: str
) -> None:
    layer = LAYERS[kind]
    text = layer.text(150)
    session = layer.session(layer.write(tmp_path / "model"), 2)
    expected = prefill(session, text, 150)
    before = text.cache.array.copy()
    reading = layer.session(layer.write(tmp_path / "reading", writes=0), 2)
    columns = layer.heads * layer.head_dim
    text.qkv = text.qkv[:, :columns]
    for first in (0, 100, 149):
        assert_same(attend(reading, chain(text, first, 150))[0], expected[first:])
    assert (text.cache.array == before).all()


def random_tree(random: np.random.Generator, context: int, nodes: int) -> list[int]:
    """Returns the parent of each node. The parent of the first node is the last token of the
    context."""
    return [
        context - 1,
        *(int(random.integers(context, context + node)) for node in range(1, nodes)),
    ]


@pytest.mark.parametrize("context", [*BORDERS[:-1], 290])
@pytest.mark.parametrize(
    "kind",
    [
        "grouped",
        "MQA, 8",
        "norms",
        "64",
        "float16",
        "first hidden",
        "cap, window of 9",
        "int8",
        "int8, first hidden",
    ],
)
def test_a_node_of_a_tree_has_the_bits_of_its_path(
    tmp_path: Path, names: list[str], kind: str, context: int
) -> None:
    layer = LAYERS[kind]
    path = layer.write(tmp_path / "model")
    random = np.random.default_rng(context)
    nodes = 24
    text = layer.text(context, random_tree(random, context, nodes))
    session = layer.session(path, 1, names[0])
    prefill(session, text, context)
    found = attend(session, tree(text, context, context + nodes))[0]
    some = [context, context + nodes // 2, context + nodes - 1]
    assert_same(found[[node - context for node in some]], layer.specified(text, some))
    for name, threads in [(names[0], 2), *((name, 1) for name in names[1:])]:
        assert_same(
            attend(layer.session(path, threads, name), tree(text, context, context + nodes))[0],
            found,
            name,
        )
    for node in range(context, context + nodes):  # run as a chain in other slots than the tree
        own = text.paths[node][context:]
        as_chain = layer.text(0)
        as_chain.qkv = np.concatenate([text.qkv[:context], text.qkv[own]])
        as_chain.cache = text.cache
        as_chain.paths = [list(range(i + 1)) for i in range(context + len(own))]
        assert_same(
            attend(session, chain(as_chain, context, context + len(own)))[0][-1],
            found[node - context],
            node,
        )


@pytest.mark.parametrize("kind", ["grouped", "float16", "int8"])
def test_several_sequences_in_a_call(tmp_path: Path, names: list[str], kind: str) -> None:
    layer = LAYERS[kind]
    path = layer.write(tmp_path / "model")
    random = np.random.default_rng(0)
    lengths = (5, 130, 64, 17)
    texts = [layer.text(length, random_tree(random, length, 6)) for length in lengths]
    session = layer.session(path, 1, names[0])
    for text, length in zip(texts, lengths, strict=True):
        prefill(session, text, length)
    alone = [
        attend(session, tree(text, length, length + 6))[0]
        for text, length in zip(texts, lengths, strict=True)
    ]
    alone.append(attend(session, chain(texts[1], 40, 129))[0])
    for name in names:
        for threads in (1, 2, 3):
            shared = layer.session(path, threads, name)
            calls = [
                tree(text, length, length + 6) for text, length in zip(texts, lengths, strict=True)
            ]
            together = attend(shared, *calls, chain(texts[1], 40, 129))
            for one, own in zip(together, alone, strict=True):
                assert_same(one, own, (name, threads))


def test_a_layer_without_queries_only_writes(tmp_path: Path, names: list[str]) -> None:
    layer = LAYERS["norms"]
    text = layer.text(40)
    prefill(layer.session(layer.write(tmp_path / "all"), 1), text, 40)
    written = text.cache.array.copy()
    path = layer.write(tmp_path / "model", heads=0)
    for name in names:
        text.cache.array[:] = UNWRITTEN
        qkv, tokens, _ = chain(text, 0, 40)
        given = qkv[:, layer.heads * layer.head_dim :].copy()
        y = run(
            layer.session(path, 2, name),
            qkv=given,
            tokens=tokens,
            paths=np.zeros((40, 0), np.int32),
        )
        assert y.shape == (40, 0)
        _, keys, values = layer.spec.split(text.qkv)
        for slot in range(40):
            expected = layer.spec.turned(keys[slot], slot, layer.spec.k_norm)
            assert_same(text.cache.keys[layer.layer, :, slot // 16, :20, slot % 16], expected)
            assert_same(text.cache.values[layer.layer, :, slot, :20], values[slot])
        assert_same(
            text.cache.keys[0, :, :2, :20], written.reshape(2, 2, 2, 24, 32, 16)[0, 0, :, :2, :20]
        )
        assert (text.cache.keys[1] == np.float32(UNWRITTEN)).all(), "another layer was written"


def test_caches_of_float16_hold_the_nearest_numbers(tmp_path: Path, names: list[str]) -> None:
    check_float16(tmp_path / "model", names)


def test_of_no_tokens_attention_gives_none(tmp_path: Path) -> None:
    layer = LAYERS["grouped"]
    session = layer.session(layer.write(tmp_path / "model"), 2)
    tokens = np.zeros((0, 5), np.int64)
    paths = np.zeros((0, 3), np.int32)
    assert run(session, qkv=np.zeros((0, 128), np.float32), tokens=tokens, paths=paths).shape == (
        0,
        64,
    )


def refused(session: Any, message: str, **given: Any) -> None:
    with pytest.raises(Exception, match=message) as caught:
        session.run(None, given)
    assert "onnxruntime" in type(caught.value).__module__


def test_bad_calls_of_attention_are_refused(tmp_path: Path) -> None:
    layer = LAYERS["grouped"]
    session = layer.session(layer.write(tmp_path / "model"), 2)
    text = layer.text(3)
    address = text.cache.address
    qkv = text.qkv[:1]
    paths = np.zeros((1, 4), np.int32)
    tokens = np.array([[address, 2, 2, 1, 2]], np.int64)
    for column, values, message in (
        (0, (0, address + 4, address + 32), "aligned"),
        (1, (-1, layer.slots, 1 << 62, -(1 << 63)), "position"),
        (2, (-1, layer.slots, 1 << 40), "slot"),
        (3, (-1, layer.slots + 1, 1 << 62), "context"),
        (4, (-1, 5, 1 << 62), "path"),
    ):
        for value in values:
            bad = tokens.copy()
            bad[0, column] = value
            refused(session, message, qkv=qkv, tokens=bad, paths=paths)
    nothing_seen = np.array([[address, 2, 2, 0, 0]], np.int64)
    refused(session, "path", qkv=qkv, tokens=nothing_seen, paths=paths)
    for slot in (-1, layer.slots, 1 << 30):
        refused(
            session, "slot", qkv=qkv, tokens=tokens, paths=np.array([[0, slot, 0, 0]], np.int32)
        )
    shapes: list[tuple[str, dict[str, Any]]] = [
        ("tokens", {"tokens": tokens[:, :4]}),
        ("tokens", {"tokens": tokens[0]}),
        ("data type", {"tokens": tokens.astype(np.int32)}),
        ("data type", {"paths": paths.astype(np.int64)}),
        ("paths", {"paths": paths[0]}),
        ("paths", {"paths": np.zeros((2, 4), np.int32)}),
        ("qkv", {"qkv": qkv[:, :-1]}),
        ("qkv", {"qkv": text.qkv[:2]}),
        ("data type", {"qkv": qkv.astype(np.float64)}),
        ("qkv", {"qkv": np.zeros(0, np.float32)}),
    ]
    for message, change in shapes:
        refused(session, message, **({"qkv": qkv, "tokens": tokens, "paths": paths} | change))
    assert (text.cache.array[text.cache.array != 0] == np.float32(UNWRITTEN)).all(), (
        "a refused call wrote"
    )


def unloadable(
    path: Path,
    kind: str,
    inputs: Sequence[tuple[str, Any]],
    message: str = "cannot load",
    **attributes: Any,
) -> None:
    """Check that loading a model with a single node fails. Attributes that are None are left
    out."""
    one_node(
        path,
        kind,
        inputs,
        **{name: value for name, value in attributes.items() if value is not None},
    )
    with pytest.raises(EESDError, match=message):
        make_session(path, 1, True)


def test_attention_that_cannot_be_is_refused(tmp_path: Path) -> None:
    layer = LAYERS["grouped"]
    path = tmp_path / "model"
    inputs = layer.inputs()
    attributes = layer.attributes()
    wrong: dict[str, tuple[Any, ...]] = {
        "heads": (-1, 3, 1 << 40, 2.5, None),
        "kv_heads": (0, -2),
        "head_dim": (0, 15, 514, 1 << 40),
        "slots": (0, 20, 1 << 60, [384]),
        "cache_heads": (0, 1, 1 << 40),
        "cache_dim": (0, 514, 1 << 40),
        "writes": (None,),
        "layer": (-1, 1 << 60),
        "scale": (1,),
        "epsilon": (None,),
        "cap": (-1.0,),
        "window": (-1, 1 << 40),
    }
    for name, values in wrong.items():
        for value in values:
            unloadable(path, "Attention", inputs, **attributes | {name: value})
    constants: dict[int, tuple[Any, ...]] = {
        3: (np.zeros((384, 7), np.float32), NOTHING, TensorProto.FLOAT),
        4: (np.zeros((384, 8), np.float64),),
        5: (np.ones(15, np.float32),),
        6: (np.ones(16, np.float64), TensorProto.FLOAT),
    }
    for index, values in constants.items():
        for value in values:
            changed = (inputs[index][0], value)
            unloadable(
                path, "Attention", [*inputs[:index], changed, *inputs[index + 1 :]], **attributes
            )
    for count in range(1, 7):
        unloadable(path, "Attention", inputs[:count], **attributes)


def test_products_that_cannot_be_are_refused(tmp_path: Path) -> None:
    """In these cases inputs are missing, gate and up do not match, or two planes have finer scales
    or minimums."""
    path = tmp_path / "model"
    random = seeded("gate")
    product = Product(parts(seeded(), 64, "bits4"))
    for count in range(1, 5):
        unloadable(path, "Product", product.inputs()[:count], **product.attributes())
    for forms, sizes in (
        (("bits4", "float32"), (16, 16)),
        (("float16", "float32"), (16, 16)),
        (("bits4", "bits4"), (16, 17)),
        (("bits4",), (16,)),
        (("bits4", "bits4", "bits4"), (16, 16, 16)),
    ):
        own = [
            random_weight(random, form, 64, size, False, NARROW, False)
            for form, size in zip(forms, sizes, strict=True)
        ]
        gated = Product(own)
        unloadable(
            path, "Product", gated.inputs(), "gate and up", **gated.attributes() | {"gating": 1}
        )
    for fine, minimums in ((True, False), (False, True)):
        planes = Product([random_weight(seeded(), "bits8", 64, 16, fine, NARROW, minimums)])
        for form in (PLANES, UPPER):
            numbers = (form, *planes.attributes()["matrices"][1:])
            unloadable(
                path,
                "Product",
                planes.inputs(),
                "two planes",
                **planes.attributes() | {"matrices": numbers},
            )


def test_bad_calls_of_products_are_refused(tmp_path: Path) -> None:
    product = Product(parts(seeded(), 64, "bits4"), residual=True)
    session = make_session(product.write(tmp_path / "model"), 2, True)
    x = product.x[:3]
    residual = product.added[:3]
    for change in (
        {"x": x[:, :32]},
        {"x": x.astype(np.float64)},
        {"x": np.zeros((), np.float32)},
        {"x": np.zeros((3, 0), np.float32)},
        {"residual": residual[:2]},
        {"residual": residual.astype(np.float16)},
        {"x": np.zeros((64, 3), np.float32)},
    ):
        refused(session, "width|size|data type", **({"x": x, "residual": residual} | change))
    assert_same(run(session, x=x, residual=residual), product.specified(True)[:3])


def test_bad_ids_are_refused(tmp_path: Path) -> None:
    packed = pack(random_weight(seeded(), "bits4", 64, 49, False, NARROW, False))
    given: list[tuple[str, Any]] = [("ids", TensorProto.INT64), ("table", packed.data)]
    session = make_session(
        one_node(tmp_path / "model", "Embed", given, matrices=packed.numbers), 2, True
    )
    for ids in ([49], [-1], [0, 1, 1 << 40], [-(1 << 63)]):
        refused(session, "vocabulary", ids=np.array(ids, np.int64))
    refused(session, "data type", ids=np.array([3], np.int32))
    assert run(session, ids=np.zeros(0, np.int64)).shape == (0, 64)


def test_weights_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    """Numbers in a packed weight are changed at random. If the result is accepted, the weight has
    the size that the numbers give."""
    random = np.random.default_rng(5)
    product = Product(parts(seeded(), 64, "bits4"))
    packed = pack(product.parts[0])
    others = product.inputs()[:-1]
    taken = 0
    for attempt in range(300):
        numbers = list(packed.numbers) * int(random.choice([1, 1, 1, 2]))
        for _ in range(int(random.integers(1, 3))):
            change = [-1, 0, 1, 2, 7, 31, 33, 63, 65, 256, 1 << 28, 1 << 31, 1 << 62, -(1 << 63)]
            numbers[int(random.integers(len(numbers)))] = change[int(random.integers(len(change)))]
        if attempt % 10 == 0:
            numbers = numbers[: int(random.integers(1, 8))]
        data = packed.data[
            : int(random.choice([len(packed.data)] * 3 + [0, 1, len(packed.data) - 1]))
        ]
        inputs = [*others, ("w", data)]
        one_node(
            tmp_path / "model",
            "Product",
            inputs,
            epsilon=1.0,
            gating=int(attempt % 4 == 0),
            matrices=numbers,
        )
        try:
            session = make_session(tmp_path / "model", 1, True)
        except EESDError:
            continue
        taken += 1
        assert product.run(session).shape == (MOST, numbers[2])
    assert 0 < taken < 100


def test_blocks_of_tiny_values_have_equal_bits(tmp_path: Path, names: list[str]) -> None:
    """127 divided by the largest value is infinite here."""
    product = Product(parts(seeded("tiny"), 64, "bits4"))
    for row, size in enumerate((1e-29, 1e-30, 1e-31, 1e-36, 1e-37, 1e-40, 1.5e-45, 0)):
        product.x[row] = np.sign(product.x[row]) * np.float32(size)
    check_product(product, tmp_path / "model", True, names, (1,))


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize(
    "form, fine, minimums",
    [("bits4", False, True), ("bits6", True, False), ("bits8", False, False)],
)
def test_a_row_that_is_not_finite_gives_nan(
    tmp_path: Path, names: list[str], form: str, fine: bool, minimums: bool, value: float
) -> None:
    """A row gives NaN wherever its non-finite value is. Other rows keep their bits."""
    product = Product([random_weight(seeded(form), form, 96, 49, fine, NARROW, minimums)])
    expected = product.specified(True)
    spoilt = range(0, MOST, 3)
    for row in spoilt:
        product.x[row, row % 96] = value
        expected[row] = np.nan
    path = product.write(tmp_path / "model")
    for name in names:
        session = make_session(path, 2, True, name)
        for rows in (1, 4, 9, MOST):
            found = product.run(session, 0, rows)
            assert np.isnan(found[: spoilt.stop : 3]).all(), name
            np.testing.assert_array_equal(found, expected[:rows], name)


def test_two_sessions_at_once(tmp_path: Path) -> None:
    random = seeded("two")
    products = [
        Product(parts(random, 96, form, "bits6"), residual=True, seed=i)
        for i, form in enumerate(("bits4", "bits8"))
    ]
    layer = LAYERS["grouped"]
    attention = layer.session(layer.write(tmp_path / "attention"), 2)
    text = layer.text(200)
    attended = prefill(attention, text, 200)
    wrong: list[str] = []

    def repeat(number: int) -> None:
        product = products[number]
        session = make_session(product.write(tmp_path / f"model{number}"), 2, True)
        expected = product.specified(True)
        own = layer.text(0)
        own.qkv = text.qkv
        own.paths = text.paths
        for _ in range(50):
            try:
                assert_same(product.run(session), expected)
                assert_same(prefill(attention, own, 200, (120, 80)), attended)
            except Exception as error:
                wrong.append(str(error))

    threads = [Thread(target=repeat, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong, wrong[0]


def test_kernels_are_chosen_by_name(names: list[str]) -> None:
    assert operators.fastest() == names[0] and names[-1] == "scalar"
    with pytest.raises(EESDError, match="does not support the kernels 'sse'"):
        operators.configure("sse", 1, True)


def test_the_specification_rounds_once() -> None:
    """The function ``fma`` of the specification gives the results of exact fractions."""
    from fractions import Fraction

    random = np.random.default_rng(0)
    a, b = random.normal(0, 1, (2, 4000)).astype(np.float32)
    near = (-(a * b)).astype(np.float32)
    c = np.where(random.random(4000) < 0.5, near, random.normal(0, 1e-4, 4000) ** 3).astype(
        np.float32
    )
    found = specification.fma(a, b, c)
    for x, y, z, one in zip(a.tolist(), b.tolist(), c.tolist(), found.tolist(), strict=True):
        exact = Fraction(x) * Fraction(y) + Fraction(z)
        error = abs(Fraction(one) - exact)
        for other in (
            np.nextafter(np.float32(one), np.float32(np.inf)),
            np.nextafter(np.float32(one), np.float32(-np.inf)),
        ):
            assert error <= abs(Fraction(float(other)) - exact)
