"""Tests that TensorRT-RTX builds plans of a tiny model of each family, or that ``eesd-build``
refuses the model."""

from pathlib import Path

import pytest
from support.command import export_engine, run, slow_but
from support.family_grid import OPTIONS, family_cases

from eesd.common.manifest import load_manifest
from eesd.export.build import main
from eesd.model.checkpoint import Checkpoint

pytest.importorskip("tensorrt_rtx", reason="building plans needs tensorrt-rtx")
SLOTS = 64


@pytest.mark.parametrize("family", slow_but(list(OPTIONS), "glm4_moe"))
def test_plans_are_built_for_a_family(tmp_path: Path, family: str) -> None:
    case = family_cases(family, 1, seed=5)[0]
    model = case.write(tmp_path / "model")
    slots = min(SLOTS, Checkpoint(model).config.max_positions)
    options = ("--dtype", "bfloat16", "--max-seq-len", slots, "--max-tree-nodes", 4)
    plans = export_engine(model, tmp_path / "plans", *options)
    geometry = load_manifest(plans).geometry
    result = run(main, plans)
    if geometry.attention_cap or geometry.sinks or geometry.delta:
        assert result.exit_code == 2 and "run the directory with" in result.stderr, result.output
        return
    assert result.exit_code == 0, (result.output, result.exception)
    assert (plans / "draft.plan").exists() and (plans / "verify.plan").exists()
