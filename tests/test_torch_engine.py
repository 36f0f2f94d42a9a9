"""The torch engine against ONNX Runtime, and against itself without drafting; what it maps, shares and refuses.

Where torch sees a GPU, everything but the use of host memory is tested there as well.
"""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from copy import copy
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from onnxruntime import get_available_providers
from support import tiny_models
from support.command import assert_one_line, assert_refused, run, succeed
from support.engine_dirs import Damage, edit_manifest, garble, swap_graphs
from support.harness import Rig
from support.no_torch import BLOCK
from torch import nn

import eesd
from eesd.common.errors import EESDError
from eesd.common.manifest import WEIGHTS, load_manifest
from eesd.model.graphs import Draft
from eesd.runtime import doctor
from eesd.runtime.cli import main
from eesd.runtime.compare import first_divergence
from eesd.runtime.decoding.sampling import Sampling
from eesd.runtime.decoding.tree import TokenTree
from eesd.runtime.engines.backends import Engines
from eesd.runtime.engines.base import Engine, StepOutputs
from eesd.runtime.engines.device import DeviceKVCache, device_streams, fitting_gpu
from eesd.runtime.engines.device_engine import DeviceEngine
from eesd.runtime.engines.ort_cpu import OrtEngine
from eesd.runtime.engines.ort_gpu import open_ort_device
from eesd.runtime.engines.torch_engine import TorchStageRunner, open_torch
from eesd.runtime.llm import LLM, Speculation

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"))]
PROMPTS = [[5, 9, 3], [60, 2, 44, 44, 17, 8, 90, 31, 5, 5, 71, 12]]
SAMPLINGS = {
    "greedy": Sampling(),
    "penalty": Sampling(repetition_penalty=1.3),
    "coupled": Sampling(temperature=0.9, top_p=0.9, seed=4),
}
GEOMETRIES: dict[str, dict[str, Any]] = {
    "llama-bias": {},
    "mistral": {"blocks": 2},
    "qwen2.5-tied": {},
    "qwen3": {"own_lm_head": True},
    "qwen3-bias": {"blocks": 2, "own_lm_head": True},
}
"""Families that between them have all that a manifest may say, and what their exit heads are made of."""


@pytest.fixture(scope="module")
def exported(family_dir: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Give a family's name, get its engines."""

    @cache
    def directory(name: str) -> Path:
        return tiny_models.export_tiny(family_dir(name), tmp_path_factory.mktemp(name) / "plans", slots=64, **GEOMETRIES[name])

    return directory


@pytest.fixture(scope="module", params=["bfloat16", "float16"])
def narrow(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Engines of a 16-bit type."""
    directory = tmp_path_factory.mktemp(request.param)
    model = tiny_models.build(directory / "model", 97, layers=3, damping=0.3, seed=0)
    return tiny_models.export_tiny(model, directory / "plans", slots=384, dtype=request.param)


def torch_llm(directory: Path, device: str, speculation: Speculation | None) -> LLM:
    manifest = load_manifest(directory)
    return LLM(directory, manifest, Engines(*open_torch(directory, manifest, 1, speculation is not None, device)), speculation)


def both(directory: Path) -> tuple[DeviceEngine, DeviceEngine]:
    verify, draft = open_torch(directory, load_manifest(directory), threads=1, draft=True, device="cpu")
    assert draft is not None
    return verify, draft


def passes(verify: Engine, draft: Engine) -> list[StepOutputs]:
    """A prompt, a drafted chain, the level of a tree, and the verification of a tree, over one kv_cache that grows in between."""
    kv_cache = verify.new_kv_cache()
    verifier, drafter = verify.bind(kv_cache), draft.bind(kv_cache)
    prompt = [token % 97 for token in range(3, 24)]
    found = [_kept(verifier.forward(prompt, range(21), 0))]
    found += [_kept(drafter.forward([7 + i], [21 + i], 21 + i)) for i in range(3)]
    tree = TokenTree(7)
    for token, parent in ((8, 0), (9, 0), (10, 1), (11, 2), (12, 2)):
        tree.add(token, parent, 0.0)
    positions = [21 + depth for depth in tree.depths]
    found.append(_kept(drafter.forward(tree.tokens[1:3], positions[1:3], 22, 21, tree.visible()[1:3, :3])))
    found.append(_kept(verifier.forward(tree.tokens, positions, 21, 21, tree.visible())))
    kv_cache.compact(22, [23, 25])
    found.append(_kept(verifier.forward([40, 41], [24, 25], 24)))
    found.append(_kept(drafter.forward([42], [26], 26)))
    return found


def _kept(outputs: StepOutputs) -> StepOutputs:
    return StepOutputs(*map(copy, (outputs.logits, outputs.topk_ids, outputs.topk_logprobs)))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("family", GEOMETRIES)
def test_logits_are_those_of_onnx_runtime(exported: Callable[[str], Path], family: str, device: str) -> None:
    directory = exported(family)
    manifest = load_manifest(directory)
    expected = passes(*(OrtEngine(directory, manifest, graph, threads=1) for graph in (manifest.verify, [manifest.draft])))
    verify, draft = open_torch(directory, manifest, 1, True, device)
    assert draft is not None
    for ours, theirs in zip(passes(verify, draft), expected, strict=True):
        assert theirs.logits.std() > 0.3, "logits near zero would agree whatever is computed"
        np.testing.assert_allclose(ours.logits, theirs.logits, rtol=0, atol=2e-4)
        assert (ours.topk_ids is None) == (theirs.topk_ids is None)
        if ours.topk_ids is not None and theirs.topk_logprobs is not None:
            assert (ours.topk_ids == theirs.topk_ids).all() and ours.topk_ids.dtype == np.int64
            np.testing.assert_allclose(ours.topk_logprobs, theirs.topk_logprobs, rtol=0, atol=2e-4)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", SAMPLINGS)
@pytest.mark.parametrize(("controller", "width"), [("fixed:k=4", 1), ("threshold:p=0.3", 2), ("beta-ts", 3)])
def test_same_tokens_as_onnx_runtime(rig: Rig, controller: str, width: int, name: str, device: str) -> None:
    """Plain decoding there, drafting here; long enough for the kv_cache to grow, and from its second sequence on to be reused."""
    plain = eesd.load(rig.directory, "ort", speculation=None, threads=1)
    llm = torch_llm(rig.directory, device, Speculation(controller, width, guard=False))
    accepted = 0
    for prompt in PROMPTS:
        completion = llm.generate(prompt, SAMPLINGS[name], max_new_tokens=150, ignore_eos=True)
        assert completion.tokens == plain.generate(prompt, SAMPLINGS[name], max_new_tokens=150, ignore_eos=True).tokens
        assert (
            completion.tokens == llm.generate(prompt, SAMPLINGS[name], max_new_tokens=150, draft=False, ignore_eos=True).tokens
        )
        accepted += completion.stats.accepted
    assert accepted > 20


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("backend", ["torch", "ort"])
def test_stages_and_memory_of_the_device(tmp_path: Path, rig: Rig, backend: str, device: str) -> None:
    """Three stages, each with a part of the kv_cache, by either library over torch's memory."""
    if backend == "ort" and device == "cuda" and "CUDAExecutionProvider" not in get_available_providers():
        pytest.skip("needs onnxruntime-gpu")
    directory = tiny_models.export_tiny(rig.directory.parent / "model", tmp_path / "plans", slots=384, stages=3)
    manifest, opened = load_manifest(directory), open_torch if backend == "torch" else open_ort_device
    engines = Engines(*opened(directory, manifest, 1, True, device))
    llm = LLM(directory, manifest, engines, Speculation("threshold:p=0.3", 2, guard=False))
    plain = eesd.load(rig.directory, "ort", speculation=None, threads=1)
    for sampling in (SAMPLINGS["greedy"], SAMPLINGS["coupled"]):
        expected = plain.generate(PROMPTS[1], sampling, max_new_tokens=150, ignore_eos=True)
        assert llm.generate(PROMPTS[1], sampling, max_new_tokens=150, ignore_eos=True).tokens == expected.tokens
    kv_cache = engines.verify.new_kv_cache()
    assert isinstance(kv_cache, DeviceKVCache)
    assert [part.shape[0] for part in kv_cache.parts] == [len(stage.caches) for stage in manifest.verify]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("width", [1, 3])
def test_sixteen_bits_run_in_their_own_type(narrow: Path, width: int, device: str) -> None:
    """Drafting changes no token, or where it does, the two lie within the rounding of a 16-bit logit."""
    llm = torch_llm(narrow, device, Speculation("fixed:k=4", width, guard=False))
    dtype = getattr(torch, llm.manifest.dtype)
    assert llm.engines.verify.new_kv_cache().data.dtype == dtype  # type: ignore[attr-defined]
    for prompt in PROMPTS:
        plain = llm.generate(prompt, max_new_tokens=100, draft=False, ignore_eos=True)
        drafted = llm.generate(prompt, max_new_tokens=100, ignore_eos=True)
        assert drafted.stats.acceptance > 0.2
        divergence = first_divergence(llm, prompt, plain.tokens, drafted.tokens)
        assert divergence is None or abs(divergence.logit_gap) <= 4 * torch.finfo(dtype).eps * 8, divergence


def test_weights_are_shared_and_mapped(rig: Rig) -> None:
    """Draft and verify hold the same tensors, and these are the file's pages."""
    verify, draft = both(rig.directory)
    ours = dict(module_of(verify).named_parameters())
    theirs = dict(module_of(draft).named_parameters())
    assert ours.keys() == theirs.keys() and len(ours) > 30
    assert all(ours[name].data_ptr() == theirs[name].data_ptr() for name in ours)
    start = min(weight.data_ptr() for weight in ours.values())
    size = (rig.directory / WEIGHTS).stat().st_size
    assert all(start <= weight.data_ptr() < start + size for weight in ours.values())


def test_without_a_draft_its_weights_stay_in_the_file(exported: Callable[[str], Path]) -> None:
    directory = exported("qwen3")
    verify, draft = open_torch(directory, load_manifest(directory), threads=1, draft=False, device="cpu")
    unused = {name for name, weight in module_of(verify).named_parameters() if weight.is_meta}
    assert draft is None and "exit_head.lm_head.weight" in unused and not any(name.startswith("model.") for name in unused)


def module_of(engine: DeviceEngine) -> nn.Module:
    (program,) = engine.programs
    assert isinstance(program, TorchStageRunner)
    return program.module


def private_memory() -> int:
    """Bytes of this process that no file backs."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("RssAnon"))
    return int(line.split()[1]) * 1024


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_weights_are_not_copied(tmp_path: Path, dtype: str) -> None:
    model = tiny_models.build(tmp_path / "model", 400_000, layers=3, damping=0.3, seed=0)
    directory = tiny_models.export_tiny(model, tmp_path / "plans", slots=64, dtype=dtype)
    size = (directory / WEIGHTS).stat().st_size
    assert size > 48e6
    before = private_memory()
    llm = torch_llm(directory, "cpu", Speculation("fixed:k=2"))
    llm.generate([5, 9, 3], max_new_tokens=6)
    assert private_memory() - before < 0.8 * size


@pytest.mark.parametrize("device", DEVICES)
def test_slab(rig: Rig, device: str) -> None:
    """It grows keeping what it holds, gathers accepted slots, and begins small again; on a GPU its memory stays where it is."""
    kv_cache = DeviceKVCache(rig.manifest, device_streams(1, device), grow=device == "cpu", slots=16)
    assert kv_cache.data.shape == (rig.manifest.num_caches, 2, 1, 2, 16 if device == "cpu" else 384, 8)
    kv_cache.data[..., :16, :] = torch.arange(16.0)[:, None]
    place = kv_cache.data.data_ptr()
    kv_cache.reserve(17)
    assert kv_cache.slots == (128 if device == "cpu" else 384)
    assert (kv_cache.data[..., :16, :] == torch.arange(16.0, device=device)[:, None]).all()
    kv_cache.compact(4, [5, 6, 9])
    expected = torch.tensor([0, 1, 2, 3, 5, 6, 9, 7, 8], device=device)
    assert (kv_cache.data[..., :9, :] == expected[:, None]).all()
    with pytest.raises(EESDError, match="do not fit the cache of 384 slots"):
        kv_cache.reserve(385)
    kv_cache.reset()
    assert kv_cache.slots == (16 if device == "cpu" else 384)
    assert (kv_cache.data.data_ptr() == place) == (device == "cuda")


def test_caches_are_the_slab(rig: Rig) -> None:
    """Both engines write there and nowhere else: no copy, and the draft's layers alone."""
    verify, draft = both(rig.directory)
    kv_cache = draft.new_kv_cache()
    draft.bind(kv_cache).forward([5, 6], [0, 1], 0)
    used = kv_cache.data[..., :2, :].flatten(1).any(1)
    assert isinstance(module_of(draft), Draft)
    assert used.nonzero().flatten().tolist() == [0, rig.manifest.geometry.num_layers] and not kv_cache.data[..., 2:, :].any()
    verify.bind(kv_cache).forward([5, 6], [0, 1], 0)
    assert kv_cache.data[..., :2, :].flatten(1).any(1).all() and not kv_cache.data[..., 2:, :].any()


def test_logits_are_fetched_when_they_are_asked_for() -> None:
    fetched: list[int] = []

    def fetch() -> np.ndarray[Any, np.dtype[np.float32]]:
        fetched.append(1)
        return np.zeros((1, 5), np.float32)

    outputs = StepOutputs(fetch, None, None)
    assert not fetched
    assert outputs.logits is outputs.logits and len(fetched) == 1


def cut_hidden_size(directory: Path) -> None:
    edit_manifest(directory, "hidden_size", 16)


def other_file(directory: Path) -> None:
    """Point the first weight of a graph somewhere else."""
    path = directory / "draft.onnx"
    path.write_bytes(path.read_bytes().replace(b"weights.bin", b"weights.bim", 1))


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (garble, ("onnx cannot read", "verify.onnx")),
        (swap_graphs, ("do not fit its manifest",)),
        (other_file, ("do not fit its manifest",)),
        (cut_hidden_size, ("do not fit its manifest",)),
        (lambda d: edit_manifest(d, "intermediate_size", 2**62), ("do not fit its manifest",)),
        (lambda d: edit_manifest(d, "qk_norm", True), ("do not fit its manifest",)),
        (lambda d: edit_manifest(d, "tied_embeddings", True), ("do not fit its manifest",)),
        (lambda d: edit_manifest(d, "dtype", "bfloat16"), ("do not fit its manifest",)),
    ],
)
def test_bad_engine(engine_copy: Path, damage: Damage, words: tuple[str, ...]) -> None:
    damage(engine_copy)
    assert_refused(
        run(main, "--engine-dir", engine_copy, "-p", "hello", "--backend", "torch"), *words, "export the model again"
    )


def test_sixteen_bits_on_onnx_runtime_name_the_way_out(narrow: Path) -> None:
    with pytest.raises(EESDError, match=r"float16 engines.*--dtype float32.*--backend torch"):
        eesd.load(narrow, "ort")


def test_unknown_backend(engine: Path) -> None:
    with pytest.raises(EESDError, match="no backend 'jax'; there are auto, tensorrt, ort, torch"):
        eesd.load(engine, "jax")


def test_what_does_not_fit_the_gpu_is_said() -> None:
    with pytest.raises(EESDError, match="The weights do not fit the GPU"), fitting_gpu("The weights"):
        raise torch.OutOfMemoryError


def test_command(engine: Path) -> None:
    options = ("--engine-dir", engine, "-p", "for i in range", "-n", 30, "--no-stats", "--threads", 1)
    assert succeed(main, *options, "--backend", "torch").stdout == succeed(main, *options, "--backend", "ort").stdout


def test_missing_torch_says_what_to_install(engine: Path) -> None:
    code = BLOCK + "from eesd.runtime.cli import main\nmain()"
    arguments = ["--engine-dir", str(engine), "-p", "hello", "--backend", "torch"]
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    assert_one_line(done.stderr, "The torch backend needs", "pip install 'eesd[torch]'")


LOAD = "import sys, eesd; eesd.load(sys.argv[1], threads=1).generate([5, 6], max_new_tokens=3); print('torch' in sys.modules)"


@pytest.mark.skipif(torch.cuda.is_available(), reason="for machines without a GPU")
@pytest.mark.parametrize("driver", [False, True])
def test_auto_without_a_gpu(engine: Path, tmp_path: Path, driver: bool) -> None:
    """Torch is not even imported, unless there is a driver to ask it about; ONNX Runtime runs either way."""
    if Path("/proc/driver/nvidia").exists() or shutil.which("nvidia-smi"):
        pytest.skip("there is a driver")
    if driver:
        (tmp_path / "nvidia-smi").touch(0o755)
    path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        [sys.executable, "-c", LOAD, str(engine)], env=os.environ | {"PATH": path}, capture_output=True, text=True
    )
    assert done.stdout == f"{driver}\n", done.stderr


def test_doctor(monkeypatch: pytest.MonkeyPatch) -> None:
    jobs = json.loads(succeed(doctor.main, "--json").stdout)["jobs"]
    assert jobs["run on the CPU (torch)"] == "yes, engines of every type"
    assert jobs["run on a GPU (torch)"].startswith("yes" if torch.cuda.is_available() else "no: ")
    monkeypatch.setattr(doctor, "installed", lambda name: None if name == "onnx" else "1.0")
    jobs = json.loads(succeed(doctor.main, "--json").stdout)["jobs"]
    assert jobs["run on the CPU (torch)"] == jobs["run on a GPU (torch)"] == "no: onnx missing; pip install 'eesd[torch]'"
