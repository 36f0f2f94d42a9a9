"""A device chooses the tokens that the host's samplers choose.

Where torch sees a GPU, choices from given logits are made there; elsewhere, and for generations, the CPU stands for the device.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from support.device_choices import COMMITTED, DEVICE, OPTIONS, no_logits, on_device, random_logits
from support.harness import Harness
from support.lossless_checks import DRAFT_VOCAB

import eesd
from eesd.common.draft_vocab import WHOLE, DraftColumns
from eesd.common.errors import EESDError
from eesd.common.manifest import load_manifest
from eesd.runtime.decoding import device_noise, device_sampler
from eesd.runtime.decoding.draft_tree import Node, Proposal
from eesd.runtime.decoding.samplers import make_sampler
from eesd.runtime.decoding.sampling import GumbelNoise, Sampling
from eesd.runtime.engines import device_engine
from eesd.runtime.engines.backends import Engines
from eesd.runtime.engines.base import StepOutputs
from eesd.runtime.engines.torch_engine import open_torch
from eesd.runtime.llm import LLM, Speculation

SAMPLINGS = {
    "penalty": Sampling(repetition_penalty=1.3),
    "coupled": Sampling(temperature=0.9, seed=4),
    "filtered": Sampling(temperature=1.1, top_k=20, top_p=0.9, min_p=0.05, repetition_penalty=1.2, seed=5),
}


@pytest.fixture
def one_position(monkeypatch: pytest.MonkeyPatch) -> None:
    """Noise is made for one position at a time, which is faster on a CPU where few are used."""
    monkeypatch.setattr(device_noise, "BLOCK", 1)


def chain(tokens: list[int]) -> list[Node]:
    """A root and nodes behind each other. None has children: each is judged as if it were the last."""
    nodes = [Node(COMMITTED[-1], index=0)]
    for token in tokens:
        nodes.append(Node(token, nodes[-1], nodes[-1].depth + 1, index=len(nodes)))
    return nodes


def check_targets(sampling: Sampling, logits: NDArray[np.float32]) -> int:
    """The verifier's tokens are those of the host. Returns how many the device was certain of."""
    host, device = (make_sampler(sampling, logits.shape[1]) for _ in range(2))
    nodes, certain = chain([2, 0, 1][: len(logits) - 1]), 0
    for sampler in (host, device):
        sampler.begin_round(COMMITTED)
    chosen = on_device(device, nodes, logits, 0)
    for node in nodes:
        expected = host.accept(node, StepOutputs(logits)).bonus_token
        assert device.accept(node, StepOutputs(logits, chosen=chosen)).bonus_token == expected
        if chosen[node.index, 1]:
            certain += 1
            assert device.accept(node, StepOutputs(no_logits, chosen=chosen)).bonus_token == expected
    return certain


@settings(derandomize=True, deadline=None, max_examples=30)
@given(
    seed=st.one_of(st.integers(0, 2**63 - 1), st.sampled_from([0, 2**63 - 1])),
    first=st.integers(0, 2**33),
    size=st.integers(1, 50),
)
def test_random_bits_are_those_of_the_host(seed: int, first: int, size: int) -> None:
    bits = device_noise.random_bits(seed, first, 3, size, DEVICE)
    for row, position in zip(bits.cpu().numpy(), range(first, first + 3), strict=True):
        raw = np.random.Philox(key=[seed, 0], counter=[0, 0, position, 0]).random_raw(size)
        assert np.array_equal(row, (raw >> np.uint64(12)).astype(np.int64))


def test_noise_is_that_of_the_host_at_every_position() -> None:
    """Positions are asked for in an order that crosses blocks, as rounds do."""
    device, host = device_noise.DeviceNoise(11, 1000, DEVICE), GumbelNoise(11, 1000)
    for positions in ([14], [15], [16, 17], [14, 15, 16, 17, 17], [40], [33, 16]):
        rows = device.rows(positions, first=min(positions)).cpu().numpy()
        for row, position in zip(rows, positions, strict=True):
            np.testing.assert_allclose(row, host.at(position), rtol=1e-12, atol=1e-13)


@pytest.mark.usefixtures("one_position")
def test_the_verifiers_tokens_are_those_of_the_host() -> None:
    @settings(derandomize=True, deadline=None, max_examples=400)
    @given(options=OPTIONS, seed=st.integers(0, 10**6), size=st.sampled_from([7, 97, 4096]), narrow=st.booleans())
    def check(options: Sampling, seed: int, size: int, narrow: bool) -> None:
        if not options.greedy or options.repetition_penalty != 1:
            counts.append(check_targets(options, random_logits(seed, 3, size, narrow)))

    counts: list[int] = []
    check()
    assert sum(counts) > 0.98 * 3 * len(counts), "the host should hardly ever have to choose"


@pytest.mark.usefixtures("one_position")
@pytest.mark.parametrize("narrow", [False, True])
def test_a_large_vocabulary_changes_nothing(narrow: bool) -> None:
    for seed, sampling in enumerate(SAMPLINGS.values()):
        assert check_targets(sampling, random_logits(seed, 2, 128_000, narrow)) == 2


@pytest.mark.usefixtures("one_position")
def test_what_rounding_could_decide_is_left_to_the_host() -> None:
    """Of four equal tokens, a nucleus of one half holds two or three, as the last bit of a sum says."""
    logits = np.full((2, 4), -30, np.float32)
    logits[:, :4] = np.log(np.array([0.25] * 4, np.float32))
    certain = [check_targets(Sampling(temperature=1.0, top_p=0.5, seed=seed), logits) for seed in range(40)]
    assert 0 < sum(certain) < 80


@pytest.mark.usefixtures("one_position")
def test_scores_that_nearly_tie_are_left_to_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_sampler, "NEAR", 0.5)
    certain = [check_targets(Sampling(temperature=1.0, seed=seed), random_logits(seed, 2, 97, False)) for seed in range(40)]
    assert 20 < sum(certain) < 75


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("sampling", [Sampling(temperature=1.0, top_p=0.9), Sampling(repetition_penalty=1.3)])
@pytest.mark.usefixtures("one_position")
def test_logits_that_are_not_finite_are_left_to_the_host(sampling: Sampling, value: float) -> None:
    """The host refuses them."""
    sampler, nodes = make_sampler(sampling, 97), chain([])
    sampler.begin_round(COMMITTED)
    logits = random_logits(0, 1, 97, False)
    logits[0, 5] = value
    chosen = on_device(sampler, nodes, logits, 0)
    assert chosen[0, 1] == 0
    with pytest.raises(EESDError, match="no finite numbers"):
        sampler.accept(nodes[0], StepOutputs(logits, chosen=chosen))


def close(ours: list[Proposal], theirs: list[Proposal]) -> bool:
    """Whether proposals are the same up to rounding."""
    same = [one.token for one in ours] == [other.token for other in theirs]
    return same and np.allclose([one[1:] for one in ours], [other[1:] for other in theirs], rtol=1e-9, atol=1e-9)


def check_drafts(sampling: Sampling, columns: DraftColumns, seed: int) -> None:
    """The draft's proposals are those of the host, in two rounds. The second has seen more."""
    host, device = (make_sampler(sampling, 97, columns) for _ in range(2))
    for tokens in (COMMITTED, [*COMMITTED, 9, 8, 7]):
        nodes, logits = chain([2, 60, 1]), random_logits(seed, 4, 97 if columns is WHOLE else len(DRAFT_VOCAB), narrow=False)
        for sampler in (host, device):
            sampler.begin_round(tokens)
        for count in (1, 4):
            chosen = on_device(device, nodes, logits, count)
            for row, node in enumerate(nodes):
                theirs = host.propose(node, StepOutputs(logits), row, count)
                assert close(device.propose(node, StepOutputs(no_logits, chosen=chosen), row, count), theirs)


@pytest.mark.usefixtures("one_position")
@pytest.mark.parametrize("columns", [WHOLE, DraftColumns(DRAFT_VOCAB)], ids=["whole", "draft vocabulary"])
@pytest.mark.parametrize("name", SAMPLINGS)
def test_drafts_are_those_of_the_host(name: str, columns: DraftColumns) -> None:
    for seed in range(20):
        check_drafts(replace(SAMPLINGS[name], seed=seed), columns, seed)


def test_plain_greedy_and_constraints_do_not_choose_there() -> None:
    """The first gets the best token from the engine anyway; the others choose on the host."""
    everything = lambda _: None  # noqa: E731
    for sampler in (
        make_sampler(Sampling(), 97),
        make_sampler(Sampling(temperature=1.0), 97, allowed=everything),
        make_sampler(Sampling(temperature=1.0, method="rejection"), 97, allowed=everything),
    ):
        assert sampler.chooser(chain([]), 0) is None


@pytest.fixture
def without_logits(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Logits never leave the device."""

    def refuse(*_: Any) -> Any:
        raise AssertionError("logits were copied to the host")

    monkeypatch.setattr(device_engine, "fetch", refuse)
    yield


def choosing_llm(harness: Harness, speculation: Speculation | None) -> LLM:
    """An LLM of the torch engine that chooses as on a GPU."""
    manifest = load_manifest(harness.directory)
    verify, draft = open_torch(harness.directory, manifest, 1, speculation is not None, "cpu")
    for engine in (verify, draft):
        if engine is not None:
            engine.chooses = True
    return LLM(harness.directory, manifest, Engines(verify, draft), speculation)


DRAFTING = {
    "none": None,
    "default": Speculation(),
    "budget": Speculation(tree=1, guard=False, drafter="exit"),
    "wide budget": Speculation("cost-aware-ts", 3, guard=False),
    "fixed": Speculation("fixed:k=4", guard=False),
    "tree": Speculation("calibration-ts", 2, guard=False, drafter="exit"),
    "beta-ts": Speculation("beta-ts", 3, guard=False, drafter="exit"),
    "calibration-ts": Speculation("calibration-ts", guard=False),
}
PROMPT = [60, 2, 44, 44, 17, 8, 90, 31, 5, 5, 71, 12]


@pytest.mark.usefixtures("without_logits")
@pytest.mark.parametrize("drafting", DRAFTING)
@pytest.mark.parametrize("reduced", [False, True], ids=["whole", "draft vocabulary"])
def test_generations_are_those_of_the_host(harness: Harness, reduced_harness: Harness, drafting: str, reduced: bool) -> None:
    used = reduced_harness if reduced else harness
    plain, llm = eesd.load(used.directory, "ort", speculation=None, threads=1), choosing_llm(used, DRAFTING[drafting])
    for name, sampling in SAMPLINGS.items():
        expected = plain.generate(PROMPT, sampling, max_new_tokens=60, ignore_eos=True)
        made = llm.generate(PROMPT, sampling, max_new_tokens=60, ignore_eos=True)
        assert made.tokens == expected.tokens, name
        assert llm.generate(PROMPT, sampling, max_new_tokens=60, draft=False, ignore_eos=True).tokens == expected.tokens


def test_uncertain_choices_do_not_change_a_generation(harness: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = eesd.load(harness.directory, "ort", speculation=None, threads=1)
    llm = choosing_llm(harness, Speculation("fixed:k=4", guard=False))
    for near in (0.3, np.inf):
        monkeypatch.setattr(device_sampler, "NEAR", near)
        for sampling in SAMPLINGS.values():
            tokens = expected.generate(PROMPT, sampling, max_new_tokens=40, ignore_eos=True).tokens
            assert llm.generate(PROMPT, sampling, max_new_tokens=40, ignore_eos=True).tokens == tokens


REJECTING = {
    "none": None,
    "fixed": Speculation("fixed:k=4", guard=False, drafter="exit"),
    "tree": Speculation("calibration-ts", 2, guard=False, drafter="exit"),
}
"""Ways of drafting that do not depend on how long calls take: with rejection sampling the draft decides which tokens come."""


@pytest.mark.usefixtures("without_logits")
@pytest.mark.parametrize("drafting", REJECTING)
@pytest.mark.parametrize("reduced", [False, True], ids=["whole", "draft vocabulary"])
def test_rejection_sampling_chooses_as_the_host(
    harness: Harness, reduced_harness: Harness, drafting: str, reduced: bool
) -> None:
    """The seed decides, so the tokens are those of another engine that drafts alike."""
    used, speculation = reduced_harness if reduced else harness, REJECTING[drafting]
    expected = eesd.load(used.directory, "ort", speculation=speculation, threads=1)
    llm = choosing_llm(used, speculation)
    for sampling in (Sampling(temperature=1.0, method="rejection", seed=3), replace(SAMPLINGS["filtered"], method="rejection")):
        made = llm.generate(PROMPT, sampling, max_new_tokens=60, ignore_eos=True)
        assert made.tokens == expected.generate(PROMPT, sampling, max_new_tokens=60, ignore_eos=True).tokens


def test_an_observer_still_sees_logits(harness: Harness) -> None:
    llm, seen = choosing_llm(harness, Speculation("fixed:k=4", guard=False)), []
    llm.observer = lambda tokens, logits: seen.append(logits.shape[0] == len(tokens))
    llm.generate(PROMPT, SAMPLINGS["coupled"], max_new_tokens=20, ignore_eos=True)
    assert seen and all(seen)


def noise_of_the_root(patch: pytest.MonkeyPatch) -> None:
    original = device_noise.DeviceNoise.rows
    patch.setattr(
        device_noise.DeviceNoise, "rows", lambda self, positions, first: original(self, [first] * len(positions), first)
    )


def paths_forgotten(patch: pytest.MonkeyPatch) -> None:
    original = device_sampler._Seen.mask
    patch.setattr(device_sampler._Seen, "mask", lambda self, tokens, paths: original(self, tokens, [[] for _ in paths]))


def committed_forgotten(patch: pytest.MonkeyPatch) -> None:
    original = device_sampler._Seen.mask
    patch.setattr(device_sampler._Seen, "mask", lambda self, tokens, paths: original(self, tokens[:5], paths))


def noise_by_column(patch: pytest.MonkeyPatch) -> None:
    original = device_sampler.DeviceSampler._noise_for

    def of_first_tokens(self: Any, logits: torch.Tensor, *rest: Any) -> torch.Tensor:
        return original(self, logits.new_empty((len(logits), self._vocab_size)), *rest)[:, : logits.shape[1]]

    patch.setattr(device_sampler.DeviceSampler, "_noise_for", of_first_tokens)


@pytest.mark.parametrize("mistake", [noise_of_the_root, paths_forgotten, committed_forgotten, noise_by_column])
@pytest.mark.usefixtures("one_position")
def test_a_mistake_is_noticed(mistake: Callable[[pytest.MonkeyPatch], None]) -> None:
    with pytest.MonkeyPatch.context() as patch, pytest.raises(AssertionError):
        mistake(patch)
        for seed in range(30):
            sampling = Sampling(temperature=1.0, repetition_penalty=3.0, seed=seed)
            check_targets(sampling, random_logits(seed, 3, 7, narrow=False))
            check_drafts(sampling, DraftColumns(DRAFT_VOCAB), seed)
