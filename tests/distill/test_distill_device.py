"""GPU-only code of distillation, tested on the CPU: whole passes, and the k largest logits."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from eesd.common.architecture import Model, block
from eesd.common.shapes import NO_HEAD
from eesd.distill import teacher as teacher_module
from eesd.distill.teacher import Teacher, full_sequence_inputs, largest
from eesd.model.checkpoint import Checkpoint
from eesd.model.loading import load_decoder


@pytest.mark.parametrize("family", ["llama-bias", "mistral", "qwen3-bias"])
def test_whole_passes_have_the_states_of_masked_ones(
    family: str, family_dir: Callable[[str], Path], monkeypatch: Any
) -> None:
    checkpoint = Checkpoint(family_dir(family))
    ids = torch.randint(3, 97, (2, 40), generator=torch.Generator().manual_seed(0))
    teacher = Teacher(load_decoder(checkpoint), [1, 3], 5, "float32")
    expected, wanted = teacher(ids)
    monkeypatch.setattr(
        teacher_module, "full_sequence_inputs", partial(full_sequence_inputs, whole=True)
    )
    hidden, targets = teacher(ids)
    for layer, states in hidden.items():
        torch.testing.assert_close(states, expected[layer], atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(targets.top_logprobs, wanted.top_logprobs, atol=1e-3, rtol=1e-3)


def test_a_whole_pass_has_the_gradients_of_a_masked_one(family_dir: Callable[[str], Path]) -> None:
    checkpoint = Checkpoint(family_dir("llama-linear"))
    decoder: Any = load_decoder(checkpoint)
    described = Model(checkpoint.geometry, NO_HEAD).layer(0)
    layer = decoder.model.layers[0].requires_grad_()
    x = torch.randn(2, 30, checkpoint.geometry.hidden_size)
    gradients = []
    for whole in (False, True):
        inputs, [cache] = full_sequence_inputs(
            checkpoint.geometry, 2, 30, 1, torch.float32, x.device, whole
        )
        assert cache[0].numel() == (0 if whole else x.shape[0] * 30 * 2 * 16)
        layer.zero_grad()
        block(decoder.operations(inputs, [cache]), described, x).square().mean().backward()
        gradients.append(
            [value.grad.clone() for value in layer.parameters() if value.grad is not None]
        )
    assert len(gradients[0]) == len(list(layer.parameters()))
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("vocabulary", [64 * 40, 64 * 40 + 1, 64 * 8])
def test_the_largest_logits_are_those_of_topk(vocabulary: int) -> None:
    logits = torch.randn(9, vocabulary, generator=torch.Generator().manual_seed(0))
    logits[0, :64] += 20  # all in one block
    for found, expected in zip(largest(logits, 8), logits.topk(8), strict=True):
        assert torch.equal(found, expected)
