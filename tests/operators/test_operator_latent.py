"""Tests of the operators of latent attention. They give the bits of ordinary attention and
products, and they refuse bad inputs."""

from pathlib import Path

import numpy as np
import pytest
from onnx import TensorProto
from support.latent_layer import RANK, WIDTH, check_by_heads, check_latent
from support.operators import Attention, Input, one_node, pack, random_weight

from eesd.common.errors import EESDError
from eesd.export.cpu.panels import NARROW
from eesd.runtime.engines import operators
from eesd.runtime.engines.operators import make_session

pytestmark = pytest.mark.skipif(operators._library() is None, reason="the operators are not built")


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_rows_have_the_bits_of_keys_and_values(tmp_path: Path, dtype: str) -> None:
    check_latent(tmp_path / "model", operators.supported(), dtype)


def test_heads_have_the_bits_of_separate_products(tmp_path: Path) -> None:
    check_by_heads(tmp_path / "model", operators.supported())


def test_sizes_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    layer = Attention(3, 1, WIDTH, rotates=False)
    sized = layer.attributes() | {"rank": RANK, "cache_dim": 14}
    for changed in ({"rank": WIDTH}, {"rank": -1}, {"rank": 21}, {"head_dim": 578}):
        path = one_node(tmp_path / "model", "Attention", layer.inputs(), **sized | changed)
        with pytest.raises(EESDError):
            make_session(path, 1, True)
    random = np.random.default_rng(0)
    parts = [random_weight(random, "float32", size, 20, False, NARROW, False) for size in (32, 64)]
    inputs: list[Input] = [("x", TensorProto.FLOAT)]
    inputs += [(f"w{index}", pack(part).data) for index, part in enumerate(parts)]
    numbers = [number for part in parts for number in pack(part).numbers]
    path = one_node(tmp_path / "model", "ByHeads", inputs, matrices=numbers)
    with pytest.raises(EESDError, match="weights of heads"):
        make_session(path, 1, True)
