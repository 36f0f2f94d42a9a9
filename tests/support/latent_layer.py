"""Checks that the operators of latent attention give the same bits as the operators of ordinary
attention and products."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from onnx import TensorProto

from eesd.export.cpu.panels import NARROW
from eesd.runtime.engines import operators
from support.operators import (
    Attention,
    Cache,
    Input,
    Product,
    assert_same,
    attend,
    one_node,
    pack,
    prefill,
    random_weight,
    run,
    tree,
)

HEADS = 3
RANK = 20
ROTARY = 6
WIDTH = RANK + ROTARY


def check_latent(path: Path, names: Sequence[str], dtype: str = "float32") -> None:
    """Check that a text and a tree give the bits of ordinary attention with one KV head. In the
    ordinary attention, the queries and keys were rotated before, and the keys are also the
    values."""
    layer = Attention(HEADS, 1, WIDTH, rotates=False, dtype=dtype)
    random = layer.random
    text = layer.text(150, [149, 150, 150, 151, 151, 152])
    count = len(text.paths)
    sizes = np.cumsum([HEADS * RANK, HEADS * ROTARY, RANK])
    given = random.normal(0, 1.2, (count, (HEADS + 1) * WIDTH)).astype(np.float32)
    queries, turned, row, key = np.split(given, sizes, 1)
    still = np.concatenate([queries, row], 1).reshape(count, HEADS + 1, RANK)
    turned = np.concatenate([turned, key], 1).reshape(count, HEADS + 1, ROTARY)
    angles = random.uniform(0, 6.3, (layer.slots, ROTARY // 2))
    cos, sin = (function(angles).astype(np.float32) for function in (np.cos, np.sin))
    spec = replace(layer.spec, head_dim=ROTARY, cos=cos, sin=sin, rotates=True)
    rotated = [
        spec.turned(one, len(at) - 1, None) for one, at in zip(turned, text.paths, strict=True)
    ]
    heads = np.concatenate([still, np.stack(rotated)], 2)
    text.qkv = np.concatenate([heads, heads[:, HEADS:]], 1).reshape(count, -1)
    rows = replace(text, qkv=given, cache=Cache(2, 1, layer.slots, WIDTH // 4 * 2 + 2, dtype))
    inputs = [*layer.inputs()[:3], ("cos", cos), ("sin", sin), *layer.inputs()[5:]]
    ordinary = layer.session(layer.write(path), 1, "scalar")
    expected = [prefill(ordinary, text, 150), attend(ordinary, tree(text, 150, count, 170))[0]]
    expected = [one.reshape(-1, HEADS, WIDTH)[..., :RANK].reshape(len(one), -1) for one in expected]
    sized = layer.attributes() | {"rank": RANK, "cache_dim": WIDTH // 4 * 2 + 2}
    one_node(path, "Attention", inputs, **sized)
    for name in names:
        for threads, pieces in ((1, (150,)), (2, (60, 1, 20))):
            session = layer.session(path, threads, name)
            assert_same(prefill(session, rows, 150, pieces), expected[0], name)
            assert_same(attend(session, tree(rows, 150, count, 170))[0], expected[1], name)


def check_by_heads(path: Path, names: Sequence[str]) -> None:
    """Check that a product for each head gives the bits of separate products, for any number of
    rows."""
    random = np.random.default_rng(0)
    for form in ("float32", "bits4"):
        parts = [random_weight(random, form, 32, 20, False, NARROW, False) for _ in range(HEADS)]
        single = [Product([part], seed=head) for head, part in enumerate(parts)]
        expected = []
        for product in single:
            session = operators.make_session(product.write(path), 1, True, "scalar")
            expected.append(product.run(session))
        inputs: list[Input] = [("x", TensorProto.FLOAT)]
        inputs += [(f"w{index}", pack(part).data) for index, part in enumerate(parts)]
        numbers = [number for part in parts for number in pack(part).numbers]
        one_node(path, "ByHeads", inputs, matrices=numbers)
        x = np.concatenate([product.x for product in single], 1)
        whole = np.concatenate(expected, 1)
        for name in names:
            session = operators.make_session(path, 2, True, name)
            for rows in (1, 5, len(x)):
                assert_same(run(session, x=x[:rows]), whole[:rows], name)
