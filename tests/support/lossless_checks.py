"""Functions that check losslessness. The tests call them with the runtime, and the mutation tests
call them with a broken runtime.

The expected distributions come from plain, slow code in this file, which shares nothing with the
runtime.
"""

import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.stats import chi2

from eesd.common.draft_vocab import WHOLE, DraftColumns
from eesd.controllers import Controller, make_controller
from eesd.controllers.text_rule import TextRule
from eesd.controllers.tree_budget import TreeBudget
from eesd.runtime.batch.scheduler import BatchOptions
from eesd.runtime.batch.service import Service
from eesd.runtime.compare import LogitRecord
from eesd.runtime.decoding.draft_tree import DraftTree, Node
from eesd.runtime.decoding.round import EACH_ALONE, Round, TokenSequence, draft, run_round
from eesd.runtime.decoding.samplers import Rejection, make_sampler
from eesd.runtime.decoding.sampling import Sampling
from eesd.runtime.decoding.stats import Stats
from eesd.runtime.engines.base import StepOutputs
from eesd.runtime.llm import LLM, Options, Speculation, load
from eesd.runtime.prefix_cache import BLOCK
from eesd.runtime.session import Session
from support.harness import Harness, Workspace, finish, generated, recording_drafts, without_budget

Vector = NDArray[np.float64]
Joint = Mapping[tuple[int, ...], float]

HEADS_DRAFT = [
    Speculation("fixed:k=3", guard=False, drafter="exit"),
    Speculation("fixed:k=3", tree=3, guard=False, drafter="exit"),
    Speculation(tree=2),
    Speculation(),
]
"""Ways of drafting with a head."""
PROMPTS = [
    [5, 9, 3],
    [1],
    [60, 2, 44, 44, 17, 8, 90, 31, 5, 5, 71, 12, 13, 14, 15, 16, 17, 18, 96, 0],
]

GREEDY = Sampling()

SAMPLINGS = {
    "greedy": GREEDY,
    "greedy-penalty": Sampling(repetition_penalty=1.3),
    "T0.7": Sampling(temperature=0.7, seed=1),
    "T1": Sampling(temperature=1.0, seed=2),
    "T1-top-p-top-k": Sampling(temperature=1.0, top_p=0.8, top_k=12, seed=3),
    "T1-min-p-penalty": Sampling(temperature=1.0, min_p=0.1, repetition_penalty=1.2, seed=4),
}

LENGTH = 3
"""Number of new tokens whose joint distribution is enumerated."""
P_VALUE = 1e-3
TOLERANCE = 1e-4


def reference_probabilities(
    logits: NDArray[np.float32], sampling: Sampling, seen: Iterable[int] = ()
) -> Vector:
    """Apply the penalty, temperature, top-k, top-p and min-p in this order, directly from their
    definitions. The function assumes that there are no ties."""
    scores = logits.astype(np.float64)
    for token in set(seen):
        factor = sampling.repetition_penalty
        scores[token] = scores[token] / factor if scores[token] > 0 else scores[token] * factor
    scores /= sampling.temperature
    weights = np.exp(scores - scores.max())
    order = np.argsort(-weights)
    if sampling.top_k:
        weights[order[sampling.top_k :]] = 0
    weights /= weights.sum()
    before = 0.0
    for token in order:
        share = weights[token]
        weights[token] = weights[token] if before < sampling.top_p else 0
        before += share
    weights[weights < sampling.min_p * weights.max()] = 0
    total: Vector = weights / weights.sum()
    return total


def g_test(counts: Mapping[tuple[int, ...], int], expected: Joint) -> float:
    """Returns the p-value of the counts under the expected distribution, or 0 if anything
    impossible occurred. Rare cells are pooled."""
    draws = sum(counts.values())
    if any(expected.get(outcome, 0) == 0 for outcome in counts):
        return 0.0
    cells: list[list[float]] = [[0.0, 0.0]]
    for outcome, probability in sorted(expected.items(), key=lambda item: item[1]):
        if cells[-1][1] >= 5:
            cells.append([0.0, 0.0])
        cells[-1][0] += counts.get(outcome, 0)
        cells[-1][1] += probability * draws
    statistic = 2 * sum(seen * np.log(seen / wanted) for seen, wanted in cells if seen)
    return float(chi2.sf(statistic, len(cells) - 1))


def exact_joint(harness: Harness, prompt: Sequence[int], sampling: Sampling) -> Joint:
    """Returns the probability of every continuation of LENGTH tokens. It comes from plain verifier
    runs on each prefix."""
    joint: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(LENGTH):
        longer = {}
        for outcome, probability in joint.items():
            tokens = [*prompt, *outcome]
            p = reference_probabilities(harness.session(tokens).peek(), sampling, tokens)
            longer.update(
                {(*outcome, int(token)): probability * p[token] for token in np.flatnonzero(p)}
            )
        joint = longer
    return joint


def check_joint(
    harness: Harness,
    prompt: Sequence[int],
    sampling: Sampling,
    controller: Controller | None,
    width: int,
    draws: int = 2000,
    budget: TreeBudget | None = None,
    text: TextRule | None = None,
) -> None:
    """Check that sampled sequences have the verifier's distribution, and that drafting contributed
    to them."""
    counts: Counter[tuple[int, ...]] = Counter()
    accepted = judged = 0
    for seed in range(draws):
        session = harness.session(
            prompt,
            replace(sampling, seed=seed),
            controller,
            width,
            new_tokens=LENGTH,
            budget=budget,
            text=text,
        )
        counts[tuple(generated(session))] += 1
        accepted += session.stats.accepted_tokens
        judged += sum(session.stats.verified_at_depth)
    assert 0.1 * judged < accepted < 0.95 * judged, "acceptance and rejection must both occur"
    p_value = g_test(counts, exact_joint(harness, prompt, sampling))
    assert p_value > P_VALUE, (
        f"the samples do not follow the verifier's distribution (p = {p_value:.1e})"
    )


class MadeUp:
    """Invented distributions for every context of at most LENGTH - 1 tokens. The verifier has the
    distribution p, and the draft has the distribution q."""

    def __init__(self, vocab_size: int, seed: int, draft_vocab: Sequence[int] = ()) -> None:
        self.draft_vocab = np.array(draft_vocab or range(vocab_size))
        random = np.random.default_rng(seed)
        contexts = [
            context for n in range(LENGTH) for context in product(range(vocab_size), repeat=n)
        ]
        self.p = {context: random.dirichlet(np.ones(vocab_size)) for context in contexts}
        self.q = {context: random.dirichlet(self.p[context] * 4 + 0.2) for context in contexts}
        self.vocab_size = vocab_size

    def joint(self) -> Joint:
        outcomes = product(range(self.vocab_size), repeat=LENGTH)
        return {o: float(np.prod([self.p[o[:n]][o[n]] for n in range(LENGTH)])) for o in outcomes}

    def rows(
        self, table: Mapping[tuple[int, ...], Vector], nodes: Iterable[Node]
    ) -> NDArray[np.float32]:
        """Returns the logits [nodes, V] that follow the given nodes."""
        return np.log(np.stack([table[tuple(node.path())] for node in nodes]) + 1e-30).astype(
            np.float32
        )

    def round(self, seed: int, width: int) -> list[int]:
        """Run one round of the sampler alone, without an engine or a session. The round has two
        levels."""
        columns = DraftColumns(self.draft_vocab)
        sampler = Rejection(Sampling(temperature=1.0, method="rejection", seed=seed), columns)
        tree = DraftTree(0, max_nodes=width + width**2, width=width**2)
        sampler.begin_round([0])
        for _ in range(LENGTH - 1):
            outputs = StepOutputs(self.rows(self.q, tree.frontier)[:, self.draft_vocab])
            tree.grow(
                [
                    sampler.propose(node, outputs, row, width)
                    for row, node in enumerate(tree.frontier)
                ]
            )
        path, bonus = sampler.accept(tree.root, StepOutputs(self.rows(self.p, tree.prune())))
        return [*(node.token for node in path), bonus]


def check_sampler(
    width: int, vocab_size: int = 4, draws: int = 6000, draft_vocab: Sequence[int] = ()
) -> None:
    """Check that rounds of rejection sampling follow p's joint distribution. Each round is
    completed to LENGTH tokens from p."""
    made_up = MadeUp(vocab_size, width, draft_vocab)
    random = np.random.default_rng(0)
    counts: Counter[tuple[int, ...]] = Counter()
    for seed in range(draws):
        tokens = tuple(made_up.round(seed, width))
        while len(tokens) < LENGTH:
            tokens = (*tokens, int(random.choice(vocab_size, p=made_up.p[tokens])))
        counts[tokens] += 1
    p_value = g_test(counts, made_up.joint())
    assert p_value > P_VALUE, f"the sampler does not follow p (p = {p_value:.1e})"


DRAFT_VOCAB = np.array([token for token in range(97) if token % 5])
"""The token ids of a draft vocabulary, which has 77 of the 97 tokens. Column i is rarely token
i."""


def check_reduced_proposals(sampling: Sampling, count: int) -> None:
    """Check that a draft vocabulary gives the same proposals as the whole vocabulary if the logits
    of all other tokens are -inf."""
    random = np.random.default_rng(0)
    seen = [5, 9, 3, 60, 61, 62, 63]
    node = Node(3)
    samplers = [
        make_sampler(sampling, 97, columns) for columns in (DraftColumns(DRAFT_VOCAB), WHOLE)
    ]
    for _ in range(20):
        reduced = 3 * random.standard_normal((1, len(DRAFT_VOCAB))).astype(np.float32)
        whole = np.full((1, 97), -np.inf, np.float32)
        whole[:, DRAFT_VOCAB] = reduced
        proposals = []
        for sampler, logits in zip(samplers, (reduced, whole), strict=True):
            sampler.begin_round(seen)
            proposals.append(sampler.propose(node, StepOutputs(logits), 0, count))
        assert (
            proposals[0] and not np.isin([p.token for p in proposals[0]], np.arange(0, 97, 5)).any()
        )
        np.testing.assert_allclose(
            np.array(proposals[0]), np.array(proposals[1]), rtol=0, atol=1e-9
        )
        seen = [*seen, proposals[0][0].token]


def check_draft_ids(harness: Harness, prompt: Sequence[int]) -> None:
    """The candidates of the draft are the tokens of its best columns."""
    outputs = harness.fresh_prefill(prompt).drafted(prompt[-1:], len(prompt) - 1)
    assert outputs.topk_ids is not None and outputs.logits.shape == (1, len(DRAFT_VOCAB))
    best = DRAFT_VOCAB[np.argsort(-outputs.logits[0])[: outputs.topk_ids.shape[1]]]
    np.testing.assert_allclose(outputs.topk_ids[0], best)


def check_same_tokens(
    harness: Harness,
    prompt: Sequence[int],
    sampling: Sampling,
    controller: Controller | None,
    width: int,
    new_tokens: int = 40,
    budget: TreeBudget | None = None,
    text: TextRule | None = None,
) -> Stats:
    """Check that drafting changes nothing while the cache grows. Returns the statistics of the
    drafting run.

    The function also compares the logits after every committed token. Chains change no bit. Trees
    change no bit on the default engine, and no more than rounding on other engines.
    """
    expected = LogitRecord()
    found = LogitRecord(expected)
    plain = harness.session(prompt, sampling, new_tokens=new_tokens, observer=expected)
    generated(plain)
    workspace = harness.workspace()
    drafting = harness.session(
        prompt,
        sampling,
        controller,
        width,
        new_tokens=new_tokens,
        workspace=workspace,
        budget=budget,
        observer=found,
        text=text,
    )
    assert generated(drafting) == generated(plain), (
        f"drafting changed the tokens ({sampling}, width {width})"
    )
    logits = found.result
    assert logits.positions == plain.stats.new_tokens
    rounds = (width > 1 or budget) and not harness.exact_trees
    assert logits.largest < TOLERANCE if rounds else logits.differing == 0, (
        f"drafting changed the logits: {logits}"
    )
    assert drafting.finish_reason == plain.finish_reason
    return drafting.stats


def cache_of(workspace: Workspace, tokens: Sequence[int]) -> NDArray[Any]:
    return workspace.kv_cache.values(0, len(tokens) - 1)


def check_cache(
    harness: Harness,
    prompt: Sequence[int],
    sampling: Sampling,
    controller: Controller | None,
    width: int,
    budget: TreeBudget | None = None,
    text: TextRule | None = None,
) -> None:
    """Check that after each round, all L + E caches equal the caches of a prefill of the same
    tokens."""
    workspace = harness.workspace()
    session = harness.session(
        prompt,
        sampling,
        controller,
        width,
        new_tokens=24,
        workspace=workspace,
        budget=budget,
        text=text,
    )
    while session.finish_reason is None:
        session.step()
        expected = cache_of(harness.fresh_prefill(session.tokens), session.tokens)
        np.testing.assert_allclose(
            cache_of(workspace, session.tokens), expected, rtol=0, atol=TOLERANCE
        )
    assert session.stats.accepted_tokens


def drafted(
    harness: Harness,
    prompt: Sequence[int],
    controller: Controller,
    width: int,
    budget: TreeBudget | None = None,
    workspace: Workspace | None = None,
) -> DraftTree:
    """Returns the tree that the first round drafts greedily."""
    parts = workspace or harness.workspace()
    session = harness.session(
        prompt, controller=controller, width=width, workspace=parts, budget=budget
    )
    current = Round(session, session.drafting)
    current.begin()
    draft([current], EACH_ALONE)
    return current.tree


def drafted_logits(
    harness: Harness, prompt: Sequence[int], controller: Controller, width: int
) -> tuple[DraftTree, dict[int, NDArray[np.float32]]]:
    """Returns the tree of the first round, and a dict from the index of each node to the draft's
    logits."""
    workspace, logits = recording_drafts(harness.workspace())
    tree = drafted(harness, prompt, controller, width, workspace=workspace)
    return tree, {slot - (len(prompt) - 1): row for slot, row in logits.items()}


def check_tree_drafts(harness: Harness, prompt: Sequence[int], width: int) -> None:
    """Check the draft's logits at every node of a tree. They equal the logits after the same path
    in a plain chain."""
    tree, logits = drafted_logits(harness, prompt, make_controller("fixed:k=4"), width)
    assert tree.nodes[-1].depth < len(tree.nodes) - 1 and len(logits) == 1 + 3 * width
    for index, actual in logits.items():
        tokens = [*prompt, *tree.nodes[index].path()]
        end = len(tokens) - 1
        expected = harness.fresh_prefill(tokens).drafted(tokens[end:], end).logits[0]
        np.testing.assert_allclose(actual, expected, rtol=0, atol=TOLERANCE)


def interrupt_at_line(step: Callable[[], object], line: int) -> bool:
    """Call ``step``, and interrupt it at the ``line``-th line that it executes in the session or
    the round. Returns whether this line was reached."""
    left = line
    files = {
        part.__code__.co_filename
        for part in (Session.step, TokenSequence.call, Round.commit, run_round)
    }

    def trace(frame: FrameType, event: str, _: object) -> Any:
        nonlocal left
        if frame.f_code.co_filename not in files:
            return None
        if event == "line":
            left -= 1
            if left == 0:
                raise KeyboardInterrupt
        return trace

    previous = sys.gettrace()
    sys.settrace(trace)
    try:
        step()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(previous)
    return False


def check_interrupted_anywhere(make: Callable[[], Session], rounds: int) -> int:
    """Check that a step may be interrupted at every line. The session still counts its tokens
    correctly, and ends with the same tokens."""
    expected = generated(make())
    line = 1
    while True:
        session = make()
        for _ in range(rounds):
            session.step()
        if not interrupt_at_line(session.step, line):
            return line
        counted = session.stats.prompt_tokens + session.stats.new_tokens
        assert len(session.tokens) == counted, (
            f"an interrupt at line {line} of the step miscounted the tokens"
        )
        finish(session)
        assert session.tokens[session.stats.prompt_tokens :] == expected
        line += 1


def check_drafting(llm: LLM, speculation: Speculation, prompts: Sequence[list[int]]) -> int:
    """Check that drafting changes no token, whether decoding is greedy or sampled. Returns the
    number of accepted tokens."""
    accepted = 0
    for prompt, sampling in product(prompts, (Sampling(), Sampling(temperature=0.8, seed=3))):
        both = (llm.with_speculation(way) for way in (None, speculation))
        plain, found = (
            one.generate(prompt, sampling, max_new_tokens=40, ignore_eos=True) for one in both
        )
        assert found.tokens == plain.tokens
        accepted += found.stats.accepted_tokens
    return accepted


def check_kept_prefixes(directory: Path, backend: str, text: Sequence[int]) -> int:
    """Check that the same tokens are drafted and accepted with and without kept prefixes. This
    holds in a single session and in a service. It does not depend on the token that follows the
    kept tokens, or on whether a prompt or a generation left the prefixes. Returns the number of
    drafted tokens."""
    speculation = Speculation("fixed:k=3", tree=2, guard=False, drafter="exit")
    kept = load(directory, backend, threads=1, speculation=speculation, prefix_memory=1 << 22)
    alone = load(directory, backend, threads=1, speculation=speculation)
    without_budget(kept, alone)
    services = [
        Service(alone, BatchOptions(max_rows=1, prefix_memory=size)) for size in (1 << 22, 0)
    ]
    options: Options = {"max_new_tokens": 12, "ignore_eos": True}
    first = alone.generate(text, **options).tokens
    drafts = 0
    others = [[*text[:BLOCK], 3 + token, *text[:2]] for token in range(3)]
    for prompt in (text, text, *others, [*text, *first[:-1]], [*text, *first[:4], 7, 8]):
        request = alone.request(prompt, **options)
        rounds = [
            [(update.tokens, update.rejected) for update in llm.run(request)]
            for llm in (kept, alone)
        ]
        assert rounds[0] == rounds[1]
        found, expected = (service.generate(request) for service in services)
        assert found.tokens == expected.tokens and bool(found.cached_tokens) == (drafts > 0)
        counts = [
            (one.stats.draft_tokens, one.stats.accepted_at_depth) for one in (found, expected)
        ]
        assert counts[0] == counts[1]
        drafts += counts[0][0]
    for service in services:
        service.close()
    assert kept.prefixes.hits >= 6 * BLOCK
    return drafts
