"""What distillation does on GPUs only, on the CPU: whole passes, the k largest logits, and choosing tokens on the device."""

import importlib.util
import json
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from eesd.distill import teacher as teacher_module
from eesd.distill.continuing import TorchWriter, Writing, continue_prompts, sample
from eesd.distill.device_writer import DeviceWriter, chosen_tokens
from eesd.distill.teacher import Teacher, full_sequence_inputs, largest
from eesd.model.checkpoint import Checkpoint

KERNEL = Path(__file__).parent.parent / "support/decode_kernel.py"
NEEDS_TRITON = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton")


@pytest.mark.parametrize("family", ["llama-bias", "mistral", "qwen3-bias"])
def test_whole_passes_have_the_states_of_masked_ones(family: str, family_dir: Callable[[str], Path], monkeypatch: Any) -> None:
    checkpoint = Checkpoint(family_dir(family))
    ids = torch.randint(3, 97, (2, 40), generator=torch.Generator().manual_seed(0))
    teacher = Teacher(checkpoint.decoder(), [1, 3], 5, "float32")
    expected, wanted = teacher(ids)
    monkeypatch.setattr(teacher_module, "full_sequence_inputs", partial(full_sequence_inputs, whole=True))
    hidden, targets = teacher(ids)
    for layer, states in hidden.items():
        torch.testing.assert_close(states, expected[layer], atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(targets.top_logprobs, wanted.top_logprobs, atol=1e-3, rtol=1e-3)


def test_a_whole_pass_has_the_gradients_of_a_masked_one(family_dir: Callable[[str], Path]) -> None:
    checkpoint = Checkpoint(family_dir("llama-linear"))
    block = checkpoint.decoder().model.layers[0].requires_grad_()
    x, gradients = torch.randn(2, 30, checkpoint.geometry.hidden_size), []
    for whole in (False, True):
        inputs, [cache] = full_sequence_inputs(checkpoint.geometry, 2, 30, 1, torch.float32, x.device, whole)
        assert cache[0].numel() == (0 if whole else x.shape[0] * 30 * 2 * 16)
        block.zero_grad()
        block(x, inputs, cache)[0].square().mean().backward()
        gradients.append([value.grad.clone() for value in block.parameters() if value.grad is not None])
    assert len(gradients[0]) == len(list(block.parameters()))
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("vocabulary", [64 * 40, 64 * 40 + 1, 64 * 8])
def test_the_largest_logits_are_those_of_topk(vocabulary: int) -> None:
    logits = torch.randn(9, vocabulary, generator=torch.Generator().manual_seed(0))
    logits[0, :64] += 20  # all in one block
    for found, expected in zip(largest(logits, 8), logits.topk(8), strict=True):
        assert torch.equal(found, expected)


def test_tokens_are_chosen_as_on_the_host() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = 4 * torch.randn(400, 201, generator=generator)
    temperatures = torch.tensor([0.0, 0.7, 1.0, 1e-3] * 100)
    random = [np.random.default_rng(row) if temperature else None for row, temperature in enumerate(temperatures.tolist())]
    drawn = [np.random.default_rng(row).random() if one else 0.0 for row, one in enumerate(random)]
    uniforms = torch.tensor(drawn, dtype=torch.float64)
    expected = [sample(row, float(at), one) for row, at, one in zip(logits.numpy(), temperatures, random, strict=True)]
    assert chosen_tokens(logits, temperatures, uniforms).tolist() == expected


@pytest.mark.parametrize("family", ["llama-bias", "mistral", "qwen3-bias"])
def test_a_gpus_writer_writes_what_torch_writes(family: str, family_dir: Callable[[str], Path]) -> None:
    """With biases and norms of queries and keys, too."""
    decoder = Checkpoint(family_dir(family)).decoder()
    prompts, limits = [[5, 6, 7], [9], [10] * 30, [8, 9, 4]], [40, 3, 50, 20]
    writing = Writing(prompts, limits, [0.0, 0.0, 0.7, 1.0], np.random.default_rng, (2,), 2)
    assert continue_prompts(DeviceWriter(decoder), writing) == continue_prompts(TorchWriter(decoder), writing)


def of_kernel(what: str) -> dict[str, Any]:
    done = subprocess.run([sys.executable, KERNEL, what], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@NEEDS_TRITON
def test_the_kernel_attends_as_torch_does() -> None:
    assert max(of_kernel("interpreted").values()) < 1e-5


@NEEDS_TRITON
def test_the_kernel_compiles_for_gpus() -> None:
    assert 0 < max(of_kernel("compiled").values()) < 99 << 10
