"""Requests for a batch, and the results of these requests without a batch."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from eesd.runtime.batch.scheduler import BatchOptions, Scheduler
from eesd.runtime.decoding.sampling import Sampling
from eesd.runtime.llm import LLM, Speculation
from eesd.runtime.request import Generation, Request, Update

SAMPLINGS = (
    Sampling(),
    Sampling(temperature=0.9, seed=3),
    Sampling(temperature=0.8, seed=4, method="rejection", top_p=0.9),
    Sampling(temperature=1.0, seed=5, top_k=20, repetition_penalty=1.2),
)
OPTIONS = BatchOptions(max_rows=5, prefill_tokens=16, prefix_memory=1 << 20)


class Record:
    """Collects the updates of a request."""

    def __init__(self) -> None:
        self.updates: list[Update] = []
        self.logits: list[NDArray[np.float32]] = []

    def __call__(self, update: Update) -> None:
        assert not self.updates or self.updates[-1].finish_reason is None, (
            "told something behind the end"
        )
        self.updates.append(update)

    @property
    def tokens(self) -> list[int]:
        return [output.token for update in self.updates for output in update.tokens]

    @property
    def reason(self) -> str | None:
        return self.updates[-1].finish_reason if self.updates else None


def alone(llm: LLM, request: Request) -> list[int]:
    """Returns the request's tokens without a batch. With rejection sampling, they depend on the
    draft lengths."""
    rejection = request.sampling.method == "rejection" and request.draft
    other = llm.with_speculation(Speculation(guard=False, drafter="exit") if rejection else None)
    completion = other.generate(
        request.tokens,
        request.sampling,
        max_new_tokens=request.max_new_tokens,
        ignore_eos=request.ignore_eos,
        draft=rejection,
    )
    return completion.tokens


def requests(count: int, seed: int = 0) -> Iterator[Request]:
    """Yields requests with every kind of sampling. Their prompts are short or long, and some
    prompts have a common beginning."""
    random = np.random.default_rng(seed)
    shared = random.integers(0, 97, 80).tolist()
    for number in range(count):
        own = random.integers(0, 97, int(random.choice([1, 3, 20, 90]))).tolist()
        yield Request(
            tokens=[*shared[: 32 * int(random.integers(0, 3))], *own],
            sampling=replace(SAMPLINGS[number % 4], seed=number),
            max_new_tokens=int(random.choice([1, 5, 30, 60])),
            ignore_eos=bool(random.integers(0, 2)),
            draft=bool(random.random() < 0.8),
        )


def run(scheduler: Scheduler, given: Sequence[Request], every: int = 0) -> list[Record]:
    """Run requests. A new request begins at each ``every``-th step."""
    records = [Record() for _ in given]
    waiting = [Generation(request, record) for request, record in zip(given, records, strict=True)]
    steps = 0
    while waiting or scheduler.waiting or scheduler.running or scheduler.prefilling:
        while waiting and steps >= every:
            scheduler.check(waiting[0])
            scheduler.add(waiting.pop(0))
            steps = 0 if every else steps
        scheduler.step()
        steps += 1
    return records


def logprobs(llm: LLM, levels: int | None, rows: int, chunk: int) -> tuple[list[Any], list[Any]]:
    """Returns the log-probabilities of the tokens (sorted) and of the prompts of two requests,
    which run in a batch of ``rows`` rows."""
    base = Request(tokens=[], max_new_tokens=20, ignore_eos=True, logprobs=5, prompt_logprobs=3)
    given = [replace(base, tokens=list(range(1, 40 + n))) for n in (0, 7)]
    options = BatchOptions(max_rows=rows, prefill_tokens=chunk, prefix_memory=0, levels=levels)
    updates = [
        update for record in run(Scheduler(llm, options), given) for update in record.updates
    ]
    outputs = [output.logprob for update in updates for output in update.tokens]
    return sorted(outputs, key=repr), [
        one.prompt_logprobs for one in updates if one.prompt_logprobs
    ]


def arrive_at_random(llm: LLM, count: int) -> list[Record]:
    """Run requests that arrive and are cancelled at random. There is little memory, so the
    requests wait for rows and for memory.

    Each request gets the tokens that it gets without a batch, or a prefix of them.
    """
    random = np.random.default_rng(1)
    scheduler = Scheduler(llm, replace(OPTIONS, kv_memory=2_000_000, prefix_memory=300_000))
    started: list[tuple[Generation, Record]] = []
    for request in requests(count, seed=2):
        record = Record()
        generation = Generation(request, record)
        scheduler.check(generation)
        scheduler.add(generation)
        started.append((generation, record))
        for _ in range(int(random.integers(0, 4))):
            scheduler.step()
        if random.random() < 0.5:
            started[int(random.integers(0, len(started)))][0].cancel()
    while scheduler.step():
        pass
    for generation, record in started:
        expected = alone(llm, generation.request)
        assert record.tokens == expected[: len(record.tokens)]
        assert record.reason == "cancelled" or record.tokens == expected
    assert scheduler.running == scheduler.prefilling == 0 and scheduler.kv_used == 0
    return [record for _, record in started]


def few(count: int) -> list[Request]:
    """Returns short and long requests whose tokens do not depend on the lengths of drafts."""
    given = [
        request
        for request in requests(60)
        if request.sampling.method != "rejection" and len(request.tokens) < 60
    ]
    return [
        replace(request, max_new_tokens=min(request.max_new_tokens, 12))
        for request in given[:count]
    ]


def check_pauses(
    llm: LLM,
    rows: int = 5,
    levels: int | None = None,
    samplings: Sequence[Sampling] = SAMPLINGS,
) -> None:
    """Check that requests pause if memory runs out, the youngest request first. Later they continue
    with the tokens that they have alone, and with the log-probabilities that they have in a batch
    that has enough memory and drafts nothing. Nothing is refused."""
    slot = llm.engines.verify.new_kv_caches()[0].slot_bytes
    options = replace(OPTIONS, max_rows=rows, prefix_memory=0, levels=levels)
    memory = (260 + 2 * llm.manifest.max_tree_nodes) * slot
    given = [
        Request(
            tokens=list(range(1, 20 + 30 * (number % 3))),
            sampling=replace(samplings[number % len(samplings)], seed=number),
            max_new_tokens=(8, 150)[number % 2],  # after short texts, short texts are expected
            ignore_eos=True,
            logprobs=2,
            prompt_logprobs=1,
        )
        for number in range(2 * rows + 2)
    ]
    scheduler = Scheduler(llm, replace(options, kv_memory=memory))
    most = 0.0
    records = [Record() for _ in given]
    for request, record in zip(given, records, strict=True):
        generation = Generation(request, record)
        scheduler.check(generation)
        scheduler.add(generation)
    while scheduler.step():
        most = max(most, scheduler.kv_used)
    assert scheduler.pauses > 1 and 0.5 < most <= 1, (scheduler.pauses, most)
    for request, record in zip(given, records, strict=True):
        assert record.tokens == alone(llm, request) and record.reason == "length"
        [prompt] = [update.prompt_logprobs for update in record.updates if update.prompt_logprobs]
        assert [one.token for one in prompt] == list(request.tokens)
    # With rejection sampling, the tokens depend on the drafts.
    plain = [replace(one, draft=one.sampling.method == "rejection") for one in given]
    for record, other in zip(records, run(Scheduler(llm, options), plain), strict=True):
        assert [output.logprob for update in record.updates for output in update.tokens] == [
            output.logprob for update in other.updates for output in update.tokens
        ]
        assert [u.prompt_logprobs for u in record.updates if u.prompt_logprobs] == [
            u.prompt_logprobs for u in other.updates if u.prompt_logprobs
        ]
