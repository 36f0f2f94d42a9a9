"""Rejection sampling on a device proposes and accepts what it does on the host, node for node."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from support.device_choices import COMMITTED, OPTIONS, no_logits, on_device
from support.lossless_checks import DRAFT_VOCAB

from eesd.common.draft_vocab import WHOLE, DraftColumns
from eesd.runtime.decoding import device_rejection, device_sampler
from eesd.runtime.decoding.draft_tree import DraftTree, Node, Proposal
from eesd.runtime.decoding.samplers import AcceptResult, Rejection
from eesd.runtime.decoding.sampling import Sampling
from eesd.runtime.engines.base import StepOutputs

SIZE = 97
REDUCED = DraftColumns(DRAFT_VOCAB)


class Model:
    """Logits that depend on the path alone. Those of the draft are near the verifier's, so part of the draft is accepted."""

    def __init__(self, seed: int, distance: float, size: int = SIZE) -> None:
        self._seed, self._distance, self._size = seed, distance, size

    def logits(self, path: list[int], columns: DraftColumns | None) -> NDArray[np.float32]:
        """[V]; those of the draft if it has ``columns``."""
        random = np.random.default_rng([self._seed, len(path), *path])
        found = random.normal(0, 2, self._size)
        if columns is not None:
            found = (found + random.normal(0, self._distance, self._size))[columns.tokens(range(self._draft_size(columns)))]
        return found.astype(np.float32)

    def _draft_size(self, columns: DraftColumns) -> int:
        return len(DRAFT_VOCAB) if columns is REDUCED else self._size

    def of(self, nodes: list[Node], columns: DraftColumns | None = None) -> NDArray[np.float32]:
        return np.stack([self.logits(node.path(), columns) for node in nodes])


class Player:
    """Plays rounds with one sampler, on the host or with a device, and counts what the device was certain of."""

    def __init__(self, sampling: Sampling, columns: DraftColumns, on_a_device: bool) -> None:
        self._sampler, self._columns, self._on_a_device = Rejection(sampling, columns), columns, on_a_device
        self.choices = self.certain = 0

    def round(
        self, model: Model, width: int, steps: int, tokens: list[int], text: list[int]
    ) -> tuple[list[list[Proposal]], AcceptResult]:
        """Draft a tree with ``text`` behind its best path, and judge it."""
        self._sampler.begin_round(tokens)
        tree, proposed = DraftTree(tokens[-1], 32, width), []
        for _ in range(steps):
            outputs = self._outputs(tree.frontier, model.of(tree.frontier, self._columns), tree.branching)
            level = [self._sampler.propose(node, outputs, row, tree.branching) for row, node in enumerate(tree.frontier)]
            proposed += level
            tree.grow(level)
        tree.follow_text(text)
        nodes = tree.prune()
        return proposed, self._sampler.accept(tree.root, self._outputs(nodes, model.of(nodes), 0))

    def _outputs(self, nodes: list[Node], logits: NDArray[np.float32], count: int) -> StepOutputs:
        if not self._on_a_device:
            return StepOutputs(logits)
        chosen = on_device(self._sampler, nodes, logits, count)
        flags = chosen[:, 2, 0] if count else chosen[:, 2]
        self.choices, self.certain = self.choices + len(flags), self.certain + int(flags.sum())
        return StepOutputs(no_logits if flags.all() else logits, chosen=chosen)


def check(
    sampling: Sampling, model: Model, columns: DraftColumns = WHOLE, width: int = 1, steps: int = 3, text: tuple[int, ...] = ()
) -> tuple[Player, int]:
    """Two rounds on the host and with a device are the same. Returns the device's player, and how many tokens were accepted."""
    host, device = (Player(replace(sampling, method="rejection"), columns, there) for there in (False, True))
    accepted = 0
    for tokens in (COMMITTED, [*COMMITTED, 9, 8, 7]):
        proposed, expected = host.round(model, width, steps, tokens, list(text))
        ours, found = device.round(model, width, steps, tokens, list(text))
        assert [[proposal.token for proposal in node] for node in ours] == [[p.token for p in node] for node in proposed]
        for one, other in zip(ours, proposed, strict=True):
            np.testing.assert_allclose([p[1:] for p in one], [p[1:] for p in other], rtol=1e-9, atol=1e-9)
        assert [node.token for node in found.path] == [node.token for node in expected.path]
        assert found.bonus_token == expected.bonus_token
        accepted += len(found.path)
    return device, accepted


def test_rounds_are_those_of_the_host() -> None:
    @settings(derandomize=True, deadline=None, max_examples=250)
    @given(
        options=OPTIONS.filter(lambda options: not options.greedy),
        seed=st.integers(0, 10**6),
        distance=st.sampled_from([0.0, 0.1, 1.0]),
        columns=st.sampled_from([WHOLE, REDUCED]),
        shape=st.sampled_from([(1, 0, ()), (1, 4, ()), (1, 2, (5, 9, 2)), (2, 2, ()), (3, 3, (7,)), (1, 0, (5, 5))]),
    )
    def play(
        options: Sampling, seed: int, distance: float, columns: DraftColumns, shape: tuple[int, int, tuple[int, ...]]
    ) -> None:
        width, steps, text = shape
        player, count = check(options, Model(seed, distance), columns, width, steps, text)
        accepted.append(count)
        players.append(player)

    accepted: list[int] = []
    players: list[Player] = []
    play()
    assert sum(accepted) > len(accepted), "a test of acceptance needs accepted tokens"
    assert sum(player.certain for player in players) > 0.95 * sum(player.choices for player in players)


def test_a_large_vocabulary_changes_nothing() -> None:
    for seed in range(3):
        player, _ = check(Sampling(temperature=0.7, seed=seed), Model(seed, 0.3, 128_000))
        assert player.certain == player.choices


@pytest.mark.parametrize(("name", "value"), [("NEAR", 0.05), ("NEAR", np.inf), ("MASS", 0.9)])
def test_what_the_device_is_not_certain_of_the_host_chooses(name: str, value: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """With these limits that happens often, also behind nodes that the device chose."""
    monkeypatch.setattr(device_rejection, name, value)
    uncertain = 0
    for seed in range(30):
        for width, columns in ((1, WHOLE), (1, REDUCED), (2, WHOLE)):
            player, _ = check(Sampling(temperature=1.0, repetition_penalty=1.2, seed=seed), Model(seed, 0.3), columns, width)
            uncertain += player.choices - player.certain
    assert uncertain > 30


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_logits_that_are_not_finite_are_left_to_the_host(value: float) -> None:
    sampler = Rejection(Sampling(temperature=1.0, top_p=0.9, method="rejection"))
    sampler.begin_round(COMMITTED)
    logits = Model(0, 0.0).of([Node(2, index=0)])
    logits[0, 5] = value
    assert on_device(sampler, [Node(2, index=0)], logits, 1)[0, 2, 0] == 0
    assert on_device(sampler, [Node(2, index=0)], logits, 0)[0, 2] == 0


def numbers_of_the_root(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(device_rejection, "offsets_of", lambda nodes: [0] * len(nodes))


def draft_forgotten(patch: pytest.MonkeyPatch) -> None:
    original = device_rejection._judged
    patch.setattr(
        device_rejection,
        "_judged",
        lambda p, certain, children, q, drawn, numbers: original(p, certain, children, None, drawn, numbers),
    )


def draft_by_column(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(
        device_sampler.DeviceScores, "ids", lambda self, size, device: torch.arange(size, device=device) + SIZE - size
    )


def rest_forgotten(patch: pytest.MonkeyPatch) -> None:
    original = device_rejection._judged

    def without(p: Any, certain: Any, children: Any, q: Any, drawn: Any, numbers: Any) -> Any:
        found = original(p, certain, children, q, drawn, numbers)
        found[:, 1] = original(p, certain, children[:, :0], None, drawn, (numbers[0][:, :0], numbers[1]))[:, 1]
        return found

    patch.setattr(device_rejection, "_judged", without)


@pytest.mark.parametrize("mistake", [numbers_of_the_root, draft_forgotten, draft_by_column, rest_forgotten])
def test_a_mistake_is_noticed(mistake: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch) -> None:
    def play() -> None:
        for seed in range(20):
            check(Sampling(temperature=1.0, seed=seed), Model(seed, 0.5), REDUCED)

    play()
    mistake(monkeypatch)
    with pytest.raises(AssertionError):
        play()
