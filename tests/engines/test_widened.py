"""16-bit engine directories and ONNX Runtime's own operators: widened to float32, they compute what a float32 directory does.

This project's operators read 16 bits, and compute the same.
"""

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest
from support.command import assert_refused, export_engine, run, succeed
from support.engine_dirs import Damage, edit_manifest, garble, logits_of
from support.without_operators import needs_operators, without_operators

import eesd
from eesd.common.manifest import WEIGHTS_FILE
from eesd.common.manifest_reader import load_manifest
from eesd.export.parity import compare_engines
from eesd.runtime.cli import main
from eesd.runtime.engines import backends
from eesd.runtime.engines.backends import open_engines
from eesd.runtime.engines.cpu_engine import CpuEngine
from eesd.runtime.engines.device_engine import DeviceEngine
from eesd.runtime.engines.ort_cpu import OrtEngine
from eesd.runtime.llm import Speculation

CHECKPOINTS = {"bfloat16": "llama3", "float16": "llama2"}
"""A model family by the element type of its checkpoint."""


@pytest.fixture(scope="module")
def narrow(text_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bfloat16 engine directory with a tokenizer."""
    return export_engine(text_model, tmp_path_factory.mktemp("narrow") / "plans", "--dtype", "bfloat16")


@pytest.fixture
def standard() -> Iterator[None]:
    """As if the operators were not built."""
    with without_operators():
        yield


@pytest.mark.parametrize("options", [(), ("--stages", 2), ("--link-weights",)], ids=["copied", "stages", "linked"])
@pytest.mark.parametrize("dtype", CHECKPOINTS)
def test_bits_are_those_of_the_float32_directory(
    family_dir: Callable[[str], Path], tmp_path: Path, dtype: str, options: tuple[object, ...]
) -> None:
    model = family_dir(CHECKPOINTS[dtype])
    narrow = export_engine(model, tmp_path / "narrow", "--dtype", dtype, *options)
    wide = export_engine(model, tmp_path / "wide", "--dtype", "float32", "--quantize-draft", "none")
    assert load_manifest(narrow).dtype == dtype
    for kernels in (nullcontext, without_operators):
        with kernels():
            for found, expected in zip(logits_of(narrow, "ort"), logits_of(wide, "ort"), strict=True):
                assert np.array_equal(found, expected)


@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_quantized_directory_agrees_with_its_graphs(family_dir: Callable[[str], Path], tmp_path: Path, kind: str) -> None:
    """int8 weights of 16-bit engines have one scale for an output, so activations in int8 differ a bit more."""
    options = ("--dtype", "bfloat16", "--quantize", kind, "--no-check")
    directory = export_engine(family_dir("llama3"), tmp_path / "plans", *options)
    manifest = load_manifest(directory)
    assert min(compare_engines(open_engines(directory, manifest, "ort", 1, True), directory, manifest).values()) > 0.997


@pytest.mark.usefixtures("standard")
def test_draft_and_verify_share_widened_weights(narrow: Path) -> None:
    engines = open_engines(narrow, load_manifest(narrow), "ort", 1, True)
    assert isinstance(engines.verify, OrtEngine) and isinstance(engines.draft, OrtEngine)
    assert engines.verify._widened is engines.draft._widened and engines.verify._widened


@pytest.mark.usefixtures("standard")
def test_command_runs_and_says_so_in_one_line(narrow: Path, text_model: Path, tmp_path: Path) -> None:
    found = succeed(main, "--engine-dir", narrow, "-p", "hello", "-n", 8, "--no-stats")
    assert found.stderr.count("\n") == 1 and "bfloat16 engines in float32" in found.stderr
    plain, drafting = (eesd.load(narrow, speculation=s, threads=1) for s in (None, Speculation("fixed:k=3", guard=False)))
    tokens = plain.generate("hello", max_new_tokens=40, ignore_eos=True).tokens
    assert drafting.generate("hello", max_new_tokens=40, ignore_eos=True).tokens == tokens
    wide = export_engine(text_model, tmp_path / "plans", "--dtype", "float32")
    assert "engines in float32" not in succeed(main, "--engine-dir", wide, "-p", "hello", "-n", 8, "--no-stats").stderr


@needs_operators()
def test_operators_read_16_bits_as_they_are(narrow: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backends, "available_memory", lambda: 1000)
    engines = eesd.load(narrow, threads=1).engines
    assert isinstance(engines.verify, CpuEngine) and isinstance(engines.draft, CpuEngine) and not engines.notice


@pytest.mark.usefixtures("standard")
def test_torch_runs_what_fits_the_memory_only_as_it_is(narrow: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backends, "available_memory", lambda: 1000)
    llm = eesd.load(narrow, threads=1)
    assert isinstance(llm.engines.verify, DeviceEngine) and "too little memory" in llm.engines.notice
    assert len(llm.generate("hello", max_new_tokens=4, ignore_eos=True).tokens) == 4


def cut_weights(directory: Path) -> None:
    path = directory / WEIGHTS_FILE
    path.write_bytes(path.read_bytes()[:5000])
    edit_manifest(directory, "files/weights.bin/size", 5000)


@pytest.mark.usefixtures("standard")
@pytest.mark.parametrize(("damage", "words"), [(garble, "onnx cannot read"), (cut_weights, "do not fit each other")])
def test_damaged_directory_is_refused(text_model: Path, tmp_path: Path, damage: Damage, words: str) -> None:
    directory = export_engine(text_model, tmp_path / "plans", "--dtype", "bfloat16")
    damage(directory)
    assert_refused(run(main, "--engine-dir", directory, "-p", "hello"), words, "export the model again")
