"""Tests of ``eesd-export --stages``. A verify graph in stages gives the same tokens as the graph in
one piece."""

import shutil
from collections.abc import Callable
from functools import cache
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from support import tiny_models
from support.command import (
    assert_refused,
    contents,
    export_engine,
    exported_files,
    listing,
    run,
    slow_but,
    succeed,
)
from support.engine_dirs import edit_manifest, graph_of, tensor_locations
from support.harness import Harness, without_budget
from support.lossless_checks import cache_of, check_cache, check_same_tokens

import eesd
from eesd.common.geometry import ExitConfig
from eesd.common.manifest import WEIGHTS_FILE, Manifest, load_manifest
from eesd.common.quantization import UNQUANTIZED
from eesd.controllers import make_controller
from eesd.export.cli import main as export_main
from eesd.export.inspect import main as inspect_main
from eesd.export.memory import split_layers
from eesd.model.checkpoint import Checkpoint
from eesd.runtime.cli import main as run_main
from eesd.runtime.decoding.sampling import Sampling
from eesd.runtime.llm import Speculation

PROMPT = [1, 17, 5, 40, 3, 88, 61]
LAYERS = {"llama-head-dim": 4, "llama-tied": 3, "qwen2": 3, "qwen3": 3}
CASES = slow_but(
    [(family, stages) for family, layers in LAYERS.items() for stages in range(2, layers + 1)],
    ("llama-head-dim", 4),
    ("llama-tied", 2),
)
SPECULATIONS = [
    None,
    Speculation("fixed:k=3", guard=False, drafter="exit"),
    Speculation("beta-ts", tree=3, guard=False, drafter="exit"),
]
Export = Callable[..., Path]


@pytest.fixture(scope="module")
def exported(family_dir: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Export:
    """Returns a function that gives the engines of a family in a given number of stages. Tests must
    not change them."""

    @cache
    def directory(family: str, stages: int, *options: object) -> Path:
        output = tmp_path_factory.mktemp("staged") / f"{family}-{stages}"
        return export_engine(family_dir(family), output, "--stages", stages, *options)

    return directory


SPLITS = [
    (2, 3),
    *(pytest.param(pair, marks=pytest.mark.slow) for pair in ((1, 4), (2, 2), (3, 2))),
]
"""Each pair has the exit layer and the number of stages. A stage may end at the exit."""


def layers_of(manifest: Manifest) -> list[int]:
    return [len(layers) for layers in manifest.stage_layers]


@pytest.mark.parametrize("speculation", SPECULATIONS, ids=["plain", "chain", "tree"])
@pytest.mark.parametrize(("family", "stages"), CASES)
def test_stages_give_the_tokens_of_one_stage(
    exported: Export, family: str, stages: int, speculation: Speculation | None
) -> None:
    whole, split = (
        eesd.load(exported(family, n), speculation=speculation, threads=1) for n in (1, stages)
    )
    without_budget(whole, split)
    assert len(split.manifest.verify) == stages and sum(layers_of(split.manifest)) == LAYERS[family]
    with whole.session(PROMPT) as one, split.session(PROMPT) as other:
        np.testing.assert_allclose(one.peek(), other.peek(), rtol=0, atol=1e-5)
    for sampling in (Sampling(), Sampling(temperature=0.8, seed=3)):
        # within 160 tokens the KV cache grows, and all buffers are bound again
        one_text, other_text = (
            llm.generate(PROMPT, sampling, max_new_tokens=160, ignore_eos=True)
            for llm in (whole, split)
        )
        assert other_text.tokens == one_text.tokens
        assert (
            other_text.stats.accepted_tokens == one_text.stats.accepted_tokens
            and len(one_text.tokens) == 160
        )
        assert (one_text.stats.draft_tokens > 0) == (speculation is not None)


@pytest.fixture(scope="module", params=SPLITS, ids=lambda pair: f"exit{pair[0]}-stages{pair[1]}")
def split(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Harness, Harness]:
    """A four-layer model with an exit head of two blocks. The first harness has the verify graph in
    one piece, and the second has it in stages. A stage may end at the exit."""
    layer, stages = request.param
    directory = tmp_path_factory.mktemp("split")
    model = tiny_models.build(directory / "model", 97, layers=4, damping=0.3, seed=0)
    whole, split = (
        tiny_models.export_tiny(
            model, directory / str(n), slots=384, blocks=2, layer=layer, stages=n
        )
        for n in (1, stages)
    )
    return Harness(whole), Harness(split)


def test_stages_fill_the_caches_as_one_stage_does(split: tuple[Harness, Harness]) -> None:
    tokens = [token % 97 for token in range(5, 170)]
    whole, staged = (cache_of(harness.fresh_prefill(tokens), tokens) for harness in split)
    assert all(cache.any() for cache in whole)
    np.testing.assert_allclose(staged, whole, rtol=0, atol=1e-5)


@pytest.mark.parametrize("width", [1, 3])
def test_drafting_with_stages_is_lossless(split: tuple[Harness, Harness], width: int) -> None:
    """Every round leaves the caches that a prefill would leave."""
    sampling = Sampling(temperature=1.0, seed=2)
    controller = make_controller("fixed:k=4")
    assert check_same_tokens(
        split[1], PROMPT, sampling, controller, width, new_tokens=80
    ).accepted_tokens
    check_cache(split[1], PROMPT, sampling, controller, width)


@pytest.mark.parametrize(("family", "stages"), CASES)
def test_stages_share_the_weights_of_one_stage(exported: Export, family: str, stages: int) -> None:
    whole = exported(family, 1)
    split = exported(family, stages)
    graphs = [
        tensor_locations(graph_of(split, graph.file)) for graph in load_manifest(split).graphs
    ]
    found: dict[str, tuple[int, int]] = {}
    for graph in graphs:
        assert all(found.setdefault(name, location) == location for name, location in graph.items())
    one = tensor_locations(graph_of(whole, "draft.onnx")) | tensor_locations(
        graph_of(whole, "verify.onnx")
    )
    assert {name: length for name, (_, length) in found.items()} == {
        name: length for name, (_, length) in one.items()
    }
    assert len(set(found.values())) == len(found)
    assert (split / WEIGHTS_FILE).stat().st_size == (whole / WEIGHTS_FILE).stat().st_size
    tied = "lm_head.weight" not in found
    assert (
        "model.embed_tokens.weight" in graphs[-1]
    ) == tied and "model.embed_tokens.weight" in graphs[1]
    for number, layers in enumerate(load_manifest(split).stage_layers):
        named = {
            int(name.split(".")[2])
            for name in graphs[1 + number]
            if name.startswith("model.layers.")
        }
        assert named == set(layers)


def test_stages_are_standard_graphs_that_pass_on_a_hidden_state(exported: Export) -> None:
    directory = exported("llama-head-dim", 3, "--dtype", "bfloat16", "--check")
    manifest = load_manifest(directory)
    assert exported_files(directory) == sorted(["manifest.json", *manifest.files])
    assert [graph.file for graph in manifest.verify] == [
        "verify_0.onnx",
        "verify_1.onnx",
        "verify_2.onnx",
    ]
    for graph in manifest.verify:
        onnx.checker.check_model(directory / graph.file, full_check=True)
    ends = [(graph.inputs[0].name, graph.outputs[0].name) for graph in manifest.verify]
    assert ends == [("input_ids", "hidden_out"), ("hidden", "hidden_out"), ("hidden", "logits")]
    for hidden in (manifest.verify[1].inputs[0], manifest.verify[1].outputs[0]):
        assert (hidden.shape, hidden.dtype) == (("B", "n", 64), "bfloat16")
    assert manifest.verify[0].caches[-1] == 4 and manifest.draft.caches == (0, 4)


def split_sizes(checkpoint: Checkpoint, layer: int, stages: int) -> list[int]:
    return [
        len(layers)
        for layers in split_layers(
            checkpoint.geometry, ExitConfig(layer), "float32", UNQUANTIZED, stages
        )
    ]


def device_bytes(checkpoint: Checkpoint, counts: list[int]) -> list[int]:
    """Returns the bytes of the weights on each device. They are computed from the checkpoint's
    tensors. The draft is on the first device, where a tied table counts only once."""
    size = {name: tensor.nbytes for name, tensor in checkpoint.tensors.items()}
    layer = sum(nbytes for name, nbytes in size.items() if ".layers.0." in name)
    head = (
        "model.embed_tokens.weight"
        if checkpoint.config.geometry.tied_embeddings
        else "lm_head.weight"
    )
    total = [count * layer for count in counts]
    total[0] += layer + sum(size[name] for name in {"model.embed_tokens.weight", head})
    total[-1] += size[head]
    return total


@pytest.mark.parametrize("layer", [1, 3, 6])
@pytest.mark.parametrize("tied", [True, False])
def test_no_other_split_has_less_on_its_fullest_device(
    tmp_path: Path, tied: bool, layer: int
) -> None:
    model = tiny_models.build(tmp_path / "model", 900, layers=10, damping=1.0, seed=0, tied=tied)
    checkpoint = Checkpoint(model)
    for stages in range(2, 10 - layer + 2):
        chosen = split_sizes(checkpoint, layer, stages)
        borders = [
            (0, *cut, 10) for cut in combinations(range(1, 10), stages - 1) if cut[0] >= layer
        ]
        others = [[b - a for a, b in pairwise(border)] for border in borders]
        assert chosen in others
        assert max(device_bytes(checkpoint, chosen)) == min(
            max(device_bytes(checkpoint, counts)) for counts in others
        )


@pytest.mark.parametrize(("layer", "stages"), [(1, 4), (2, 3), (1, 1000)])
def test_impossible_numbers_of_stages_are_refused(
    text_model: Path, tmp_path: Path, layer: int, stages: int
) -> None:
    options = (
        "--model",
        text_model,
        "-o",
        tmp_path / "plans",
        "--exit-layer",
        layer,
        "--stages",
        stages,
    )
    assert_refused(
        run(export_main, *options),
        f"between 1 and {4 - layer}",
        f"after layer {layer}",
        str(stages),
    )
    assert listing(tmp_path) == []


def test_stages_without_a_draft_give_the_same_tokens(text_model: Path, tmp_path: Path) -> None:
    options = ("--stages", 2, "--exit-head", "none")
    directory = export_engine(text_model, tmp_path / "plans", *options)
    expected = eesd.load(directory, "ort", speculation=None).generate(
        [5, 9, 3], max_new_tokens=20, ignore_eos=True
    )
    for backend in ("ort", "torch"):
        made = eesd.load(directory, backend).generate([5, 9, 3], max_new_tokens=20, ignore_eos=True)
        assert made.tokens == expected.tokens


@pytest.fixture(scope="module")
def three(text_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The text model in three stages."""
    return export_engine(text_model, tmp_path_factory.mktemp("three") / "plans", "--stages", 3)


@pytest.fixture
def three_copy(three: Path, tmp_path: Path) -> Path:
    return shutil.copytree(three, tmp_path / "plans")


def run_engine(directory: Path) -> Any:
    return run(run_main, "--engine-dir", directory, "-p", "hello", "-n", 3)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("verify", []),
        ("verify/1", ...),
        ("verify/0", ...),
        ("verify/2", ...),
        ("verify/0/inputs/0/name", "hidden"),
        ("verify/1/inputs/0/name", "input_ids"),
        ("verify/1/inputs/0/shape/2", 31),
        ("verify/1/outputs/0/shape/2", 31),
        ("verify/1/inputs/0/dtype", "float16"),
        ("verify/0/outputs/0/name", "logits"),
        ("verify/2/outputs/0/name", "hidden_out"),
        ("verify/1/inputs", []),
        ("verify/2/inputs/4/shape/0", "n"),
        ("verify/1/caches", []),
        ("verify/1/caches/0", 0),
        ("verify/0/caches/1", 1),
        ("verify/0/caches", [0]),
        ("exit_head/layer", 2),
        ("verify/1/file", "verify_3.onnx"),
    ],
)
def test_damaged_stages_in_the_manifest_are_refused(
    three_copy: Path, path: str, value: Any
) -> None:
    edit_manifest(three_copy, path, value)
    assert_refused(run_engine(three_copy), "manifest.json is damaged", "export")


def test_swapped_and_missing_stage_files_are_refused(three_copy: Path) -> None:
    (three_copy / "verify_1.onnx").write_bytes((three_copy / "verify_2.onnx").read_bytes())
    assert_refused(run_engine(three_copy), "verify_1.onnx", "export the model again")
    (three_copy / "verify_1.onnx").unlink()
    assert_refused(run_engine(three_copy), "verify_1.onnx is missing")


def test_export_without_stages_replaces_all_stages(text_model: Path, three_copy: Path) -> None:
    export_engine(text_model, three_copy)
    assert not [name for name in contents(three_copy) if name.startswith("verify_")]


def test_inspect_shows_stages(three: Path, engine: Path) -> None:
    shown = succeed(inspect_main, three).stdout
    for stage in range(3):
        assert f"verify_{stage}.onnx: layers {stage} to {stage}" in shown
    assert "stages" not in succeed(inspect_main, engine).stdout
