"""Tests that a device chooses the same tokens as the samplers of the host.

If torch detects a GPU, the GPU makes the choices from given logits. The CPU acts as the device if
there is no GPU, and whenever a test generates text.
"""

from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from support.harness import Harness
from support.lossless_checks import DRAFT_VOCAB

import eesd
from eesd.common.draft_vocab import WHOLE, DraftColumns
from eesd.common.errors import EESDError
from eesd.common.manifest import load_manifest
from eesd.runtime.decoding import device_sampler
from eesd.runtime.decoding.draft_tree import Node, Proposal
from eesd.runtime.decoding.samplers import make_sampler
from eesd.runtime.decoding.sampling import GumbelNoise, Sampling
from eesd.runtime.engines import forward_step
from eesd.runtime.engines.backends import Engines
from eesd.runtime.engines.base import StepOutputs
from eesd.runtime.engines.torch_engine import open_torch
from eesd.runtime.llm import LLM, Speculation

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
COMMITTED = [3, 1, 4, 1, 5, 6, 2]
OPTIONS = st.builds(
    Sampling,
    temperature=st.sampled_from([0.0, 1e-300, 0.05, 0.7, 1.0, 5.0, 99.0]),
    top_k=st.sampled_from([0, 1, 3, 40, 2**63 - 1]),
    top_p=st.sampled_from([1.0, 0.999, 0.9, 0.5, 1e-12]),
    min_p=st.sampled_from([0.0, 0.1, 0.9]),
    repetition_penalty=st.sampled_from([1.0, 1.3, 0.6]),
    seed=st.sampled_from([0, 7, 2**63 - 1]),
)
SAMPLINGS = {
    "penalty": Sampling(repetition_penalty=1.3),
    "coupled": Sampling(temperature=0.9, seed=4),
    "filtered": Sampling(
        temperature=1.1, top_k=20, top_p=0.9, min_p=0.05, repetition_penalty=1.2, seed=5
    ),
}


NEEDS_TRITON = pytest.mark.skipif(find_spec("triton") is None, reason="needs Triton")
ON_DEVICE = SAMPLINGS if find_spec("triton") else {"penalty": SAMPLINGS["penalty"]}
"""Without Triton the host computes the noise."""


def no_logits() -> NDArray[np.float32]:
    raise AssertionError("the host asked for logits")


def random_logits(seed: int, rows: int, size: int, narrow: bool) -> NDArray[np.float32]:
    """With ``narrow`` they are rounded to bfloat16, like the logits of 16-bit engines, so many are
    equal."""
    logits = torch.from_numpy(
        np.random.default_rng(seed).normal(0, 3, (rows, size)).astype(np.float32)
    )
    found: NDArray[np.float32] = (logits.bfloat16().float() if narrow else logits).numpy()
    return found


def on_device(
    sampler: Any, nodes: list[Node], logits: NDArray[np.float32], count: int
) -> NDArray[np.float64]:
    """Returns the choices that are made from the logits by the work that the sampler prepares for a
    device."""
    choose = sampler.chooser(nodes, count)
    with torch.inference_mode():
        chosen: NDArray[np.float64] = choose(torch.from_numpy(logits).to(DEVICE)).cpu().numpy()
    return chosen


def chain(tokens: list[int]) -> list[Node]:
    """Returns a root and a chain of nodes. The nodes have no children, so each node is judged as if
    it were the last node."""
    nodes = [Node(COMMITTED[-1], index=0)]
    for token in tokens:
        nodes.append(Node(token, nodes[-1], nodes[-1].depth + 1, index=len(nodes)))
    return nodes


def check_targets(sampling: Sampling, logits: NDArray[np.float32]) -> int:
    """Check that the verifier's tokens are the tokens of the host. Returns the number of choices
    that the device marked as certain."""
    host, device = (make_sampler(sampling, logits.shape[1]) for _ in range(2))
    nodes = chain([2, 0, 1][: len(logits) - 1])
    certain = 0
    for sampler in (host, device):
        sampler.begin_round(COMMITTED)
    chosen = on_device(device, nodes, logits, 0)
    for node in nodes:
        expected = host.accept(node, StepOutputs(logits)).bonus_token
        assert device.accept(node, StepOutputs(logits, chosen=chosen)).bonus_token == expected
        if chosen[node.index, 1]:
            certain += 1
            assert (
                device.accept(node, StepOutputs(no_logits, chosen=chosen)).bonus_token == expected
            )
    return certain


@NEEDS_TRITON
@settings(derandomize=True, deadline=None, max_examples=30)
@given(
    seed=st.one_of(st.integers(0, 2**63 - 1), st.sampled_from([0, 1, 2**63 - 1])),
    positions=st.lists(st.integers(0, 2**33), min_size=1, max_size=3),
    size=st.integers(1, 50),
    whole=st.booleans(),
)
def test_noise_is_that_of_the_host(seed: int, positions: list[int], size: int, whole: bool) -> None:
    """The noise is the same if each token has a column, and if only every third token has a
    column."""
    from eesd.runtime.decoding.device_noise import noisy_best

    scores = torch.zeros((len(positions), size), dtype=torch.float64, device=DEVICE)
    tokens = np.arange(size) * (1 if whole else 3)
    places, own = (device_sampler.to_device(values, DEVICE) for values in (positions, tokens))
    values, columns = noisy_best(scores, seed, places, None if whole else own, size)
    for row, position in enumerate(positions):
        noise = GumbelNoise(seed, 3 * size).at(position)[tokens]
        best = np.argsort(-noise, kind="stable")
        assert columns[row].tolist() == best.tolist()
        np.testing.assert_allclose(values[row].cpu().numpy(), noise[best], rtol=1e-12, atol=1e-13)


@NEEDS_TRITON
def test_the_verifiers_tokens_are_those_of_the_host() -> None:
    @settings(derandomize=True, deadline=None, max_examples=200)
    @given(
        options=OPTIONS,
        seed=st.integers(0, 10**6),
        size=st.sampled_from([7, 97, 4096]),
        narrow=st.booleans(),
    )
    def check(options: Sampling, seed: int, size: int, narrow: bool) -> None:
        if not options.greedy or options.repetition_penalty != 1:
            counts.append(check_targets(options, random_logits(seed, 3, size, narrow)))

    counts: list[int] = []
    check()
    assert sum(counts) > 0.98 * 3 * len(counts), "the host should rarely have to choose"


@pytest.mark.parametrize("narrow", [False, True])
def test_a_large_vocabulary_changes_nothing(narrow: bool) -> None:
    for seed, sampling in enumerate(ON_DEVICE.values()):
        assert check_targets(sampling, random_logits(seed, 2, 128_000, narrow)) == 2


@NEEDS_TRITON
def test_what_rounding_could_decide_is_left_to_the_host() -> None:
    """A nucleus of one half contains two or three of four equal tokens, depending on the last bit
    of a sum."""
    logits = np.full((2, 4), -30, np.float32)
    logits[:, :4] = np.log(np.array([0.25] * 4, np.float32))
    certain = [
        check_targets(Sampling(temperature=1.0, top_p=0.5, seed=seed), logits) for seed in range(40)
    ]
    assert 0 < sum(certain) < 80


@NEEDS_TRITON
def test_scores_that_nearly_tie_are_left_to_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_sampler, "NEAR", 0.5)
    certain = [
        check_targets(Sampling(temperature=1.0, seed=seed), random_logits(seed, 2, 97, False))
        for seed in range(40)
    ]
    assert 20 < sum(certain) < 75


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize(
    "sampling",
    [
        pytest.param(Sampling(temperature=1.0, top_p=0.9), marks=NEEDS_TRITON),
        Sampling(repetition_penalty=1.3),
    ],
)
def test_logits_that_are_not_finite_are_left_to_the_host(sampling: Sampling, value: float) -> None:
    """The host refuses these logits."""
    sampler = make_sampler(sampling, 97)
    nodes = chain([])
    sampler.begin_round(COMMITTED)
    logits = random_logits(0, 1, 97, False)
    logits[0, 5] = value
    chosen = on_device(sampler, nodes, logits, 0)
    assert chosen[0, 1] == 0
    with pytest.raises(EESDError, match="not finite"):
        sampler.accept(nodes[0], StepOutputs(logits, chosen=chosen))


def close(ours: list[Proposal], theirs: list[Proposal]) -> bool:
    """Returns whether the proposals are the same up to rounding."""
    same = [one.token for one in ours] == [other.token for other in theirs]
    return same and np.allclose(
        [one[1:] for one in ours], [other[1:] for other in theirs], rtol=1e-9, atol=1e-9
    )


def check_drafts(sampling: Sampling, columns: DraftColumns, seed: int) -> None:
    """Check in two rounds that the draft's proposals are the proposals of the host. More tokens
    precede the second round."""
    host, device = (make_sampler(sampling, 97, columns) for _ in range(2))
    for tokens in (COMMITTED, [*COMMITTED, 9, 8, 7]):
        nodes = chain([2, 60, 1])
        logits = random_logits(seed, 4, 97 if columns is WHOLE else len(DRAFT_VOCAB), narrow=False)
        for sampler in (host, device):
            sampler.begin_round(tokens)
        for count in (1, 4):
            chosen = on_device(device, nodes, logits, count)
            for row, node in enumerate(nodes):
                theirs = host.propose(node, StepOutputs(logits), row, count)
                assert close(
                    device.propose(node, StepOutputs(no_logits, chosen=chosen), row, count), theirs
                )


@pytest.mark.parametrize(
    "columns", [WHOLE, DraftColumns(DRAFT_VOCAB)], ids=["whole", "draft vocabulary"]
)
@pytest.mark.parametrize("name", ON_DEVICE)
def test_drafts_are_those_of_the_host(name: str, columns: DraftColumns) -> None:
    for seed in range(20):
        check_drafts(replace(SAMPLINGS[name], seed=seed), columns, seed)


def test_plain_greedy_and_constraints_do_not_choose_there() -> None:
    """In plain greedy decoding, the engine itself gives the best token. If there are constraints,
    the host chooses the token."""
    for sampler in (
        make_sampler(Sampling(), 97),
        make_sampler(Sampling(temperature=1.0), 97, allowed=lambda _: None),
        make_sampler(Sampling(temperature=1.0, method="rejection"), 97),
    ):
        assert sampler.chooser(chain([]), 0) is None


def choosing_llm(harness: Harness, speculation: Speculation | None) -> LLM:
    """An LLM of the torch engine whose tokens are chosen as on a GPU."""
    manifest = load_manifest(harness.directory)
    verify, draft = open_torch(harness.directory, manifest, 1, speculation is not None, "cpu")
    for engine in (verify, draft):
        if engine is not None:
            engine.chooses = True
    return LLM(harness.directory, manifest, Engines(verify, draft), speculation)


DRAFTING = {
    "none": None,
    "default": Speculation(),
    "wide budget": Speculation("cost-aware-ts", 3, guard=False),
    "fixed": Speculation("fixed:k=4", guard=False),
    "tree": Speculation("calibration-ts", 2, guard=False, drafter="exit"),
}
PROMPT = [60, 2, 44, 44, 17, 8, 90, 31, 5, 5, 71, 12]


@pytest.mark.parametrize("drafting", DRAFTING)
@pytest.mark.parametrize("reduced", [False, True], ids=["whole", "draft vocabulary"])
def test_generations_are_those_of_the_host(
    harness: Harness,
    reduced_harness: Harness,
    monkeypatch: pytest.MonkeyPatch,
    drafting: str,
    reduced: bool,
) -> None:
    """Logits never leave the device."""
    monkeypatch.setattr(
        forward_step, "fetch", lambda *_: pytest.fail("logits were copied to the host")
    )
    used = reduced_harness if reduced else harness
    plain = eesd.load(used.directory, "ort", speculation=None, threads=1)
    llm = choosing_llm(used, DRAFTING[drafting])
    for name, sampling in ON_DEVICE.items():
        expected = plain.generate(PROMPT, sampling, max_new_tokens=30, ignore_eos=True)
        made = llm.generate(PROMPT, sampling, max_new_tokens=30, ignore_eos=True)
        assert made.tokens == expected.tokens, name
        assert (
            llm.generate(PROMPT, sampling, max_new_tokens=30, draft=False, ignore_eos=True).tokens
            == expected.tokens
        )


@pytest.mark.parametrize(
    ("name", "value"), [("NEAR", 0.3), ("NEAR", np.inf), ("makes_noise", lambda _: False)]
)
def test_choices_of_the_host_do_not_change_a_generation(
    harness: Harness, monkeypatch: pytest.MonkeyPatch, name: str, value: Any
) -> None:
    monkeypatch.setattr(device_sampler, name, value)
    expected = eesd.load(harness.directory, "ort", speculation=None, threads=1)
    llm = choosing_llm(harness, Speculation("fixed:k=4", guard=False))
    for sampling in SAMPLINGS.values():
        tokens = expected.generate(PROMPT, sampling, max_new_tokens=40, ignore_eos=True).tokens
        assert llm.generate(PROMPT, sampling, max_new_tokens=40, ignore_eos=True).tokens == tokens


@NEEDS_TRITON
def test_an_observer_still_sees_logits(harness: Harness) -> None:
    llm = choosing_llm(harness, Speculation("fixed:k=4", guard=False))
    seen = []
    llm.observer = lambda tokens, logits: seen.append(logits.shape[0] == len(tokens))
    llm.generate(PROMPT, SAMPLINGS["coupled"], max_new_tokens=20, ignore_eos=True)
    assert seen and all(seen)


def with_others(
    owner: Any, name: str, change: Callable[..., Any]
) -> Callable[[pytest.MonkeyPatch], None]:
    """Return a patch that calls a method with changed arguments."""
    original = getattr(owner, name)
    return lambda patch: patch.setattr(
        owner, name, lambda *arguments: original(*change(*arguments))
    )


def noise_by_column(patch: pytest.MonkeyPatch) -> None:
    original = device_sampler.DeviceSampler.__init__

    def init(self: Any, *given: Any) -> None:
        original(self, *given)
        self._tokens = {DEVICE: None}

    patch.setattr(device_sampler.DeviceSampler, "__init__", init)


@NEEDS_TRITON
@pytest.mark.parametrize(
    "mistake",
    [
        with_others(
            device_sampler.DeviceSampler,
            "_noisiest",
            lambda own, x, at, count: (own, x, at[:1] * len(at), count),
        ),
        with_others(
            device_sampler._Seen,
            "mask",
            lambda own, tokens, paths: (own, tokens, [[] for _ in paths]),
        ),
        with_others(
            device_sampler._Seen, "mask", lambda own, tokens, paths: (own, tokens[:5], paths)
        ),
        noise_by_column,
    ],
    ids=["noise of the root", "paths forgotten", "committed forgotten", "noise by column"],
)
def test_a_mistake_is_noticed(mistake: Callable[[pytest.MonkeyPatch], None]) -> None:
    with pytest.MonkeyPatch.context() as patch, pytest.raises(AssertionError):
        mistake(patch)
        for seed in range(30):
            sampling = Sampling(temperature=1.0, repetition_penalty=3.0, seed=seed)
            check_targets(sampling, random_logits(seed, 3, 7, narrow=False))
            check_drafts(sampling, DraftColumns(DRAFT_VOCAB), seed)
