"""Tests that a request has the same tokens, text, log-probabilities and rounds through the API and
through the batch."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import islice
from operator import ge
from pathlib import Path
from queue import SimpleQueue
from threading import Event
from typing import Any

import pytest

from eesd import (
    BatchOptions,
    Completion,
    EESDError,
    Request,
    Sampling,
    Service,
    Update,
    make_constraint,
)
from eesd.runtime.llm import LLM, Speculation, load

GREEDY = Sampling()
COUPLED = Sampling(temperature=0.9, seed=3)
REJECTION = Sampling(temperature=0.8, seed=4, method="rejection")
PROMPT = "one, two, one, two, one, "
SHAPES = {
    "chain": Speculation("fixed:k=3", guard=False, drafter="exit"),
    "tree": Speculation("fixed:k=3", tree=3, guard=False, drafter="exit"),
    "tree and text": Speculation("fixed:k=3", tree=3, guard=False),
    "learned": Speculation(),
}


@pytest.fixture(scope="module")
def model(engine: Path) -> LLM:
    return load(engine, "ort", threads=1)


@pytest.fixture(scope="module", params=SHAPES)
def doors(model: LLM, request: pytest.FixtureRequest) -> Iterator[tuple[LLM, Service]]:
    """Yields an LLM, and a service that runs an equal LLM. The LLM and the service each learn only
    from their own requests."""
    speculation = SHAPES[request.param]
    service = Service(model.with_speculation(speculation), BatchOptions(max_rows=3))
    yield model.with_speculation(speculation), service
    service.close()


def through_both(
    doors: tuple[LLM, Service], sampling: Sampling, regex: str = "", **options: Any
) -> Completion:
    """Returns the completion, after a check that the service gives an equal completion."""
    llm, service = doors
    found = []
    for served in (False, True):
        asked: dict[str, Any] = {"max_new_tokens": 40, "ignore_eos": True, **options}
        if regex:
            asked["constraint"] = make_constraint("regex", regex, llm)
        request = llm.request(PROMPT, sampling, **asked)
        found.append(
            service.generate(request) if served else llm.generate(PROMPT, sampling, **asked)
        )
    alone, other = found
    fields = ("text", "tokens", "finish_reason", "logprobs", "prompt_logprobs")
    assert [getattr(alone, name) for name in fields] == [getattr(other, name) for name in fields]
    # There is no text, and nothing is learned.
    if llm.speculation == SHAPES["chain"] or sampling.method == "rejection":
        assert (alone.stats.rounds, alone.stats.draft_tokens) == (
            other.stats.rounds,
            other.stats.draft_tokens,
        )
    return alone


@pytest.mark.parametrize(
    "sampling", [GREEDY, COUPLED, REJECTION], ids=["greedy", "coupled", "rejection"]
)
def test_every_option_gives_the_same_through_both(
    doors: tuple[LLM, Service], sampling: Sampling
) -> None:
    plain = through_both(doors, sampling)
    assert len(plain.tokens) == 40 and plain.logprobs is None
    logged = through_both(doors, sampling, logprobs=2, prompt_logprobs=1)
    assert logged.tokens == plain.tokens and logged.logprobs and logged.prompt_logprobs
    assert [one.token for one in logged.logprobs] == plain.tokens and len(
        logged.prompt_logprobs
    ) == len(doors[0].encode(PROMPT))
    assert through_both(doors, sampling, regex="[ab]{5,60}").text.strip("ab") == ""
    longer = through_both(doors, sampling, regex="[ab]{1,60}", min_tokens=12, ignore_eos=False)
    assert len(longer.tokens) >= 12


def endings(llm: LLM) -> Iterator[tuple[str, list[int] | str, dict[str, Any]]]:
    """Yields ways in which a text can end. Each has the reason, the prompt and the options."""
    whole = llm.generate(PROMPT, draft=False, max_new_tokens=40, ignore_eos=True)
    for at in range(1, 20, 2):
        yield "stop", PROMPT, {"stop_token_ids": (whole.tokens[at],)}
        yield "stop", PROMPT, {"stop": whole.text[at : at + 3]}
    for most in range(1, 8):
        yield "length", PROMPT, {"max_new_tokens": most}
    yield "length", [*llm.encode(PROMPT) * 99][: llm.manifest.max_seq_len - 9], {}
    yield "stop", PROMPT, {"constraint": "(ab){5}", "ignore_eos": False}


def check_counts(updates: Sequence[Update], prompt: Sequence[int]) -> list[int]:
    """The statistics count exactly the reported tokens. Returns the tokens."""
    outputs = [output for update in updates for output in update.tokens]
    stats = updates[-1].stats
    drafted = [output.source for output in outputs if output.source != "verify"]
    assert (stats.prompt_tokens, stats.new_tokens) == (len(prompt), len(outputs))
    assert (
        stats.accepted_tokens == len(drafted) == sum(stats.accepted_at_depth) <= stats.draft_tokens
    )
    assert stats.accepted_text_tokens == drafted.count("text")
    bonus = sum(update.tokens[-1].source == "verify" for update in updates if update.tokens)
    assert stats.new_tokens == stats.accepted_tokens + bonus and stats.rounds == sum(
        bool(update.tokens) for update in updates
    )
    assert all(map(ge, stats.verified_at_depth, stats.accepted_at_depth))
    assert all(map(ge, stats.accepted_at_depth, stats.verified_at_depth[1:]))
    return [output.token for output in outputs]


def served_updates(service: Service, request: Request) -> list[Update]:
    told = SimpleQueue[Update]()
    service.submit(request, told.put)
    updates = [told.get(timeout=30)]
    while updates[-1].finish_reason is None:
        updates.append(told.get(timeout=30))
    return updates


def test_what_is_counted_is_what_came_however_a_text_ends(doors: tuple[LLM, Service]) -> None:
    llm, service = doors
    for reason, prompt, options in endings(llm):
        counts = []
        for served, draft in ((False, False), (False, True), (True, False), (True, True)):
            asked: dict[str, Any] = {"max_new_tokens": 40, "ignore_eos": True, **options}
            if "constraint" in asked:
                asked["constraint"] = make_constraint("regex", options["constraint"], llm)
            request = llm.request(prompt, draft=draft, **asked)
            updates = served_updates(service, request) if served else [*llm.run(request)]
            counts.append(check_counts(updates, request.tokens))
            assert updates[-1].finish_reason == reason
        assert all(one == counts[0] for one in counts), options


@pytest.mark.parametrize("reason", ["deadline", "cancelled"])
def test_what_is_counted_is_what_came_before_a_text_was_ended(
    doors: tuple[LLM, Service], reason: str
) -> None:
    llm, service = doors
    updates: list[Update] = []
    ended = Event()
    begun = Event()

    def see(update: Update) -> None:
        updates.append(update)
        begun.set()
        if update.finish_reason:
            ended.set()

    request = llm.request(PROMPT, max_new_tokens=10**6, ignore_eos=True)
    generation = service.submit(
        replace(request, seconds=0.02) if reason == "deadline" else request, see
    )
    assert begun.wait(30)
    if reason == "cancelled":
        generation.cancel()
    assert ended.wait(30) and updates[-1].finish_reason in (reason, "length")
    check_counts(updates, request.tokens)
    alone = [*islice(llm.run(replace(request, seconds=0.02 if reason == "deadline" else None)), 30)]
    check_counts(alone, request.tokens)


def test_a_tree_is_drafted_for_a_request_alone_in_a_service(model: LLM) -> None:
    service = Service(model.with_speculation(SHAPES["tree"]), BatchOptions(max_rows=3))
    stats = service.generate(model.request(PROMPT, max_new_tokens=8, ignore_eos=True)).stats
    service.close()
    assert stats.draft_tokens > stats.draft_steps


def test_a_deadline_ends_a_request_with_what_it_has(model: LLM) -> None:
    found = model.generate(PROMPT, max_new_tokens=200, ignore_eos=True, seconds=1e-9)
    assert found.finish_reason == "deadline" and found.tokens == []
    with pytest.raises(EESDError, match="seconds"):
        model.generate(PROMPT, seconds=-1)
