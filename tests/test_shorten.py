"""``eesd-build --layers``: the shortened model, and the validation of engines against a reference."""

import json
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import tiny
import torch
from command import assert_refused, export_engine, listing, run, succeed
from onnx.external_data_helper import ExternalDataInfo
from test_linked import logits

from eesd.export import build as build_cli
from eesd.export.build import main as build_main
from eesd.export.manifest import Manifest, load_manifest, verify_files
from eesd.export.shorten import shortened
from eesd.export.validate import LEAST_COSINE, validate
from eesd.runtime.backends import Engines, open_engines
from eesd.runtime.errors import EESDError

pytestmark = pytest.mark.usefixtures("traced_once")

LAYERS = 2
FOUR = "llama-head-dim"
"""Of four layers."""

Export = Callable[..., Path]


@pytest.fixture(scope="module")
def exported(family_dir: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Export:
    """Give a family's name and options of ``export_tiny``, get its engines. Copy them before changing anything."""

    @cache
    def directory(name: str, **options: Any) -> Path:
        return tiny.export_tiny(family_dir(name), tmp_path_factory.mktemp(name) / "plans", slots=64, **options)

    return directory


def break_weight(directory: Path, name: str) -> None:
    """Fill a weight with zeros."""
    for graph in load_manifest(directory).graphs:
        tensors = onnx.load(directory / graph.file, load_external_data=False).graph.initializer
        for info in (ExternalDataInfo(tensor) for tensor in tensors if tensor.name == name):
            with (directory / info.location).open("r+b") as file:
                file.seek(info.offset or 0)
                file.write(bytes(info.length or 0))


def least(engines: Engines, directory: Path, manifest: Manifest) -> float:
    return min(validate(engines, directory, manifest).values())


@pytest.mark.parametrize(("family", "stages"), [(FOUR, 1), ("qwen2.5-tied", 1), ("qwen2.5-tied", 2)])
def test_it_is_the_model_with_fewer_layers(
    exported: Export, family_dir: Callable[[str], Path], tmp_path: Path, family: str, stages: int
) -> None:
    """Verify computes what a checkpoint of fewer layers exports to, the draft what it computed before."""
    directory = exported(family, stages=stages)
    model = shutil.copytree(family_dir(family), tmp_path / "model")
    config = json.loads((model / "config.json").read_text()) | {"num_hidden_layers": LAYERS}
    (model / "config.json").write_text(json.dumps({k: v for k, v in config.items() if k != "layer_types"}))
    expected = logits(tiny.export_tiny(model, tmp_path / "plans", slots=64), "ort")
    with shortened(directory, load_manifest(directory), LAYERS) as (short, cut):
        assert load_manifest(short) == cut and cut.num_caches == LAYERS + 1
        verify_files(short, cut)
        assert (short / "weights.bin").samefile(directory / "weights.bin")
        for backend in ("ort", "torch"):
            prompt, step, _ = logits(short, backend)
            assert np.allclose(prompt, expected[0], atol=1e-4) and np.allclose(step, expected[1], atol=1e-4)
    assert listing(directory) == sorted(["manifest.json", *load_manifest(directory).sizes])


@pytest.mark.parametrize(
    ("family", "options", "backend"),
    [
        (FOUR, {}, "ort"),
        (FOUR, {"dtype": "float16"}, "torch"),
        ("qwen2.5-tied", {"dtype": "bfloat16", "stages": 2}, "torch"),
        ("qwen2.5-tied", {"dtype": "float16", "blocks": 2, "own_lm_head": True}, "torch"),
    ],
)
def test_sound_engines_pass(exported: Export, family: str, options: dict[str, Any], backend: str) -> None:
    directory = exported(family, **options)
    with shortened(directory, load_manifest(directory), LAYERS) as (short, cut):
        cosines = validate(open_engines(short, cut, backend, 1, True), short, cut)
        assert len(cosines) == 6 and LEAST_COSINE[cut.dtype] <= min(cosines.values()) <= max(cosines.values()) < 1 + 1e-9


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.1.mlp.down_proj.weight",
        "model.layers.1.self_attn.v_proj.weight",
        "model.norm.weight",
        "exit_head.blocks.0.self_attn.k_proj.weight",
        "exit_head.blocks.0.mlp.up_proj.weight",
    ],
)
def test_a_broken_weight_fails(exported: Export, tmp_path: Path, name: str) -> None:
    directory = exported(FOUR, dtype="float16")
    with shortened(directory, load_manifest(directory), LAYERS) as (short, cut):
        broken = shutil.copytree(short, tmp_path / "broken")
        break_weight(broken, name)
        assert least(open_engines(broken, cut, "torch", 1, True), short, cut) < LEAST_COSINE["float16"]


@pytest.mark.parametrize(("stages", "layers", "most"), [(1, 4, 3), (1, 0, 3), (2, 2, 1)])
def test_layers_out_of_range(exported: Export, stages: int, layers: int, most: int) -> None:
    directory = exported(FOUR, stages=stages)
    message = f"the first 1, and a shortened model may have up to {most}"
    with pytest.raises(EESDError, match=message), shortened(directory, load_manifest(directory), layers):
        pass


@pytest.fixture(scope="module")
def narrow(family_dir: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A float16 engine directory over a checkpoint's own files, for which plans can be built here."""
    pytest.importorskip("tensorrt_rtx", reason="building plans needs tensorrt-rtx")
    pytest.importorskip("polygraphy", reason="building plans needs polygraphy")
    return export_engine(family_dir("llama2"), tmp_path_factory.mktemp("narrow") / "plans", "--link-weights", "--no-check")


def as_torch(weight: str | None = None) -> Callable[..., Engines]:
    """Opens the engines with torch, where a GPU would run the plans; maybe with a weight broken."""

    def opened(directory: Path, manifest: Manifest, backend: str, threads: int | None, draft: bool) -> Engines:
        assert backend == "tensorrt" and all((directory / plan.file).exists() for plan in manifest.plans.values())
        engines = open_engines(directory, manifest, "torch", threads, draft)
        if weight:
            parameter = engines.verify.programs[0].module.get_parameter(weight)  # type: ignore[attr-defined]
            parameter.data = torch.zeros_like(parameter)
        return engines

    return opened


def test_command_without_a_gpu(narrow: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build_cli, "compute_capability", lambda: None)
    before = listing(narrow)
    result = succeed(build_main, narrow, "--layers", LAYERS)
    assert "verify.plan: " in result.stdout and "2 fused attentions" in result.stdout
    assert "built, but not run: there is no NVIDIA GPU here" in result.stderr and "cosine" not in result.stdout
    assert listing(narrow) == before


def test_command_with_a_gpu(narrow: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The machine may have none, so torch computes in the plans' place."""
    monkeypatch.setattr(build_cli, "compute_capability", lambda: "8.9")
    monkeypatch.setattr(build_cli, "open_engines", as_torch())
    result = succeed(build_main, narrow, "--layers", LAYERS)
    assert result.stdout.count("cosine 0.999") + result.stdout.count("cosine 1.000") == 6 and not result.stderr
    monkeypatch.setattr(build_cli, "open_engines", as_torch("model.layers.1.mlp.down_proj.weight"))
    result = run(build_main, narrow, "--layers", LAYERS)
    assert result.exit_code == 2 and "do not compute what its graphs do" in result.stderr
    assert not load_manifest(narrow).plans and not list(narrow.glob(".short-*"))


def test_command_refuses(narrow: Path) -> None:
    assert_refused(run(build_main, narrow, "--layers", 3), "--layers 3 cannot be", "up to 2")
