"""Tests that a prefill writes the same keys and values as any other call, and that it computes the
logits of only one token."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest
from numpy.typing import NDArray
from support.command import assert_refused, run
from support.engine_dirs import edit_manifest
from support.harness import Harness, Wrapped
from support.on_cache import OnCache
from support.without_operators import needs_operators

from eesd.common.manifest import MASKED, load_manifest
from eesd.runtime.cli import main
from eesd.runtime.engines.backends import EngineOptions, open_engines
from eesd.runtime.engines.base import Call, StepOutputs
from eesd.runtime.engines.cpu_engine import CpuEngine
from eesd.runtime.engines.device import StepInputs
from eesd.runtime.engines.torch_engine import TorchStageRunner

TOKENS = [token % 97 for token in range(3, 63)]
BACKENDS = ["ort", "torch"]


def verify_logits(
    harness: Harness, tokens: Sequence[int], rows: Sequence[int]
) -> NDArray[np.float32]:
    """Returns the logits [R, V] of the verify graph for these rows."""
    (graph,) = harness.manifest.verify
    count = len(tokens)
    slots = 64
    session = ort.InferenceSession(
        harness.directory / graph.file, providers=["CPUExecutionProvider"]
    )
    hidden = np.arange(slots) > np.arange(count)[:, None]
    given: dict[str, Any] = {
        "input_ids": np.array([tokens]),
        "position_ids": np.arange(count)[None],
        "write_indices": np.array([0]),
        "attn_mask": np.where(hidden, np.float32(MASKED), np.float32(0))[None, None],
        "logit_rows": np.array(rows),
    }
    for info in graph.inputs[5:]:
        given[info.name] = np.zeros(info.sized(B=1, S=slots), np.float32)
    logits: NDArray[np.float32] = session.run(["logits"], given)[0][0]
    return logits


@pytest.mark.parametrize("rows", [[0], [8], [8, 0, 3], [5, 5]])
def test_rows_that_are_asked_for_have_the_bits_that_they_have_among_all(
    harness: Harness, rows: list[int]
) -> None:
    every = verify_logits(harness, TOKENS[:9], range(9))
    np.testing.assert_array_equal(
        verify_logits(harness, TOKENS[:9], rows).view(np.uint32), every[rows].view(np.uint32)
    )


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("chunks", [[1, 2], [13], [14], [7, 30, 3]])
def test_a_prefill_leaves_the_cache_and_the_next_logits_of_calls_with_logits(
    harness: Harness, backend: str, chunks: list[int]
) -> None:
    found = []
    for with_logits in (False, True):
        verify = open_engines(
            harness.directory, harness.manifest, EngineOptions(backend, 1, draft=False)
        ).verify
        kv_cache = verify.new_kv_caches()[0]
        start = 0
        kv_cache.reserve(64)
        binding = OnCache(verify, kv_cache)
        for chunk in chunks:
            tokens = TOKENS[start : start + chunk]
            if with_logits:
                binding.forward(tokens, range(start, start + chunk), start)
            else:
                binding.prefill(tokens, start)
            start += chunk
        logits = binding.forward(TOKENS[start : start + 2], [start, start + 1], start).logits.copy()
        caches = [
            part[..., : start + 2, :]
            for i in range(harness.manifest.num_caches)
            for part in kv_cache.read(i)
        ]
        found.append([logits, *caches])
    for one, other in zip(*found, strict=True):
        np.testing.assert_array_equal(one.view(np.uint32), other.view(np.uint32))
    assert all(array.any() for array in found[0])


@needs_operators()
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_chunk_of_a_prompt_has_logits_for_one_token_at_most(
    harness: Harness, monkeypatch: pytest.MonkeyPatch, backend: str
) -> None:
    rows: list[int] = []
    bound_for = CpuEngine._bound_for
    prepare = TorchStageRunner.prepare

    def count_of_ort(engine: Any, tokens: int, path: int, logit_rows: int) -> Any:
        rows.append(logit_rows)
        return bound_for(engine, tokens, path, logit_rows)

    def count_of_torch(runner: TorchStageRunner, inputs: StepInputs) -> Any:
        rows.append(len(inputs.logit_rows))
        return prepare(runner, inputs)

    monkeypatch.setattr(CpuEngine, "_bound_for", count_of_ort)
    monkeypatch.setattr(TorchStageRunner, "prepare", count_of_torch)
    verify = open_engines(
        harness.directory, harness.manifest, EngineOptions(backend, 1, draft=False)
    ).verify
    kv_cache = verify.new_kv_caches()[0]
    kv_cache.reserve(64)
    binding = OnCache(verify, kv_cache)
    binding.prefill(TOKENS[:40], 0)
    assert binding.forward(TOKENS[40:44], range(40, 44), 40).logits.shape[0] == 4
    assert rows == [0 if backend == "ort" else 1, 4]


class NoLogits(Wrapped):
    """An engine that accepts only prompts."""

    def forward(self, calls: Sequence[Call]) -> list[StepOutputs]:
        assert not any(call.logits for call in calls), "a pass with logits"
        return super().forward(calls)


def test_a_sessions_prefill_asks_for_no_logits(harness: Harness) -> None:
    parts = harness.workspace()
    session = harness.session(TOKENS, workspace=parts)
    session.engines = session.engines._replace(verify=NoLogits(parts.verify))
    session.prefill()
    with pytest.raises(AssertionError, match="a pass with logits"):
        session.step()


def test_a_directory_without_the_input_is_refused(engine_copy: Path) -> None:
    inputs = [
        vars(info)
        for info in load_manifest(engine_copy).verify[0].inputs
        if info.name != "logit_rows"
    ]
    edit_manifest(engine_copy, "verify/0/inputs", inputs)
    assert_refused(
        run(main, "--engine-dir", engine_copy, "-p", "x"),
        "verify.onnx has no input logit_rows",
        "export",
    )
