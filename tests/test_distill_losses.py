"""The losses' values and gradients, what multi-step training weighs, and rounds replayed from bits."""

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy, kl_div, log_softmax

from eesd.common.errors import EESDError
from eesd.distill import losses as module
from eesd.distill.acceptance import replay
from eesd.distill.losses import combined, head_losses, reach, regression
from eesd.distill.options import Losses, Training, learning_rate

TOKENS, WIDTH, VOCABULARY = 12, 8, 31
PLAIN = Losses()


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
        "text": torch.randint(0, VOCABULARY, (TOKENS,), generator=generator),
        "teacher": teacher,
    }


def parts_of(case: dict[str, torch.Tensor], losses: Losses = PLAIN, k: int = VOCABULARY) -> tuple[torch.Tensor, torch.Tensor]:
    return head_losses(case["features"], case["lm_head"], case["ids"][:, :k], case["top"][:, :k], case["text"], losses)


def test_the_parts_are_what_torch_computes_from_whole_distributions(case: dict[str, torch.Tensor]) -> None:
    (ce, kl, text), agrees = parts_of(case)
    logits = case["features"] @ case["lm_head"].T
    torch.testing.assert_close(ce, cross_entropy(logits, case["teacher"].argmax(-1), reduction="none"))
    torch.testing.assert_close(text, cross_entropy(logits, case["text"], reduction="none"))
    exact = kl_div(log_softmax(logits, -1), case["teacher"], log_target=True, reduction="none").sum(-1)
    torch.testing.assert_close(kl, exact, atol=5e-3, rtol=1e-2)  # the targets are kept in float16
    assert torch.equal(agrees, logits.argmax(-1) == case["teacher"].argmax(-1))


def test_a_head_that_says_what_the_teacher_says_has_no_kl_left_to_lose(case: dict[str, torch.Tensor]) -> None:
    features = case["teacher"].clone().requires_grad_()
    for temperature in (1.0, 2.0):
        losses = Losses(temperature=temperature)
        parts, agrees = head_losses(features, torch.eye(VOCABULARY), case["ids"], case["top"], case["text"], losses)
        (gradient,) = torch.autograd.grad(parts[1].sum(), features)
        assert parts[1].abs().max() < 1e-4 and gradient.abs().max() < 5e-3
        assert agrees.all()


def test_a_cut_distribution_is_renormalised(case: dict[str, torch.Tensor]) -> None:
    """With one token kept, KL is the cross-entropy on that token."""
    (ce, kl, _), _ = parts_of(case, k=1)
    torch.testing.assert_close(kl, ce)


def test_chunks_change_neither_losses_nor_gradients(case: dict[str, torch.Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    whole, agrees = parts_of(case)
    (expected,) = torch.autograd.grad(whole.sum(), case["features"])
    monkeypatch.setattr(module, "CHUNK", 5 * VOCABULARY)
    chunked, chunked_agrees = parts_of(case)
    (gradient,) = torch.autograd.grad(chunked.sum(), case["features"])
    torch.testing.assert_close(chunked, whole)
    torch.testing.assert_close(gradient, expected)
    assert torch.equal(agrees, chunked_agrees)


@pytest.mark.parametrize("name", ["ce", "kl", "text"])
def test_only_the_losses_that_are_switched_on_pull(case: dict[str, torch.Tensor], name: str) -> None:
    alone = Losses(**{"ce": 0.0, "kl": 0.0, "text": 0.0} | {name: 2.0})
    parts, _ = parts_of(case, alone)
    loss, _ = combined(parts[:, None], torch.ones(1, TOKENS), alone)
    (gradient,) = torch.autograd.grad(loss, case["features"], retain_graph=True)
    (expected,) = torch.autograd.grad(2 * parts[("ce", "kl", "text").index(name)].mean(), case["features"])
    torch.testing.assert_close(gradient, expected)


def test_masked_positions_do_not_count(case: dict[str, torch.Tensor]) -> None:
    parts, _ = parts_of(case)
    mask = torch.ones(1, TOKENS)
    mask[0, 7:] = 0
    loss, _ = combined(parts[:, None], mask, Losses())
    (gradient,) = torch.autograd.grad(loss, case["features"])
    assert gradient[:7].abs().sum() > 0 and not gradient[7:].any()


def test_regression_is_zero_where_the_features_are_the_teachers() -> None:
    features = torch.randn(2, 3, 4)
    assert regression(features, features, torch.ones(2, 3)) == 0
    assert regression(features, features + 1, torch.ones(2, 3)) == 0.5


def test_reach_counts_the_roots_from_which_drafting_gets_to_a_position() -> None:
    agrees = torch.tensor([[1, 1, 0, 1, 1, 1, 1]]).float()
    weight = reach(agrees, 3, 0.5)[0]
    for position, value in enumerate(weight.tolist()):
        expected = 1.0
        for step in (1, 2):
            before = agrees[0, max(0, position - step) : position]
            expected += 0.5**step * (position >= step and bool(before.all()))
        assert value == pytest.approx(expected)
    assert reach(agrees, 1, 0.5).eq(1).all()


def test_replayed_rounds() -> None:
    """Drafts right, right, wrong; then two right ones behind the verifier's token; the last token is never drafted."""
    found = replay([np.array([1, 1, 0, 1, 1, 1], bool)], 2)
    assert (found.rounds, found.tokens) == (2, 6)
    assert found.offered == (2, 2) and found.accepted == (2, 2)
    found = replay([np.array([1, 1, 0, 1, 1, 1], bool)], 4)
    assert found.offered == (2, 2, 1, 0) and found.accepted == (2, 2, 0, 0)
    assert found.tokens_per_round == 3.0
    assert replay([np.array([0, 0], bool)], 4).tokens_per_round == 1.0


def test_the_learning_rate_rises_stays_and_falls() -> None:
    training = Training(1, steps=100, lr=1.0, warmup=0.1, cooldown=0.5)
    rates = [learning_rate(training, step) for step in range(100)]
    assert rates[0] == pytest.approx(0.1) and rates[9:50] == [1.0] * 41 and rates[-1] == pytest.approx(0.0396)
    assert rates[50:] == sorted(rates[50:], reverse=True)


@pytest.mark.parametrize(
    "make",
    [
        lambda: Losses(ce=0, kl=0),
        lambda: Losses(temperature=0),
        lambda: Losses(unroll=0),
        lambda: Training(1, steps=-1),
        lambda: Training(1, mix_share=1),
        lambda: Training(1, lr=0),
    ],
)
def test_options_that_make_no_sense_are_refused(make: object) -> None:
    with pytest.raises(EESDError, match="--"):
        make()  # type: ignore[operator]
