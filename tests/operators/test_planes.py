"""Tests of a draft that is the whole model. It reads only the upper half of each 8-bit weight. The
verify graph reads both halves, and gives its usual bits."""

import shutil
from collections.abc import Callable
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from numpy.typing import NDArray
from onnx import TensorProto
from safetensors.torch import load_file, save_file
from support import gguf_files
from support.command import export_engine, slow_but
from support.on_cache import OnCache
from support.operators import assert_same
from support.tiny_checkpoints import FAMILIES, build

import eesd
from eesd.common.manifest import load_manifest
from eesd.common.quantization import is_linear
from eesd.export.cpu import build as cpu_build
from eesd.export.cpu.build import build_for_cpu
from eesd.export.cpu.panels import BITS4, BITS8, PLANES, UPPER
from eesd.model.quantize import quantize
from eesd.runtime.engines import operators
from eesd.runtime.engines.cpu_build import WEIGHTS
from eesd.runtime.engines.cpu_engine import CpuEngine

pytestmark = pytest.mark.skipif(operators._library() is None, reason="the operators are not built")

INT8 = ("--dtype", "float32", "--quantize", "int8")
WHOLE = ("--exit-head", "quantized")
LAYER = ("--exit-layer", 1)
KINDS: dict[str, tuple[Any, ...]] = {
    "int8": ("llama-bias", *INT8),
    "int8, tied": ("qwen3", *INT8),
    "Q8_0, tied": (gguf_files.Spec("llama", matrices="Q8_0", table="Q8_0", tied=True),),
    "Q8_0, experts": (gguf_files.Spec("llama", matrices="Q8_0", table="Q8_0", experts="together"),),
}
TOKENS = np.random.default_rng(0).integers(3, 97, 64).tolist()
Directory = Callable[..., Path]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Directory:
    """Returns a function that gives the engines of a kind, exported with additional options. Tests
    must not change them."""

    @cache
    def model(kind: str) -> Path:
        of = KINDS[kind][0]
        base = tmp_path_factory.mktemp("model")
        return (
            build(FAMILIES[of], base)
            if isinstance(of, str)
            else gguf_files.write(base / "model.gguf", of)
        )

    @cache
    def exported(kind: str, *options: object) -> Path:
        own = KINDS[kind][1:]
        return export_engine(
            model(kind),
            tmp_path_factory.mktemp("plans") / "plans",
            "--max-seq-len",
            128,
            *own,
            *options,
        )

    return exported


def on_cache(directory: Path, draft: bool = False, int8: bool = True, kernels: str = "") -> OnCache:
    manifest = load_manifest(directory)
    stages = [manifest.draft] if draft else manifest.verify
    engine = CpuEngine(build_for_cpu(directory, manifest), manifest, stages, 1, int8, kernels)
    cache = engine.new_kv_caches()[0]
    cache.reserve(len(TOKENS))
    return OnCache(engine, cache)


def logits(
    directory: Path, counts: tuple[int, ...], *of: Any, **options: Any
) -> NDArray[np.float32]:
    """Returns the logits of the tokens. They are computed in calls of ``counts`` tokens."""
    engine = on_cache(directory, *of, **options)
    found = []
    at = 0
    for count in counts:
        found.append(
            engine.forward(TOKENS[at : at + count], range(at, at + count), at).logits.copy()
        )
        at += count
    return np.concatenate(found)


@pytest.mark.parametrize(
    ("kind", "int8"),
    slow_but(
        [*product(KINDS, (True, False))],
        ("int8", False),
        ("int8, tied", True),
        ("Q8_0, experts", True),
    ),
)
def test_verify_has_the_bits_of_another_draft(directory: Directory, kind: str, int8: bool) -> None:
    expected = logits(directory(kind, *LAYER), (1, 2, 5, 33), int8=int8)
    for name in operators.supported():
        for counts in ((1, 2, 5, 33), (41,)):
            assert_same(
                logits(directory(kind, *WHOLE), counts, int8=int8, kernels=name),
                expected,
                (name, counts),
            )


def formats(directory: Path, graph: str) -> dict[str, set[tuple[int, int]]]:
    """Returns, for each operator, the formats and the offsets of the levels that it reads."""
    place = build_for_cpu(directory, load_manifest(directory))
    model = onnx.load(str(place / graph), load_external_data=False)
    offsets = {
        tensor.name: int(entry.value)
        for tensor in model.graph.initializer
        if tensor.data_location == TensorProto.EXTERNAL
        for entry in tensor.external_data
        if entry.key == "offset"
    }
    found: dict[str, set[tuple[int, int]]] = {}
    for node in model.graph.node:
        numbers = next((list(own.ints) for own in node.attribute if own.name == "matrices"), [])
        weights = [name for name in node.input if name in offsets]
        pairs = zip(numbers[::7], (offsets[name] for name in weights), strict=True)
        found.setdefault(node.op_type, set()).update(
            (form, at) for form, at in pairs if form >= BITS4
        )
    return found


@pytest.mark.parametrize("kind", ["int8", "Q8_0, tied", "Q8_0, experts"])
def test_the_draft_reads_the_upper_plane_of_the_bytes_of_verify(
    directory: Directory, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plans = directory(kind, *WHOLE)
    draft = formats(plans, "draft.onnx")
    verify = formats(plans, "verify.onnx")
    for name in ("Product", "Mixture"):
        assert {form for form, _ in draft.get(name, [(UPPER, 0)])} == {UPPER}
        assert {(PLANES, at) for _, at in draft.get(name, [])} == verify.get(name, set())
    assert draft["Embed"] == verify["Embed"]
    assert {form for form, _ in draft["Embed"]} == {
        "int8": set(),
        "Q8_0, tied": {PLANES},
        "Q8_0, experts": {BITS8},
    }[kind]
    size = (build_for_cpu(plans, load_manifest(plans)) / WEIGHTS).stat().st_size
    monkeypatch.setattr(cpu_build, "halved_weights", lambda manifest: set())
    whole = shutil.copytree(plans, tmp_path / "plans", ignore=shutil.ignore_patterns("cpu-*"))
    assert {form for form, _ in formats(whole, "draft.onnx")["Product"]} == {BITS8}
    assert (build_for_cpu(whole, load_manifest(whole)) / WEIGHTS).stat().st_size == size


@pytest.mark.parametrize(
    "options", [LAYER, (*WHOLE, "--quantize-draft", "int4")], ids=["a layer", "int4"]
)
def test_other_drafts_leave_the_weights_in_one_piece(
    directory: Directory, options: tuple[object, ...]
) -> None:
    plans = directory("int8", *options)
    for graph in ("draft.onnx", "verify.onnx"):
        assert not {form for found in formats(plans, graph).values() for form, _ in found} & {
            PLANES,
            UPPER,
        }


def upper_values(weight: torch.Tensor) -> torch.Tensor:
    """Returns a linear weight [out, in] that is computed from the upper halves of its levels."""
    quantized = quantize(weight.numpy(), "int8", "float32")
    levels = (
        quantized.levels.view(np.int8).reshape(len(quantized.scales), 32, -1).astype(np.float32)
        + 128
    )
    values = (16 * (levels // 16) + 7.5 - 128) * quantized.scales[:, None]
    return torch.from_numpy(values.reshape(weight.shape[::-1]).T.copy())


def test_drafts_are_those_of_the_upper_halves(directory: Directory, tmp_path: Path) -> None:
    """The draft's logits equal the logits of a model whose weights are the upper halves."""
    model = build(FAMILIES["llama-bias"], tmp_path / "model")
    tensors = load_file(model / "model.safetensors")
    halved = {
        name: upper_values(tensor) if is_linear(name) else tensor
        for name, tensor in tensors.items()
    }
    save_file(halved, model / "model.safetensors", {"format": "pt"})
    reference = export_engine(model, tmp_path / "plans", "--max-seq-len", 128, *LAYER)
    expected = logits(reference, (40,))
    plans = directory("int8", *WHOLE)
    found, rounded = (logits(plans, (1, 39), draft=True, int8=int8) for int8 in (False, True))
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5 * np.abs(expected).max())
    assert (found.argmax(-1) == expected.argmax(-1)).all()
    assert np.linalg.norm(rounded - expected) < 0.1 * np.linalg.norm(expected)
    whole = logits(plans, (40,), int8=False)
    assert np.abs(whole - expected).max() > 1e-3 * np.abs(expected).max(), (
        "the upper halves say as much as all bits"
    )


@pytest.mark.parametrize("kind", KINDS)
def test_tokens_are_those_of_plain_decoding(directory: Directory, kind: str) -> None:
    plans = directory(kind, *WHOLE)
    options: dict[str, Any] = {"max_new_tokens": 40, "ignore_eos": True}
    plain = eesd.load(plans, threads=1, speculation=None).generate(TOKENS[:7], **options)
    assert eesd.load(plans, threads=1).generate(TOKENS[:7], **options).tokens == plain.tokens
