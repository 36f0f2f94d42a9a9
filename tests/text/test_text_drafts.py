"""Tests of drafts from the text. They give the tokens of plain decoding, and many tokens at once if
the text repeats."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from support import tiny_models
from support.command import export_engine, slow_but
from support.harness import (
    Harness,
    PauseUntil,
    SometimesCopies,
    Workspace,
    Wrapped,
    finish,
    generated,
    timed,
)
from support.lossless_checks import (
    SAMPLINGS,
    check_cache,
    check_interrupted_anywhere,
    check_joint,
    check_same_tokens,
)

from eesd.common.errors import EESDError
from eesd.controllers import Controller, TextStep, make_controller
from eesd.controllers.base import EXIT, TEXT
from eesd.controllers.text_rule import TextRule
from eesd.controllers.tree_budget import TreeBudget
from eesd.controllers.value import Price
from eesd.runtime.compare import compare
from eesd.runtime.decoding.draft_tree import DraftTree, Proposal
from eesd.runtime.decoding.guard import TERMS, Guard
from eesd.runtime.decoding.sampling import Sampling
from eesd.runtime.decoding.text_drafter import SuffixAutomaton, TextIndex, TextProposal
from eesd.runtime.engines.base import StepOutputs
from eesd.runtime.llm import Speculation, load
from eesd.runtime.session import Session

pytestmark = pytest.mark.fast

REPEATING = [5, 9, 3, 44, 17, 5, 9, 3, 44, 8, 5, 9, 3]
REJECTION = Sampling(temperature=1.0, method="rejection")
JOINT_PROMPT = [3, 1, 4, 1, 0, 3, 1, 4, 2, 3, 1]


def head(drafter: str) -> Controller | None:
    return make_controller("fixed:k=3") if drafter == "both" else None


@pytest.mark.parametrize("drafter", ["text", "both"])
@pytest.mark.parametrize(("width", "budget"), [(1, False), (3, False), (1, True), (2, True)])
@pytest.mark.parametrize("name", SAMPLINGS)
def test_the_tokens_are_those_of_plain_decoding(
    harness: Harness,
    name: str,
    width: int,
    budget: bool,
    drafter: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Chains keep every bit of the logits. Drafts from the text are right, wrong, or mixed with
    drafts of the exit head."""
    plain = generated(harness.session(REPEATING, SAMPLINGS[name], new_tokens=40))
    monkeypatch.setattr(TextIndex, "propose", knowing([*REPEATING, *plain]))
    share = 1.0 if drafter == "text" else 0.5
    chosen = TreeBudget() if budget and drafter == "both" else None
    text = SometimesCopies(share=share)
    stats = check_same_tokens(
        harness,
        REPEATING,
        SAMPLINGS[name],
        head(drafter),
        width if drafter == "both" else 1,
        budget=chosen,
        text=text,
    )
    assert stats.text_rounds and 0 < stats.accepted_text_tokens < stats.draft_tokens


def knowing(text: Sequence[int]) -> Callable[..., TextProposal]:
    """Returns a function that proposes the next five tokens of a known continuation. Every seventh
    token is wrong."""

    def propose(
        _: TextIndex, tokens: Sequence[int], most: int, _rule: TextRule, drafted: Sequence[int] = ()
    ) -> TextProposal:
        start = len(tokens) + len(drafted)
        found = [
            text[at] if at % 7 else (text[at] + 1) % 97
            for at in range(start, min(start + min(most, 5), len(text)))
        ]
        steps = [TextStep(3, 1, 1)] * len(found)
        chances = [0.8] * len(found)
        return TextProposal(
            found, steps, chances, [0.8**level for level in range(1, len(found) + 1)]
        )

    return propose


@pytest.mark.parametrize("method", ["coupled", "rejection"])
def test_a_temperature_near_0_gives_the_greedy_tokens(harness: Harness, method: str) -> None:
    """The chance of a candidate then underflows, even if the text proposes the candidate."""
    sampling = Sampling(temperature=0.001, method=method)
    expected = generated(harness.session(REPEATING, new_tokens=60))
    drafting = harness.session(
        REPEATING,
        sampling,
        controller=head("both"),
        budget=TreeBudget(),
        text=SometimesCopies(share=0.5),
        new_tokens=60,
    )
    assert generated(drafting) == expected


class Everything(TreeBudget):
    """Verifies all candidates."""

    def size(self, values: Sequence[float], price: Price | None = None) -> int:
        return len(values)


def test_a_verified_node_follows_its_parent() -> None:
    """A parent comes before its child even if the text continues after a candidate that the draft
    did not expand."""
    tree = DraftTree(0, 20, budget=Everything())
    for tokens in ((1, 2, 3), (4, 5, 6)):
        tree.grow([[Proposal(token, -0.5 * i, -0.5 * i, 1.0) for i, token in enumerate(tokens, 1)]])
    tree.join(tree.root, [2, 7, 8, 9], [0.9, 0.9, 0.9, 0.9], TEXT)
    nodes = tree.prune()
    assert sorted(node.path() for node in nodes[1:]) == [
        [1],
        [1, 4],
        [1, 5],
        [1, 6],
        [2],
        [2, 7],
        [2, 7, 8],
        [2, 7, 8, 9],
        [3],
    ]
    assert all(node.parent in nodes[: node.index] for node in nodes[1:])
    assert [node.token for node in nodes[1:5]] == [2, 7, 8, 9], (
        "the best path has the slots of a chain"
    )


@pytest.mark.parametrize("budget", [False, True])
def test_the_cache_after_each_round_is_that_of_a_prefill(harness: Harness, budget: bool) -> None:
    controller = make_controller("fixed:k=3")
    chosen = TreeBudget() if budget else None
    check_cache(
        harness, REPEATING, SAMPLINGS["greedy"], controller, 1, chosen, SometimesCopies(share=0.5)
    )


@pytest.mark.parametrize(
    ("drafter", "budget", "share"),
    slow_but(
        [("text", False, 1.0), ("both", False, 0.5), ("both", True, 0.3)], ("both", True, 0.3)
    ),
    ids=str,
)
def test_rejection_sampling_follows_the_verifier(
    five_token_harness: Harness, drafter: str, budget: bool, share: float
) -> None:
    """The distribution is right even if drafts of the exit head and of the text are siblings."""
    chosen = TreeBudget() if budget else None
    check_joint(
        five_token_harness,
        JOINT_PROMPT,
        REJECTION,
        head(drafter),
        1,
        2500,
        chosen,
        SometimesCopies(share=share),
    )


def following(workspace: Workspace, successor: Sequence[int]) -> Workspace:
    """Returns engines that predict the token ``successor[t]`` after token t."""

    def say(tokens: Sequence[int], _: int, outputs: StepOutputs) -> None:
        for row, token in enumerate(tokens[: len(outputs.logits)]):
            outputs.logits[row, successor[token]] = 100.0

    return replace(
        workspace,
        verify=Wrapped(workspace.verify, after=say),
        draft=Wrapped(workspace.draft, after=say),
    )


CYCLE = [(token + 1) % 7 for token in range(97)]
LINE = [(token + 1) % 97 for token in range(97)]


def test_a_repeating_text_commits_many_tokens_a_round(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    workspace = timed(monkeypatch, following(harness.workspace(), CYCLE), node=0.05)
    session = harness.session(
        [0], new_tokens=150, text=TextRule(), guard=Guard(), workspace=workspace
    )
    longest = max(len(result.tokens) for result in finish(session))
    assert session.tokens == [i % 7 for i in range(151)]
    assert session.stats.tokens_per_round > 3 and longest >= 9
    assert session.stats.accepted_text_tokens == session.stats.accepted_tokens > 100


def test_nothing_is_verified_where_nothing_repeats(harness: Harness) -> None:
    workspace = following(harness.workspace(), LINE)
    session = harness.session(
        [0], new_tokens=90, text=TextRule(), guard=Guard(), workspace=workspace
    )
    assert generated(session) == [*range(1, 91)]
    assert session.stats.draft_tokens == 0 and session.stats.rounds == 90


def test_a_long_copy_needs_no_draft_step(harness: Harness) -> None:
    workspace = following(harness.workspace(), LINE)
    controller = make_controller("fixed:k=2")
    session = harness.session(
        [*range(40), 1],
        controller=controller,
        new_tokens=30,
        workspace=workspace,
        text=SometimesCopies(),
    )
    session.step()
    assert len(session.tokens) > 41 + 10 and session.stats.draft_steps == 0


@pytest.mark.parametrize("budget", [False, True])
def test_the_text_goes_on_behind_a_draft(harness: Harness, budget: bool) -> None:
    """The text continues even a draft that it would not propose alone. In this test, the end of the
    text has not occurred before."""
    workspace = following(harness.workspace(), LINE)
    controller = make_controller("fixed:k=2")
    chosen = Everything() if budget else None
    text = SometimesCopies(share=0.0)
    text.count_behind = lambda values, nodes: len(values)  # type: ignore[method-assign]
    # Greedy drafts are the engine's top tokens, whatever its logits.
    sampling = Sampling(temperature=0.5)
    session = harness.session(
        [*range(10, 40), 8], sampling, controller, workspace=workspace, text=text, budget=chosen
    )
    assert len(session.step().tokens) > 10
    assert session.stats.draft_steps == 2 and session.stats.accepted_text_tokens > 7


def test_a_paused_text_is_not_verified_and_still_judged(harness: Harness) -> None:
    rule = SometimesCopies()
    workspace = following(harness.workspace(), CYCLE)
    session = harness.session(
        [0], new_tokens=40, text=rule, guard=PauseUntil(20, TEXT), workspace=workspace
    )
    for _ in range(20):
        session.step()
    assert session.stats.draft_tokens == 0 and rule.chance(TextStep(2, 1, 1)) > TextRule().chance(
        TextStep(2, 1, 1)
    )
    assert len(session.step().tokens) > 3


def test_the_text_does_not_pause_the_exit_head(harness: Harness) -> None:
    """Each drafter has an account, and a round counts in only one account."""
    guard = PauseUntil(100, TEXT)
    text = SometimesCopies()
    session = harness.session(
        REPEATING, controller=make_controller("fixed:k=2"), guard=guard, text=text
    )
    for _ in range(5):
        session.step()
    assert session.stats.draft_steps and not session.stats.text_rounds


def test_both_drafters_wait_while_plain_decoding_is_measured(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    guard = Guard()
    text = SometimesCopies()
    workspace = timed(monkeypatch, harness.workspace(), node=0.05)
    controller = make_controller("fixed:k=2")
    session = harness.session(
        REPEATING, controller=controller, guard=guard, text=text, workspace=workspace
    )
    while not guard.allows(EXIT):
        assert not guard.allows(TEXT)
        session.step()
    assert session.stats.rounds == TERMS.near and not session.stats.draft_tokens
    session.step()
    assert session.stats.draft_tokens


def test_int8_activations_stay_exact_with_a_budget(tmp_path: Path) -> None:
    """Only the best path is verified, in the slots of a chain."""
    model = tiny_models.build(tmp_path / "model", 97, layers=3, damping=0.3, seed=0)
    directory = export_engine(model, tmp_path / "plans", "--quantize", "int8", "--max-seq-len", 256)
    llm = load(
        directory, "ort", threads=1, speculation=Speculation("fixed:k=4", guard=False, tree=1)
    )
    for sampling in (Sampling(), Sampling(temperature=1.0, seed=2)):
        found = compare(llm, REPEATING, sampling, 60, ignore_eos=True)
        assert found.divergence is None and found.logits.differing == 0
        assert found.drafting.accepted_tokens and found.drafting.draft_steps


@pytest.mark.parametrize("calls", range(1, 36, 5))
def test_an_interrupted_index_is_made_anew(
    harness: Harness, monkeypatch: pytest.MonkeyPatch, calls: int
) -> None:
    expected = generated(harness.session(REPEATING, new_tokens=30))
    left = [calls]
    count = SuffixAutomaton._count_occurrence

    def breaking(self: SuffixAutomaton, state: int) -> None:
        left[0] -= 1
        if left[0] == 0:
            raise KeyboardInterrupt
        count(self, state)

    monkeypatch.setattr(SuffixAutomaton, "_count_occurrence", breaking)
    session = harness.session(REPEATING, new_tokens=30, text=SometimesCopies())
    before = list(session.tokens)
    while session.finish_reason is None:
        try:
            session.step()
        except KeyboardInterrupt:
            assert session.tokens == before
        before = list(session.tokens)
    fresh = SuffixAutomaton()
    for token in before[: (kept := session.index._extended(before)).num_tokens]:
        fresh.extend(token)
    assert before[len(REPEATING) :] == expected and left[0] < 0
    assert kept._next == fresh._next and kept._count == fresh._count


def test_an_interrupt_at_any_line_keeps_tokens_and_counts_consistent(harness: Harness) -> None:
    def make() -> Session:
        return harness.session(
            REPEATING,
            SAMPLINGS["T0.7"],
            make_controller("fixed:k=2"),
            new_tokens=8,
            text=SometimesCopies(share=0.5),
            budget=TreeBudget(),
        )

    assert check_interrupted_anywhere(make, 1) > 60


@pytest.mark.parametrize("options", [{"drafter": "none"}, {"drafter": None}])
def test_bad_options_are_named(options: dict[str, object]) -> None:
    with pytest.raises(EESDError, match=next(iter(options))):
        Speculation(**options)  # type: ignore[arg-type]
