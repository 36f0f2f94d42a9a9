"""Tests that need a GPU. A skipped test says what it needs."""

import importlib.util
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from support import tiny_models
from support.command import succeed
from support.on_cache import OnCache

import eesd
from eesd.common.manifest import load_manifest
from eesd.export.build import main as build_main
from eesd.runtime.compare import first_divergence
from eesd.runtime.decoding.sampling import Sampling
from eesd.runtime.engines.backends import EngineOptions, Engines, open_engines
from eesd.runtime.engines.device_engine import DeviceEngine
from eesd.runtime.engines.torch_engine import open_torch
from eesd.runtime.engines.trt_plans import FLAVOURS
from eesd.runtime.llm import LLM, Speculation

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")

PROMPTS = [[5, 9, 3], [60, 2, 44, 44, 17, 8, 90, 31, 5, 5, 71, 12]]
BACKENDS = ["torch", "ort", *FLAVOURS]
GAP = 4 * torch.finfo(torch.float16).eps * 8
"""Logits that differ by less are equal up to float16 rounding."""


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Returns a function that takes the name of a backend and gives a float16 engine directory that
    this backend can open."""
    root = tmp_path_factory.mktemp("gpu")
    model = tiny_models.build(root / "model", 97, layers=4, damping=0.3, seed=0, head_dim=32)
    plain = tiny_models.export_tiny(model, root / "plans", slots=384, dtype="float16")

    def directory(backend: str) -> Path:
        if (
            backend == "ort"
            and "CUDAExecutionProvider" not in __import__("onnxruntime").get_available_providers()
        ):
            pytest.skip("needs onnxruntime-gpu")
        if backend not in FLAVOURS:
            return plain
        if importlib.util.find_spec(FLAVOURS[backend]) is None:
            pytest.skip(f"needs {backend}")
        built = root / backend
        if not built.exists():
            shutil.copytree(plain, built)
            succeed(build_main, built, "--target", backend)
        return built

    return directory


def engines_of(backend: str, directory: Path) -> Engines:
    name = "tensorrt" if backend in FLAVOURS else backend
    return open_engines(directory, load_manifest(directory), EngineOptions(name, 1, draft=True))


@pytest.mark.parametrize("backend", BACKENDS)
def test_logits_and_caches_match_the_cpu(opened: Callable[[str], Path], backend: str) -> None:
    directory = opened(backend)
    manifest = load_manifest(directory)
    reference = Engines(*open_torch(directory, manifest, 1, True, "cpu"))
    found = []
    for engines in (reference, engines_of(backend, directory)):
        kv_cache = engines.verify.new_kv_caches()[0]
        verify = OnCache(engines.verify, kv_cache)
        draft = OnCache(engines.draft, kv_cache)  # type: ignore[arg-type]
        tokens = [token % 97 for token in range(3, 40)]
        verify.prefill(tokens[:27], 0)
        logits = [
            verify.forward(tokens[27:], range(27, 37), 27).logits.copy(),
            draft.forward([7], [37], 37).logits.copy(),
            verify.forward([7, 8, 9], [37, 38, 39], 37).logits.copy(),
        ]
        found.append(
            (
                logits,
                [kv_cache.read(index)[part][..., :40, :] for index in range(5) for part in (0, 1)],
            )
        )
    for expected, actual in zip(*(logits + caches for logits, caches in found), strict=True):
        assert cosine(expected, actual) > 0.999 and expected.std() > 0


def cosine(a: NDArray[Any], b: NDArray[Any]) -> float:
    a = a.astype(np.float64).ravel()
    b = b.astype(np.float64).ravel()
    return float(a @ b / np.sqrt((a @ a) * (b @ b)))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "sampling", [Sampling(), Sampling(temperature=0.9, seed=4)], ids=["greedy", "coupled"]
)
@pytest.mark.parametrize(
    ("controller", "tree"), [("fixed:k=4", 0), ("beta-ts", 0), ("calibration-ts", 3)]
)
def test_drafting_changes_no_token_beyond_rounding(
    opened: Callable[[str], Path], backend: str, controller: str, tree: int, sampling: Sampling
) -> None:
    """Texts fill the cache."""
    directory = opened(backend)
    speculation = Speculation(controller, tree, drafter="exit", guard=False)
    llm = LLM(directory, load_manifest(directory), engines_of(backend, directory), speculation)
    for prompt in PROMPTS:
        plain = llm.generate(prompt, sampling, max_new_tokens=400, draft=False, ignore_eos=True)
        drafted = llm.generate(prompt, sampling, max_new_tokens=400, ignore_eos=True)
        assert len(prompt) + len(plain.tokens) == 384 and drafted.stats.acceptance > 0.1
        divergence = first_divergence(llm, prompt, plain.tokens, drafted.tokens)
        assert divergence is None or sampling.temperature or abs(divergence.logit_gap) <= GAP, (
            divergence
        )


@pytest.mark.parametrize("backend", ["torch", *FLAVOURS])
def test_cuda_graphs_change_no_token(opened: Callable[[str], Path], backend: str) -> None:
    directory = opened(backend)
    tokens = []
    for cuda_graphs in (False, True):
        engines = engines_of(backend, directory)
        for engine in (engines.verify, engines.draft):
            assert isinstance(engine, DeviceEngine)
            engine.cuda_graphs = cuda_graphs
        llm = LLM(
            directory, load_manifest(directory), engines, Speculation("fixed:k=4", guard=False)
        )
        tokens.append(
            [llm.generate(prompt, max_new_tokens=200, ignore_eos=True).tokens for prompt in PROMPTS]
        )
    assert tokens[0] == tokens[1]


def test_compiled_kernels_are_saved_for_the_second_start(opened: Callable[[str], Path]) -> None:
    directory = opened("tensorrt-rtx")
    for _ in range(2):
        eesd.load(directory, "tensorrt").generate(PROMPTS[0], max_new_tokens=5)
    assert (directory / "verify.kernels").stat().st_size > 1000
