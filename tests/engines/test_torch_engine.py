"""Tests that the torch engine gives the results of ONNX Runtime, maps and shares its weights, and
refuses damaged directories.

If torch detects a GPU, all tests except the tests of host memory also run on the GPU.
"""

import gc
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from copy import copy
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from onnxruntime import get_available_providers
from support import tiny_models
from support.command import assert_one_line, assert_refused, export_engine, run
from support.engine_dirs import Damage, edit_manifest, garble, recorded, swap_graphs
from support.family_grid import SMALL, FamilyCase
from support.harness import Harness
from support.no_torch import BLOCK
from support.on_cache import OnCache
from torch import nn

import eesd
from eesd.bench.replay.replay import Threshold
from eesd.common.errors import EESDError
from eesd.common.manifest import WEIGHTS_FILE, load_manifest
from eesd.controllers import DraftStep
from eesd.controllers.calibration import CostAwareTS
from eesd.model.graphs import Draft
from eesd.runtime.cli import main
from eesd.runtime.compare import first_divergence
from eesd.runtime.decoding.draft_tree import Node, tree_mask
from eesd.runtime.decoding.sampling import Sampling
from eesd.runtime.engines.backends import Engines
from eesd.runtime.engines.base import Call, Engine, StepOutputs
from eesd.runtime.engines.device import device_streams
from eesd.runtime.engines.device_cache import DeviceKVCache, RowMemory
from eesd.runtime.engines.device_engine import DeviceEngine
from eesd.runtime.engines.ort_engine import OrtEngine, open_on_device
from eesd.runtime.engines.torch_engine import ROWS, TorchStageRunner, open_torch
from eesd.runtime.llm import LLM, Speculation

DEVICES = [
    "cpu",
    pytest.param(
        "cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
    ),
]
PROMPTS = [[5, 9, 3], [60, 2, 44, 44, 17, 8, 90, 31, 5, 5, 71, 12]]
SAMPLINGS = {
    "greedy": Sampling(),
    "penalty": Sampling(repetition_penalty=1.3),
    "coupled": Sampling(temperature=0.9, top_p=0.9, seed=4),
}
GEOMETRIES: dict[str, dict[str, Any]] = {
    "llama-bias": {},
    "mistral": {"blocks": 2},
    "qwen2": {"whole": True},
    "qwen2.5-tied": {},
    "qwen3": {"own_lm_head": True},
    "qwen3-bias": {"blocks": 2, "own_lm_head": True},
}
"""The options of each family's exit head. Together, these families and options cover everything
that a manifest can describe."""


@pytest.fixture(scope="module")
def exported(
    family_dir: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], Path]:
    """Returns a function that takes the name of a family and gives its engine directory."""

    @cache
    def directory(name: str) -> Path:
        return tiny_models.export_tiny(
            family_dir(name), tmp_path_factory.mktemp(name) / "plans", slots=64, **GEOMETRIES[name]
        )

    return directory


@pytest.fixture(scope="module", params=["bfloat16", "float16"])
def narrow(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An engine directory with a 16-bit element type."""
    directory = tmp_path_factory.mktemp(request.param)
    model = tiny_models.build(directory / "model", 97, layers=3, damping=0.3, seed=0)
    return tiny_models.export_tiny(model, directory / "plans", slots=384, dtype=request.param)


@pytest.fixture(scope="module")
def variant(harness: Harness, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Returns a function that exports the harness's model with options such as ``stages``, or
    ``whole`` if the draft is all layers in 4 bits."""

    @cache
    def directory(**options: Any) -> Path:
        model = harness.directory.parent / "model"
        output = tmp_path_factory.mktemp("variant") / "plans"
        return tiny_models.export_tiny(model, output, slots=384, **options)

    return directory


def torch_llm(directory: Path, device: str, speculation: Speculation | None) -> LLM:
    manifest = load_manifest(directory)
    return LLM(
        directory,
        manifest,
        Engines(*open_torch(directory, manifest, 1, speculation is not None, device)),
        speculation,
    )


def open_on_cpu(directory: Path) -> tuple[DeviceEngine, DeviceEngine]:
    verify, draft = open_torch(
        directory, load_manifest(directory), threads=1, draft=True, device="cpu"
    )
    assert draft is not None
    return verify, draft


def draft_tree(slot: int) -> tuple[list[Node], list[int]]:
    """Returns the nodes of a tree, and their positions if the root is in ``slot``. The tree has
    three levels below the root, and two nodes on the first level."""
    root = Node(7, index=0)
    first, second = (Node(8 + i, root, 1, index=1 + i) for i in range(2))
    nodes = [
        root,
        first,
        second,
        Node(10, first, 2, index=3),
        Node(11, second, 2, index=4),
        Node(12, second, 2, index=5),
    ]
    return nodes, [slot + node.depth for node in nodes]


def forward_passes(verify: Engine, draft: Engine) -> list[StepOutputs]:
    """Returns the outputs for a prompt, a drafted chain, one level of a tree, and a verified tree.
    The outputs of both engines after compaction follow."""
    kv_cache = verify.new_kv_caches()[0]
    verifier = OnCache(verify, kv_cache)
    drafter = OnCache(draft, kv_cache)
    prompt = [token % 97 for token in range(3, 24)]
    outputs = [_copied(verifier.forward(prompt, range(21), 0))]
    outputs += [_copied(drafter.forward([7 + i], [21 + i], 21 + i)) for i in range(3)]
    nodes, positions = draft_tree(21)
    tokens = [node.token for node in nodes]
    mask = tree_mask(nodes)
    outputs.append(_copied(drafter.forward(tokens[1:3], positions[1:3], 22, 21, mask[1:3, :3])))
    outputs.append(_copied(verifier.forward(tokens, positions, 21, 21, mask)))
    kv_cache.compact(22, [23, 25])
    outputs.append(_copied(verifier.forward([40, 41], [24, 25], 24)))
    outputs.append(_copied(drafter.forward([42], [26], 26)))
    return outputs


def _copied(outputs: StepOutputs) -> StepOutputs:
    return StepOutputs(outputs.logits.copy(), copy(outputs.topk_ids), copy(outputs.topk_logprobs))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("family", GEOMETRIES)
def test_logits_and_candidates_match_onnx_runtime(
    exported: Callable[[str], Path], family: str, device: str
) -> None:
    directory = exported(family)
    manifest = load_manifest(directory)
    reference = (
        OrtEngine(directory, manifest, graphs, threads=1)
        for graphs in (manifest.verify, [manifest.draft])
    )
    expected = forward_passes(*reference)
    verify, draft = open_torch(directory, manifest, 1, True, device)
    assert draft is not None
    for ours, theirs in zip(forward_passes(verify, draft), expected, strict=True):
        assert theirs.logits.std() > 0.3, "logits near zero would always agree"
        np.testing.assert_allclose(ours.logits, theirs.logits, rtol=0, atol=2e-4)
        assert (ours.topk_ids is None) == (theirs.topk_ids is None)
        if (
            ours.topk_ids is not None
            and ours.topk_logprobs is not None
            and theirs.topk_logprobs is not None
        ):
            assert (ours.topk_ids == theirs.topk_ids).all() and ours.topk_ids.dtype == np.int64
            np.testing.assert_allclose(ours.topk_logprobs, theirs.topk_logprobs, rtol=0, atol=2e-4)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", SAMPLINGS)
@pytest.mark.parametrize(
    ("controller", "tree", "draft"),
    [
        ("fixed:k=4", 0, "head"),
        ("calibration-ts", 2, "head"),
        ("beta-ts", 3, "head"),
        ("cost-aware-ts", 2, "whole"),
    ],
)
def test_tokens_match_plain_decoding_with_onnx_runtime(
    harness: Harness,
    variant: Callable[..., Path],
    controller: str,
    tree: int,
    draft: str,
    name: str,
    device: str,
) -> None:
    """The sequences are long enough for the KV cache to grow, and the second prompt reuses the
    cache of the first."""
    directory = variant(whole=True) if draft == "whole" else harness.directory
    plain = eesd.load(directory, "ort", speculation=None, threads=1)
    llm = torch_llm(directory, device, Speculation(controller, tree, guard=False))
    accepted = 0
    for prompt in PROMPTS:
        expected = plain.generate(prompt, SAMPLINGS[name], max_new_tokens=150, ignore_eos=True)
        completion = llm.generate(prompt, SAMPLINGS[name], max_new_tokens=150, ignore_eos=True)
        assert completion.tokens == expected.tokens
        undrafted = llm.generate(
            prompt, SAMPLINGS[name], max_new_tokens=150, draft=False, ignore_eos=True
        )
        assert undrafted.tokens == expected.tokens
        accepted += completion.stats.accepted_tokens
    assert accepted > 20


def test_a_device_drafts_two_steps_before_it_asks(
    variant: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The default controller allows this, but its decisions depend on the clock. This test
    therefore uses another controller."""
    assert CostAwareTS.steps_at_once == 2
    monkeypatch.setattr(Threshold, "steps_at_once", 2)
    llm = torch_llm(variant(whole=True), "cpu", Speculation(guard=False, drafter="exit"))
    controller = Threshold(p=0.2)
    llm.drafting = llm.drafting.with_drafter(controller=controller)
    draft = llm.engines.draft
    levels = list[int]()
    told = list[int]()
    assert isinstance(draft, DeviceEngine)
    forward = draft.forward
    keep = controller.keep_drafting

    def drafted(calls: Sequence[Call]) -> list[StepOutputs]:
        [outputs] = forward(calls)
        levels.append(outputs.levels)
        return [outputs]

    def asked(step: DraftStep) -> bool:
        told.append(step.depth)
        return keep(step)

    monkeypatch.setattr(draft, "forward", drafted)
    monkeypatch.setattr(controller, "keep_drafting", asked)
    made = llm.generate(PROMPTS[0], max_new_tokens=60, ignore_eos=True)
    plain = llm.generate(PROMPTS[0], max_new_tokens=60, draft=False, ignore_eos=True)
    assert made.tokens == plain.tokens and made.stats.acceptance > 0.3
    assert {*levels} <= {1, 2} and made.stats.draft_steps == sum(levels)
    assert len(told) in (made.stats.draft_steps, made.stats.draft_steps - 1), (
        "the last step of a text is not asked about"
    )
    followed = [depth for depth, then in pairwise(told) if then == depth + 1 and depth % 2 == 0]
    assert followed and 2 * len(levels) < 1.2 * len(told), "drafts go on after an answer"


def test_a_call_of_one_row_returns_all_its_levels_and_one_of_several_rows_the_first(
    harness: Harness,
) -> None:
    verify, draft = open_on_cpu(harness.directory)
    calls = [Call(kv_cache, [7], [0], 0, levels=3) for kv_cache in verify.new_kv_caches(2)]
    alone = [draft.forward([call])[0] for call in calls]
    together = draft.forward(calls)
    assert [outputs.levels for outputs in (*alone, *together)] == [3, 3, 1, 1]
    for chain, first in zip(alone, together, strict=True):
        assert chain.topk_ids is not None and first.topk_ids is not None
        assert len(chain.topk_ids) == 3 and chain.topk_ids[:1].tolist() == first.topk_ids.tolist()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("backend", ["torch", "ort"])
def test_stages_with_a_shard_each_give_the_same_tokens(
    harness: Harness, variant: Callable[..., Path], backend: str, device: str
) -> None:
    if (
        backend == "ort"
        and device == "cuda"
        and "CUDAExecutionProvider" not in get_available_providers()
    ):
        pytest.skip("needs onnxruntime-gpu")
    staged = variant(stages=3)
    manifest = load_manifest(staged)
    open_backend = open_torch if backend == "torch" else open_on_device
    engines = Engines(*open_backend(staged, manifest, 1, True, device))
    llm = LLM(staged, manifest, engines, Speculation("calibration-ts", 2, guard=False))
    plain = eesd.load(harness.directory, "ort", speculation=None, threads=1)
    for sampling in (SAMPLINGS["greedy"], SAMPLINGS["coupled"]):
        expected = plain.generate(PROMPTS[1], sampling, max_new_tokens=150, ignore_eos=True)
        assert (
            llm.generate(PROMPTS[1], sampling, max_new_tokens=150, ignore_eos=True).tokens
            == expected.tokens
        )
    kv_cache = engines.verify.new_kv_caches()[0]
    assert isinstance(kv_cache, DeviceKVCache)
    assert [shard.shape[0] for shard in kv_cache.memory.shards] == [
        len(stage.caches) for stage in manifest.verify
    ]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("width", [1, 3])
def test_16_bit_engines_differ_from_plain_decoding_by_rounding_at_most(
    narrow: Path, width: int, device: str
) -> None:
    """The caches have the element type of the engines. Drafting changes a token only if the logits
    of the old token and the new token are equal up to 16-bit rounding."""
    llm = torch_llm(narrow, device, Speculation("fixed:k=4", width, guard=False))
    dtype = getattr(torch, llm.manifest.dtype)
    assert llm.engines.verify.new_kv_caches()[0].memory.shards[0].dtype == dtype  # type: ignore[attr-defined]
    for prompt in PROMPTS:
        plain = llm.generate(prompt, max_new_tokens=100, draft=False, ignore_eos=True)
        drafted = llm.generate(prompt, max_new_tokens=100, ignore_eos=True)
        assert drafted.stats.acceptance > 0.2
        divergence = first_divergence(llm, prompt, plain.tokens, drafted.tokens)
        assert divergence is None or abs(divergence.logit_gap) <= 4 * torch.finfo(dtype).eps * 8, (
            divergence
        )


def test_draft_and_verify_share_the_mapped_weight_file(harness: Harness) -> None:
    verify, draft = open_on_cpu(harness.directory)
    verify_weights, draft_weights = (
        {
            name: weight
            for name, weight in module_of(engine).named_parameters()
            if not weight.is_meta
        }
        for engine in (verify, draft)
    )
    # The verify graph needs only the keys and values of the last exit block, so their weights are
    # separate there.
    shared = {
        name for name in verify_weights.keys() & draft_weights.keys() if "exit_head" not in name
    }
    assert len(shared) > 10 and all(
        verify_weights[name].data_ptr() == draft_weights[name].data_ptr() for name in shared
    )
    weights = [*verify_weights.values(), *draft_weights.values()]
    start = min(weight.data_ptr() for weight in weights)
    size = (harness.directory / WEIGHTS_FILE).stat().st_size
    assert all(start <= weight.data_ptr() < start + size for weight in weights)


def test_weights_of_the_draft_alone_are_not_loaded_without_a_draft(
    exported: Callable[[str], Path],
) -> None:
    directory = exported("qwen3")
    verify, draft = open_torch(
        directory, load_manifest(directory), threads=1, draft=False, device="cpu"
    )
    unused = {name for name, weight in module_of(verify).named_parameters() if weight.is_meta}
    assert (
        draft is None
        and "exit_head.lm_head.weight" in unused
        and not any(name.startswith("model.") for name in unused)
    )


def module_of(engine: DeviceEngine) -> nn.Module:
    (stage,) = engine.stages
    assert isinstance(stage, TorchStageRunner)
    return stage.module


def private_memory() -> int:
    """Returns the number of resident bytes of this process that are not backed by a file."""
    line = next(
        line
        for line in Path("/proc/self/status").read_text().splitlines()
        if line.startswith("RssAnon")
    )
    return int(line.split()[1]) * 1024


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux")
@pytest.mark.parametrize("dtype", [pytest.param("float32", marks=pytest.mark.slow), "bfloat16"])
def test_loading_and_running_copies_no_weights(tmp_path: Path, dtype: str) -> None:
    model = tiny_models.build(tmp_path / "model", 400_000, layers=3, damping=0.3, seed=0)
    directory = tiny_models.export_tiny(model, tmp_path / "plans", slots=64, dtype=dtype)
    size = (directory / WEIGHTS_FILE).stat().st_size
    assert size > 48e6
    gc.collect()  # if garbage of the export were freed later, it would hide a copy
    before = private_memory()
    llm = torch_llm(directory, "cpu", Speculation("fixed:k=2"))
    llm.generate([5, 9, 3], max_new_tokens=6)
    assert private_memory() - before < 0.8 * size


def small_cache(harness: Harness, device: str) -> DeviceKVCache:
    """A cache whose first 16 slots hold the numbers of the slots. It has 16 slots on the CPU, and
    all 384 on a GPU."""
    [kv_cache] = RowMemory(
        harness.manifest, device_streams(1, device), grow=device == "cpu", slots=16
    ).caches()
    assert kv_cache.memory.shards[0].shape == (
        harness.manifest.num_caches,
        2,
        1,
        2,
        16 if device == "cpu" else 384,
        8,
    )
    kv_cache.memory.shards[0][..., :16, :] = torch.arange(16.0)[:, None]
    return kv_cache


def test_cache_on_the_cpu_grows_with_its_contents(harness: Harness) -> None:
    kv_cache = small_cache(harness, "cpu")
    kv_cache.reserve(16)
    assert kv_cache.memory.slots == 16 and kv_cache.memory.version == 0
    kv_cache.reserve(17)
    assert kv_cache.memory.slots == 128 and kv_cache.memory.version == 1
    first, more = torch.split(kv_cache.memory.shards[0], [16, 112], -2)
    assert (first == torch.arange(16.0)[:, None]).all() and not more.any()
    kv_cache.reset()
    assert kv_cache.memory.slots == 16 and kv_cache.memory.version == 2


@pytest.mark.parametrize("device", DEVICES)
def test_compaction_moves_accepted_slots_together(harness: Harness, device: str) -> None:
    kv_cache = small_cache(harness, device)
    kv_cache.compact(4, [5, 6, 9])
    expected = torch.tensor([0, 1, 2, 3, 5, 6, 9, 7, 8], device=device)
    assert (kv_cache.memory.shards[0][..., :9, :] == expected[:, None]).all()


@pytest.mark.parametrize("device", DEVICES)
def test_cache_refuses_more_slots_than_the_manifest_allows(harness: Harness, device: str) -> None:
    with pytest.raises(EESDError, match="do not fit the cache of 384 slots"):
        small_cache(harness, device).reserve(385)


def test_bound_engines_follow_the_cache_when_it_grows(harness: Harness) -> None:
    """Calls that were bound before the cache grew use its new memory afterwards."""
    verify, draft = open_on_cpu(harness.directory)
    nodes, positions = draft_tree(3)
    tokens = [node.token for node in nodes]
    mask = tree_mask(nodes)
    results = []
    for slots_after_prompt in (128, 129):
        kv_cache: Any = verify.new_kv_caches()[0]
        verifier = OnCache(verify, kv_cache)
        drafter = OnCache(draft, kv_cache)
        for start in (0, 3):  # the same calls run before and after
            verifier.forward([5, 9, 3], range(start, start + 3), start)
            drafted = drafter.chain(7, start + 3, 4)
            outputs = verifier.forward(
                tokens, [start + position for position in positions], start + 3, start + 3, mask
            )
            kv_cache.reserve(slots_after_prompt)
        assert kv_cache.memory.version == (slots_after_prompt > 128)
        caches = kv_cache.values(0, 12)
        assert drafted.topk_logprobs is not None and caches.any(4).all()
        results.append([outputs.logits.copy(), drafted.topk_logprobs.copy(), *caches])
    for fixed, grown in zip(*results, strict=True):
        np.testing.assert_allclose(grown, fixed, rtol=0, atol=2e-4)


def test_engines_write_to_their_own_layers_of_the_shared_cache(harness: Harness) -> None:
    verify, draft = open_on_cpu(harness.directory)
    kv_cache: Any = draft.new_kv_caches()[0]
    OnCache(draft, kv_cache).forward([5, 6], [0, 1], 0)
    written = kv_cache.memory.shards[0][..., :2, :].flatten(1).any(1)
    assert isinstance(module_of(draft), Draft)
    assert written.nonzero().flatten().tolist() == [0, harness.manifest.geometry.num_layers]
    assert not kv_cache.memory.shards[0][..., 2:, :].any()
    OnCache(verify, kv_cache).forward([5, 6], [0, 1], 0)
    assert kv_cache.memory.shards[0][..., :2, :].flatten(1).any(1).all()
    assert not kv_cache.memory.shards[0][..., ROWS:, :].any()  # the verify engine pads its calls


def cut_hidden_size(directory: Path) -> None:
    edit_manifest(directory, "geometry/hidden_size", 16)


def rename_weight_file(directory: Path) -> None:
    """Let the first weight of the verify graph refer to a file that does not exist."""
    path = directory / "verify.onnx"
    path.write_bytes(path.read_bytes().replace(b"weights.bin", b"weights.bim", 1))


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (garble, ("verify.onnx is not the file that was written there",)),
        (recorded(garble), ("onnx cannot read", "verify.onnx")),
        (recorded(swap_graphs), ("do not fit its manifest",)),
        (recorded(rename_weight_file), ("do not fit its manifest",)),
        (cut_hidden_size, ("do not fit its manifest",)),
        (
            lambda d: edit_manifest(d, "geometry/intermediate_size", 2**20),
            ("do not fit its manifest",),
        ),
        (lambda d: edit_manifest(d, "geometry/qk_norm", True), ("do not fit its manifest",)),
        (
            lambda d: edit_manifest(d, "geometry/tied_embeddings", True),
            ("do not fit its manifest",),
        ),
        (lambda d: edit_manifest(d, "dtype", "bfloat16"), ("manifest.json is damaged",)),
    ],
)
def test_damaged_directory_is_refused(
    engine_copy: Path, damage: Damage, words: tuple[str, ...]
) -> None:
    damage(engine_copy)
    assert_refused(
        run(main, "--engine-dir", engine_copy, "-p", "hello", "--backend", "torch"),
        *words,
        "export the model again",
    )


def test_unknown_backend_lists_the_known_ones(engine: Path) -> None:
    with pytest.raises(
        EESDError, match="backend is 'jax'; it must be one of auto, tensorrt, ort, torch"
    ):
        eesd.load(engine, "jax")


def test_missing_torch_error_says_what_to_install(engine: Path) -> None:
    code = BLOCK + "from eesd.runtime.cli import main\nmain()"
    arguments = ["--engine-dir", str(engine), "-p", "hello", "--backend", "torch"]
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    assert_one_line(done.stderr, "The torch backend needs", "[torch]'")


LOAD = (
    "import sys, eesd; eesd.load(sys.argv[1], threads=1).generate([5, 6], max_new_tokens=3); "
    "print('torch' in sys.modules)"
)


@pytest.mark.skipif(torch.cuda.is_available(), reason="for machines without a GPU")
@pytest.mark.parametrize("driver", [False, True])
def test_auto_without_a_gpu_imports_torch_only_if_there_is_a_driver(
    engine: Path, tmp_path: Path, driver: bool
) -> None:
    """ONNX Runtime runs in both cases, and reports a GPU that is not used."""
    if Path("/proc/driver/nvidia").exists() or shutil.which("nvidia-smi"):
        pytest.skip("there is a driver")
    if driver:
        (tmp_path / "nvidia-smi").touch(0o755)
    path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        [sys.executable, "-c", LOAD, str(engine)],
        env=os.environ | {"PATH": path},
        capture_output=True,
        text=True,
    )
    assert (done.stdout, "but the CPU runs the engines" in done.stderr) == (
        f"{driver}\n",
        driver,
    ), done.stderr


def test_a_model_that_rotates_nothing_runs(tmp_path: Path) -> None:
    """The graphs of such a model have no rotary tables."""
    options = SMALL | {"intermediate_size": 40, "no_rope_layers": [0] * 3, "pad_token_id": None}
    model = FamilyCase("smollm3", options, 1).write(tmp_path / "model")
    plans = export_engine(model, tmp_path / "plans", "--dtype", "float32")
    by_torch, by_ort = (
        eesd.load(plans, backend, threads=1).generate([1, 5, 9], max_new_tokens=20, ignore_eos=True)
        for backend in ("torch", "ort")
    )
    assert by_torch.tokens == by_ort.tokens
