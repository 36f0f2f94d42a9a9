"""The check of every export for the CPU: its graphs compared with its packed weights."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import gguf_files
from support.command import assert_refused, run, slow_but, succeed
from support.family_grid import OPTIONS, family_cases
from support.tiny_checkpoints import FAMILIES, build
from support.without_operators import needs_operators

from eesd.export.cli import main
from eesd.export.cpu import panels, readers

pytestmark = needs_operators()
KINDS: dict[str, tuple[str | gguf_files.Spec, tuple[object, ...]]] = {
    "fp8": ("llama3", ("--exit-layer", 1, "--dtype", "float16", "--quantize", "fp8")),
    "nvfp4": ("qwen2", ("--exit-layer", 1, "--dtype", "bfloat16", "--quantize", "nvfp4")),
    "int8, drafts itself": ("qwen3", ("--dtype", "float32", "--quantize", "int8")),
    "experts": (gguf_files.Spec("llama", "Q4_0", "Q8_0", experts="apart"), ("--exit-layer", 1)),
    "Q8_0, drafts itself": (gguf_files.Spec("llama", matrices="Q8_0", table="Q8_0"), ()),
    # One row of this file's logits is ill-conditioned: rounding alone changes it far more.
    "Q4_K": (gguf_files.Spec("llama", "Q4_K", "Q6_K", True), ("--exit-layer", 1)),
}


def command(kind: str, directory: Path) -> list[Any]:
    of, options = KINDS[kind]
    if isinstance(of, str):
        model = build(FAMILIES[of], directory / "model")
    else:
        model = gguf_files.write(directory / "model.gguf", of)
    return ["--model", model, "--output", directory / "plans", "--max-seq-len", 64, *options]


@pytest.mark.parametrize("kind", KINDS)
def test_right_exports_are_far_within_the_bound(kind: str, tmp_path: Path) -> None:
    output = succeed(main, *command(kind, tmp_path)).output
    found = re.search(r"largest difference (\d+)% of what rounding explains", output)
    assert found and int(found[1]) < 20


@pytest.mark.parametrize("model_type", slow_but(list(OPTIONS), "gpt_oss", "gemma3_text"))
def test_exports_of_families_in_16_bits_pass(tmp_path: Path, model_type: str) -> None:
    """With the constants of their own parts, which are of 16 bits, too."""
    case = next(
        case
        for case in family_cases(model_type, 20, seed=5)
        if case.options["num_hidden_layers"] > 2 and case.has_levels == (model_type == "gpt_oss")
    )
    model = case.write(tmp_path / "model")
    options = ("--dtype", "bfloat16", "--max-seq-len", 40, "--max-tree-nodes", 4)
    succeed(main, "--model", model, "-o", tmp_path / "plans", "--exit-layer", 1, *options)


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
