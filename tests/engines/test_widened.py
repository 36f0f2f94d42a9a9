"""Tests of 16-bit engine directories on the CPU. This project's operators read the 16-bit weights
directly, and the results equal those of a float32 directory. The checks widen the weights in
memory, because ONNX Runtime's own operators need this."""

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from support.command import assert_refused, export_engine, run, succeed
from support.engine_dirs import Damage, garble, logits_of, record, reference_logits
from support.without_operators import needs_operators, without_operators

import eesd
from eesd.common.errors import EESDError
from eesd.common.manifest import WEIGHTS_FILE, load_manifest
from eesd.export.parity import compare_engines
from eesd.export.widened import reference
from eesd.runtime.cli import main
from eesd.runtime.engines import operators
from eesd.runtime.engines.backends import EngineOptions, open_engines
from eesd.runtime.engines.cpu_engine import CpuEngine
from eesd.runtime.engines.device_engine import DeviceEngine

CHECKPOINTS = {"bfloat16": "llama3", "float16": "llama2"}
"""The model family for each element type of a checkpoint."""


@pytest.fixture(scope="module")
def narrow(text_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bfloat16 engine directory with a tokenizer."""
    return export_engine(
        text_model, tmp_path_factory.mktemp("narrow") / "plans", "--dtype", "bfloat16"
    )


@pytest.fixture
def standard() -> Iterator[None]:
    """Run a test as if the operators were not built."""
    with without_operators():
        yield


@pytest.mark.parametrize(
    "options", [(), ("--stages", 2), ("--link-weights",)], ids=["copied", "stages", "linked"]
)
@pytest.mark.parametrize("dtype", CHECKPOINTS)
def test_bits_are_those_of_the_float32_directory(
    family_dir: Callable[[str], Path], tmp_path: Path, dtype: str, options: tuple[object, ...]
) -> None:
    model = family_dir(CHECKPOINTS[dtype])
    narrow = export_engine(model, tmp_path / "narrow", "--dtype", dtype, *options)
    wide = export_engine(model, tmp_path / "wide", "--dtype", "float32", "--quantize-draft", "none")
    assert load_manifest(narrow).dtype == dtype
    if not operators.missing():
        for found, expected in zip(logits_of(narrow, "ort"), logits_of(wide, "ort"), strict=True):
            assert np.array_equal(found, expected)
    found, expected = (reference_logits(directory) for directory in (narrow, wide))
    assert np.array_equal(found, expected)


@needs_operators()
@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_quantized_directory_agrees_with_its_graphs(
    family_dir: Callable[[str], Path], tmp_path: Path, kind: str
) -> None:
    """int8 weights of 16-bit engines have one scale per output, so int8 activations differ slightly
    more."""
    options = ("--dtype", "bfloat16", "--quantize", kind, "--no-check")
    directory = export_engine(family_dir("llama3"), tmp_path / "plans", *options)
    manifest = load_manifest(directory)
    engines = open_engines(directory, manifest, EngineOptions("ort", 1, True))
    assert min(compare_engines(engines, directory, manifest).values()) > 0.997


@needs_operators()
def test_operators_read_16_bits_as_they_are(narrow: Path) -> None:
    engines = eesd.load(narrow, threads=1).engines
    assert (
        isinstance(engines.verify, CpuEngine)
        and isinstance(engines.draft, CpuEngine)
        and not engines.notice
    )


@pytest.mark.usefixtures("standard")
def test_without_operators_torch_runs_16_bits_and_onnx_runtime_refuses_them(
    narrow: Path, caplog: pytest.LogCaptureFixture
) -> None:
    succeed(main, "--engine-dir", narrow, "-p", "hello", "-n", 4, "--no-stats")
    assert len(caplog.records) == 1 and "torch runs the bfloat16 engines, slowly" in caplog.text
    assert isinstance(eesd.load(narrow, threads=1).engines.verify, DeviceEngine)
    refused = run(main, "--engine-dir", narrow, "-p", "hello", "--backend", "ort")
    assert_refused(refused, "run float32 engines on the CPU", "--dtype float32", "backend torch")


def cut_weights(directory: Path) -> None:
    path = directory / WEIGHTS_FILE
    path.write_bytes(path.read_bytes()[:5000])
    record(directory, "weights.bin")


@pytest.mark.parametrize(
    ("damage", "words"), [(garble, "onnx cannot read"), (cut_weights, "do not fit each other")]
)
def test_damaged_directory_is_refused(
    text_model: Path, tmp_path: Path, damage: Damage, words: str
) -> None:
    directory = export_engine(text_model, tmp_path / "plans", "--dtype", "bfloat16")
    damage(directory)
    manifest = load_manifest(directory)
    with pytest.raises(EESDError, match=words):
        reference(directory, manifest, manifest.verify, 1)
