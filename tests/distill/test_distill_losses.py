"""Tests of the values and gradients of the losses, of replayed rounds, and of the learning rate."""

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy, kl_div, log_softmax

from eesd.distill import teacher as teacher_module
from eesd.distill.acceptance import replay_acceptance
from eesd.distill.losses import LOSS_NAMES, token_losses, total_loss
from eesd.distill.options import LossOptions, TrainingOptions
from eesd.distill.trainer import learning_rate

TOKENS = 12
WIDTH = 8
VOCABULARY = 31


@pytest.fixture
def case() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    teacher = log_softmax(3 * torch.randn(TOKENS, VOCABULARY, generator=generator), -1)
    top, ids = teacher.sort(descending=True)
    return {
        "features": torch.randn(TOKENS, WIDTH, generator=generator, requires_grad=True),
        "lm_head": torch.randn(VOCABULARY, WIDTH, generator=generator),
        "ids": ids.int(),
        "top": top.half(),
        "teacher": teacher,
    }


def losses_of(
    case: dict[str, torch.Tensor], k: int = VOCABULARY
) -> tuple[torch.Tensor, torch.Tensor]:
    return token_losses(case["features"], case["lm_head"], case["ids"][:, :k], case["top"][:, :k])


def test_losses_equal_those_of_torch_on_whole_distributions(case: dict[str, torch.Tensor]) -> None:
    (ce, kl, tv), agrees = losses_of(case)
    logits = case["features"] @ case["lm_head"].T
    torch.testing.assert_close(
        ce, cross_entropy(logits, case["teacher"].argmax(-1), reduction="none")
    )
    exact = kl_div(log_softmax(logits, -1), case["teacher"], log_target=True, reduction="none").sum(
        -1
    )
    torch.testing.assert_close(kl, exact, atol=5e-3, rtol=1e-2)  # the targets are kept in float16
    torch.testing.assert_close(
        tv, (logits.softmax(-1) - case["teacher"].exp()).abs().sum(-1) / 2, atol=1e-3, rtol=1e-2
    )
    assert torch.equal(agrees, logits.argmax(-1) == case["teacher"].argmax(-1))


@pytest.mark.parametrize("kept", (VOCABULARY, 5))
def test_a_head_equal_to_the_teacher_has_nothing_to_learn(
    case: dict[str, torch.Tensor], kept: int
) -> None:
    """The loss and the gradient are 0 even if some tokens are not kept. A distribution of only the
    kept tokens would make the head overconfident."""
    features = case["teacher"].clone().requires_grad_()
    losses, agrees = token_losses(
        features, torch.eye(VOCABULARY), case["ids"][:, :kept], case["top"][:, :kept]
    )
    (gradient,) = torch.autograd.grad(losses[1].sum(), features)
    assert losses[1:].abs().max() < 1e-3 and gradient.abs().max() < 5e-3 and agrees.all()


def test_chunking_changes_neither_losses_nor_gradients(
    case: dict[str, torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, agrees = losses_of(case)
    (expected,) = torch.autograd.grad(whole.sum(), case["features"])
    monkeypatch.setattr(teacher_module, "LOGITS_PER_CHUNK", 5 * VOCABULARY)
    chunked, chunked_agrees = losses_of(case)
    (gradient,) = torch.autograd.grad(chunked.sum(), case["features"])
    torch.testing.assert_close(chunked, whole)
    torch.testing.assert_close(gradient, expected)
    assert torch.equal(agrees, chunked_agrees)


@pytest.mark.parametrize("name", LOSS_NAMES)
def test_only_losses_with_a_weight_have_a_gradient(
    case: dict[str, torch.Tensor], name: str
) -> None:
    weights = dict.fromkeys(LOSS_NAMES, 0.0) | {name: 2.0}
    options = LossOptions(**weights)
    losses, _ = losses_of(case)
    loss, _ = total_loss(losses[:, None], torch.ones(1, TOKENS), options)
    (gradient,) = torch.autograd.grad(loss, case["features"], retain_graph=True)
    (expected,) = torch.autograd.grad(2 * losses[LOSS_NAMES.index(name)].mean(), case["features"])
    torch.testing.assert_close(gradient, expected)


def test_masked_positions_have_no_gradient(case: dict[str, torch.Tensor]) -> None:
    losses, _ = losses_of(case)
    mask = (torch.arange(TOKENS) < 7)[None].float()
    loss, _ = total_loss(losses[:, None], mask, LossOptions())
    (gradient,) = torch.autograd.grad(loss, case["features"])
    assert gradient[:7].abs().sum() > 0 and not gradient[7:].any()


def test_replay_counts_drafts_up_to_the_first_rejection() -> None:
    """Two drafted tokens are correct, and the third token is wrong. After the verifier's token, two
    drafted tokens are correct. The last token is not drafted."""
    acceptance = replay_acceptance([np.array([[1, 1, 0, 1, 1, 1]], bool)], 2)
    assert (acceptance.rounds, acceptance.tokens) == (2, 6)
    assert acceptance.verified == (2, 2) and acceptance.accepted == (2, 2)
    acceptance = replay_acceptance([np.array([[1, 1, 0, 1, 1, 1]], bool)], 4)
    assert acceptance.verified == (2, 2, 1, 0) and acceptance.accepted == (2, 2, 0, 0)
    assert acceptance.tokens_per_round == 3.0
    assert replay_acceptance([np.array([[0, 0]], bool)], 4).tokens_per_round == 1.0
    # The first drafted token of each round is right, and all later ones are wrong.
    acceptance = replay_acceptance([np.array([[1] * 6, [0] * 6], bool)], 4)
    assert acceptance.verified == (3, 2, 0, 0) and acceptance.accepted == (3, 0, 0, 0)


def test_the_learning_rate_rises_stays_constant_and_falls() -> None:
    options = TrainingOptions(1, steps=100, lr=1.0, warmup=0.1, cooldown=0.5)
    rates = [learning_rate(options, step) for step in range(100)]
    assert (
        rates[0] == pytest.approx(0.1)
        and rates[9:50] == [1.0] * 41
        and rates[-1] == pytest.approx(0.0396)
    )
    assert rates[50:] == sorted(rates[50:], reverse=True)
