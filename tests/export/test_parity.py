"""Tests that ``eesd-build --check`` detects engines that differ from their graphs, and that every
export for the CPU detects packed weights that differ. ``eesd-export --layers`` exports the first
layers."""

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx.external_data_helper import ExternalDataInfo
from support import gguf_files, tiny_models
from support.command import assert_refused, export_engine, run, slow_but, succeed
from support.engine_dirs import logits_of, record, trained_head
from support.family_grid import OPTIONS, family_cases
from support.tiny_checkpoints import FAMILIES, build
from support.without_operators import needs_operators

from eesd.common.manifest import WEIGHTS_FILE, Manifest, load_manifest
from eesd.common.weights import weights_of
from eesd.export import build as build_cli
from eesd.export.build import main as build_main
from eesd.export.cli import main
from eesd.export.cli import main as export_main
from eesd.export.cpu import panels, readers
from eesd.export.parity import LEAST_COSINE, compare_engines
from eesd.model.checkpoint import Checkpoint
from eesd.runtime.engines.backends import EngineOptions, Engines, open_engines

LAYERS = 2
FOUR_LAYERS = "llama-head-dim"

Export = Callable[..., Path]


@pytest.fixture(scope="module")
def exported(family_dir: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Export:
    """Returns a function that gives the engines of a family. Tests that change them must copy
    them."""

    @cache
    def directory(name: str, **options: Any) -> Path:
        return tiny_models.export_tiny(
            family_dir(name), tmp_path_factory.mktemp(name) / "plans", slots=64, **options
        )

    return directory


def break_weight(directory: Path, name: str) -> None:
    """Fill a weight with zeros."""
    for graph in load_manifest(directory).graphs:
        tensors = onnx.load(directory / graph.file, load_external_data=False).graph.initializer
        for info in (ExternalDataInfo(tensor) for tensor in tensors if tensor.name == name):
            with (directory / info.location).open("r+b") as file:
                file.seek(info.offset or 0)
                file.write(bytes(info.length or 0))


def test_first_layers_are_a_model_of_fewer_layers(
    family_dir: Callable[[str], Path], tmp_path: Path
) -> None:
    """The engines give the results of engines from a checkpoint with fewer layers. The fingerprint
    is the fingerprint of the whole model."""
    family = family_dir("qwen2.5-tied")
    model = shutil.copytree(family, tmp_path / "model")
    config = json.loads((model / "config.json").read_text()) | {"num_hidden_layers": LAYERS}
    (model / "config.json").write_text(
        json.dumps({k: v for k, v in config.items() if k != "layer_types"})
    )
    expected = logits_of(export_engine(model, tmp_path / "expected"), "ort")
    found = export_engine(family, tmp_path / "found", "--layers", LAYERS)
    manifest = load_manifest(found)
    assert (
        manifest.geometry.num_layers == LAYERS
        and manifest.exit_head.base == Checkpoint(family).fingerprint()
    )
    assert not any(
        name.startswith(f"model.layers.{LAYERS}.")
        for name in weights_of(manifest, manifest.verify[0])
    )
    for one, other in zip(logits_of(found, "ort"), expected, strict=True):
        assert np.allclose(one, other, atol=1e-4)


def test_trained_head_of_the_whole_model_fits_its_first_layers(
    family_dir: Callable[[str], Path], tmp_path: Path
) -> None:
    family = family_dir(FOUR_LAYERS)
    head = trained_head(family, tmp_path / "head", 1, False)
    found = load_manifest(
        export_engine(family, tmp_path / "plans", "--exit-head", head, "--layers", 3)
    )
    assert found.exit_head.trained and found.geometry.num_layers == 3


@pytest.mark.parametrize(
    ("layers", "words"), [(9, "between 2 and 4"), (1, "--layers"), ("x", "--layers")]
)
def test_layers_out_of_range_are_refused(
    family_dir: Callable[[str], Path], tmp_path: Path, layers: object, words: str
) -> None:
    result = run(
        export_main,
        "--model",
        family_dir(FOUR_LAYERS),
        "--exit-layer",
        1,
        "-o",
        tmp_path / "plans",
        "--layers",
        layers,
    )
    assert result.exit_code == 2 and words in result.stderr and not (tmp_path / "plans").exists()


@pytest.mark.parametrize(
    ("family", "options", "backend"),
    [
        (FOUR_LAYERS, {}, "ort"),
        (FOUR_LAYERS, {"dtype": "float16"}, "torch"),
        ("qwen2.5-tied", {"dtype": "bfloat16", "stages": 2}, "torch"),
        pytest.param(
            "qwen2.5-tied",
            {"dtype": "float16", "blocks": 2, "own_lm_head": True},
            "torch",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_engines_agree_with_their_graphs(
    exported: Export, family: str, options: dict[str, Any], backend: str
) -> None:
    directory = exported(family, **options)
    manifest = load_manifest(directory)
    cosines = compare_engines(
        open_engines(directory, manifest, EngineOptions(backend, 1, True)), directory, manifest
    )
    assert (
        len(cosines) == 6
        and LEAST_COSINE[manifest.dtype]
        <= min(cosines.values())
        <= max(cosines.values())
        < 1 + 1e-9
    )


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.1.mlp.down_proj.weight",
        "model.layers.1.self_attn.qkv_proj.weight",
        "model.norm.weight",
        "exit_head.blocks.0.self_attn.kv_proj.weight",
        "exit_head.blocks.0.mlp.gate_up_proj.weight",
    ],
)
def test_broken_weight_is_detected(exported: Export, tmp_path: Path, name: str) -> None:
    directory = exported(FOUR_LAYERS, dtype="float16")
    broken = shutil.copytree(directory, tmp_path / "broken")
    break_weight(broken, name)
    record(broken, WEIGHTS_FILE)
    manifest = load_manifest(broken)
    cosines = compare_engines(
        open_engines(broken, manifest, EngineOptions("torch", 1, True)), directory, manifest
    )
    assert min(cosines.values()) < LEAST_COSINE["float16"]


@pytest.fixture(scope="module")
def narrow(family_dir: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A float16 engine directory with linked weights. Plans can be built from it without a GPU."""
    pytest.importorskip("tensorrt_rtx", reason="building plans needs tensorrt-rtx")
    return export_engine(
        family_dir("llama2"), tmp_path_factory.mktemp("narrow") / "plans", "--link-weights"
    )


def torch_engines(spoil: Callable[[Any], object] = lambda _: None) -> Callable[..., Engines]:
    """Returns a replacement for ``open_engines`` that damages a stage. It opens torch engines
    instead of plans, because plans need a GPU."""

    def opened(directory: Path, manifest: Manifest, options: EngineOptions) -> Engines:
        assert all((directory / plan.file).exists() for plan in manifest.plans.values())
        engines: Any = open_engines(directory, manifest, replace(options, backend="torch"))
        if options.backend == "tensorrt":
            spoil(engines.verify.stages[0])
        return engines  # type: ignore[no-any-return]

    return opened


def test_check_without_a_gpu_reports_that_it_was_skipped(
    narrow: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build_cli, "compute_capability", lambda: None)
    result = succeed(build_main, narrow, "--check")
    assert (
        "not checked: there is no NVIDIA GPU here" in result.stderr
        and "cosine" not in result.stdout
    )


def test_check_with_a_gpu_detects_a_broken_weight_and_long_texts_that_are_wrong(
    narrow: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The message names the first difference. This test uses longer texts than the check of the
    graphs."""
    monkeypatch.setattr(build_cli, "compute_capability", lambda: "8.9")
    monkeypatch.setattr(build_cli, "open_engines", torch_engines())
    result = succeed(build_main, narrow, "--check")
    assert (
        result.stdout.count("cosine 0.999") + result.stdout.count("cosine 1.000") == 10
        and not result.stderr
    )

    def spoil_weight(stage: Any) -> None:
        parameter = stage.module.get_parameter("model.layers.1.mlp.down_proj.weight")
        parameter.data = torch.zeros_like(parameter)

    def spoil_late_positions(stage: Any) -> None:
        stage._rotary_tables[0][100:] = 0

    for spoil, equal in ((spoil_weight, 0), (spoil_late_positions, 6)):
        monkeypatch.setattr(build_cli, "open_engines", torch_engines(spoil))
        result = run(build_main, narrow, "--check")
        assert (
            result.exit_code == 2
            and "the same as their graphs (verify logits after 222 tokens)" in result.stderr
        )
        assert (
            sum(float(cosine) > 0.9999 for cosine in re.findall(r"cosine (\S+)", result.stdout))
            >= equal
        )


KINDS: dict[str, tuple[str | gguf_files.Spec, tuple[object, ...]]] = {
    "fp8": ("llama3", ("--exit-layer", 1, "--dtype", "float16", "--quantize", "fp8")),
    "nvfp4": ("qwen2", ("--exit-layer", 1, "--dtype", "bfloat16", "--quantize", "nvfp4")),
    "int8, drafts itself": ("qwen3", ("--dtype", "float32", "--quantize", "int8")),
    "experts": (gguf_files.Spec("llama", "Q4_0", "Q8_0", experts="apart"), ("--exit-layer", 1)),
    "Q8_0, drafts itself": (gguf_files.Spec("llama", matrices="Q8_0", table="Q8_0"), ()),
    # A row of this file's logits is ill-conditioned, so rounding alone changes it far more.
    "Q4_K": (gguf_files.Spec("llama", "Q4_K", "Q6_K", True), ("--exit-layer", 1)),
}


def command(kind: str, directory: Path) -> list[Any]:
    of, options = KINDS[kind]
    if isinstance(of, str):
        model = build(FAMILIES[of], directory / "model")
    else:
        model = gguf_files.write(directory / "model.gguf", of)
    return ["--model", model, "--output", directory / "plans", "--max-seq-len", 64, *options]


@needs_operators()
@pytest.mark.parametrize("kind", KINDS)
def test_right_exports_are_far_within_the_bound(kind: str, tmp_path: Path) -> None:
    output = succeed(main, *command(kind, tmp_path)).output
    found = re.search(r"largest difference is (\d+)% of what rounding can explain", output)
    assert found and int(found[1]) < 20


@needs_operators()
@pytest.mark.parametrize("model_type", slow_but(list(OPTIONS), "gpt_oss", "gemma3_text"))
def test_exports_of_families_in_16_bits_pass(tmp_path: Path, model_type: str) -> None:
    """The constants of parts that only some families have are also stored in 16 bits."""
    case = next(
        case
        for case in family_cases(model_type, 20, seed=5)
        if case.options["num_hidden_layers"] > 2 and case.has_levels == (model_type == "gpt_oss")
    )
    model = case.write(tmp_path / "model")
    options = ("--dtype", "bfloat16", "--max-seq-len", 40, "--max-tree-nodes", 4)
    succeed(main, "--model", model, "-o", tmp_path / "plans", "--exit-layer", 1, *options)


@needs_operators()
@pytest.mark.parametrize("kind", ["fp8", "Q8_0, drafts itself", "int8, drafts itself"])
def test_wrongly_packed_weights_are_no_export(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A weight with two inputs swapped is refused, and nothing remains."""

    def swapped(array: Any) -> Any:
        array = np.array(array)
        array[[0, 1]] = array[[1, 0]]
        return array

    def with_swapped(pack: Any) -> Any:
        return lambda values, *others: pack(swapped(values), *others)

    for name in ("pack_floats", "pack_levels"):
        monkeypatch.setattr(readers, name, with_swapped(getattr(panels, name)))

    def rolled(rows: Any, *others: Any) -> Any:
        return panels.pack_gguf(np.roll(rows, 34), *others)

    monkeypatch.setattr(readers, "pack_gguf", rolled)
    assert_refused(run(main, *command(kind, tmp_path)), "do not compute the same")
    assert not (tmp_path / "plans").exists()
