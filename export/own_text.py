"""Text that a model writes by itself, with the engines of a directory and without any data, and how its drafts fare there.

A prompt is what the model writes after the beginning of its chat template's user turn (Magpie, Xu et al. 2024, arXiv
2406.08464), or without a template after its first token. After each prompt it writes once greedily and once at temperature 1.
Seeds are fixed and nothing asks the clock, so the same engines write the same text.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from eesd.common.errors import EESDError
from eesd.controllers.base import Controller, DraftStep, RoundOutcome
from eesd.export.prior import DraftedRound
from eesd.runtime.decoding.round import Drafter, Drafting, run_round
from eesd.runtime.decoding.sampling import Sampling, philox
from eesd.runtime.engines.base import KVCache
from eesd.runtime.llm import LLM
from eesd.runtime.request import Generation, Request
from eesd.runtime.session import Session
from eesd.runtime.text import TextCodec

MARK = "eesd-user-turn"
ROWS = 8
"""Prompts whose texts are written together: each reads the weights for all of them."""
PROMPT_TOKENS = 32
"""Most tokens that the model writes for a prompt."""
PROMPT_DRAFTS = 4
"""Drafts in a round that writes a prompt."""
FIRST_TOKENS = 4
"""Stream of random numbers that choose the first tokens of models without one."""


class OwnText(NamedTuple):
    """What a model wrote after one prompt.

    Attributes:
        prompt: Number of the prompt.
        greedy: Whether it was written greedily; else at temperature 1.
        rounds: Its rounds that drafted a whole chain.
    """

    prompt: int
    greedy: bool
    rounds: list[DraftedRound]


class Recorder(Controller):
    """Drafts chains of one length, and keeps what it is told about them.

    Attributes:
        rounds: What was drafted and accepted, without shorter chains.
    """

    def __init__(self, length: int) -> None:
        self._length = length
        self._steps: list[DraftStep] = []
        self.rounds: list[DraftedRound] = []

    def begin_round(self, width: int) -> None:
        self._steps = []

    def keep_drafting(self, step: DraftStep) -> bool:
        self._steps.append(step)
        return step.depth < self._length

    def observe(self, outcome: RoundOutcome) -> None:
        if len(self._steps) == self._length:
            self.rounds.append(DraftedRound(tuple(self._steps), outcome.accepted))


def around_turns(codec: TextCodec) -> tuple[str, str]:
    """What the chat template puts before and after a user's turn. Raises :class:`EESDError` if there is none."""
    opening, _, closing = codec.render([{"role": "user", "content": MARK}]).partition(MARK)
    return opening, closing


def write_texts(
    llm: LLM, lengths: Sequence[int], rounds: int, advance: Callable[[int], None] = lambda _: None
) -> list[OwnText]:
    """Let a model write prompts, and two texts after each.

    Args:
        llm: The model, loaded with its draft engine.
        lengths: Drafts in a round, for each prompt.
        rounds: Most rounds of a text.
        advance: Called with the number of prompts that are done.

    Returns:
        The greedy and the sampled text of each prompt.

    Raises:
        EESDError: A prompt does not fit the cache, or an engine fails.
    """
    texts: list[OwnText] = []
    for start in range(0, len(lengths), ROWS):
        numbers = range(start, min(start + ROWS, len(lengths)))
        caches = llm.engines.verify.new_kv_caches(len(numbers))
        for engine in (llm.engines.verify, llm.engines.draft):
            assert engine is not None
            engine.prepare(caches)
        prompts = _write_prompts(llm, numbers, caches)
        for temperature in (0.0, 1.0):
            recorders = [Recorder(lengths[number]) for number in numbers]
            samplings = [Sampling(temperature, seed=2 * number + 1) for number in numbers]
            _write(llm, prompts, caches, samplings, recorders, rounds)
            texts += [OwnText(number, not temperature, one.rounds) for number, one in zip(numbers, recorders, strict=True)]
        advance(len(numbers))
    return texts


def _write_prompts(llm: LLM, numbers: Sequence[int], caches: Sequence[KVCache]) -> list[list[int]]:
    """The prompts of these numbers."""
    manifest = llm.manifest
    closing: list[int] = []
    try:
        opening, closing = (llm.codec.ids(text, special=False) for text in around_turns(llm.codec))
        starts = [opening for _ in numbers]
    except EESDError:  # there is no tokenizer, or no template for a user's turn
        vocabulary = manifest.geometry.vocab_size
        first = [int(philox(0, FIRST_TOKENS, number).integers(vocabulary)) for number in numbers]
        starts = [[token if manifest.bos_token_id is None else manifest.bos_token_id] for token in first]
    ends = {*manifest.eos_token_ids, *closing[:1]}
    samplings = [Sampling(1.0, seed=2 * number) for number in numbers]
    recorders = [Recorder(min(PROMPT_DRAFTS, manifest.max_tree_nodes)) for _ in numbers]
    sessions = _write(llm, starts, caches, samplings, recorders, PROMPT_TOKENS, PROMPT_TOKENS, tuple(ends))
    texts = [session.tokens for session in sessions]
    return [[*(text[:-1] if len(text) > 1 and text[-1] in ends else text), *closing] for text in texts]


def _write(
    llm: LLM,
    prompts: Sequence[Sequence[int]],
    caches: Sequence[KVCache],
    samplings: Sequence[Sampling],
    recorders: Sequence[Recorder],
    rounds: int,
    tokens: int | None = None,
    stop: tuple[int, ...] = (),
) -> list[Session]:
    """Write after some prompts together, for ``rounds`` and ``tokens`` at most. Returns the sessions."""
    verify, draft = llm.engines.verify, llm.engines.draft
    assert draft is not None
    most, sessions = tokens or llm.manifest.max_seq_len, []
    for prompt, cache, sampling, recorder in zip(prompts, caches, samplings, recorders, strict=True):
        cache.reset()
        drafting = Drafting(Drafter(draft, recorder, columns=llm.draft_columns))
        request = Request(tokens=prompt, sampling=sampling, max_new_tokens=most, stop_token_ids=stop)
        sessions.append(Session(Generation(request), cache, verify, drafting, llm.limits))
    for _ in range(rounds):
        for current in run_round([session for session in sessions if session.finish_reason is None], verify):
            if current.error is not None:
                raise current.error
    return sessions
