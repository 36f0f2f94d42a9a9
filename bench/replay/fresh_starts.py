"""Real starts: fresh processes, each of which decodes a prompt plainly and drafting in turn, and compares them."""

import json
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import NamedTuple

from eesd.bench.measure.tasks import read_texts
from eesd.bench.replay.costs import COST_MODELS
from eesd.bench.replay.counted import CountedClock
from eesd.common.errors import EESDError
from eesd.runtime.decoding.session import Session
from eesd.runtime.llm import Prompt, Speculation, load

CHUNK = 10
"""Tokens that one session decodes before it is the other's turn, so that both meet the same load of the machine."""


class Start(NamedTuple):
    """Of a process: speed over plain decoding, tokens a round (1: none was accepted), how often the guard paused drafting."""

    speed: float
    tokens_per_round: float
    pauses: int


def read_prompts(path: Path, count: int) -> list[str]:
    """``count`` prompts from a file of texts (:func:`read_texts`), spread over all of it; the first turn of several."""
    found = read_texts(path)
    return [found[i * len(found) // count][1][0] for i in range(count)]


def measure_starts(
    directory: Path, prompts: Sequence[str], drafter: str, threads: int | None, tokens: int, costs: str | None = None
) -> Iterator[Start]:
    """Decode behind each prompt (a chat message) plainly and drafting, in a process each; ``costs`` names what counts seconds.

    Raises:
        EESDError: A process failed, or its two texts differ.
    """
    for prompt in prompts:
        told = json.dumps([str(directory), prompt, drafter, threads, tokens, costs])
        done = subprocess.run([sys.executable, "-m", __name__], input=told, capture_output=True, text=True)
        if done.returncode:
            raise EESDError(f"A process failed: {(done.stderr.strip() or 'no message').splitlines()[-1]}")
        yield Start(*json.loads(done.stdout))


def _start(directory: str, prompt: str, drafter: str, threads: int | None, tokens: int, costs: str | None) -> Start:
    """Decode plainly and drafting in turn, in this process."""
    llm = load(Path(directory), threads=threads, speculation=Speculation(drafter=drafter))
    message: Prompt = [{"role": "user", "content": prompt}] if llm.codec.chat_template else prompt
    with (
        CountedClock(COST_MODELS[costs]).timing(llm) if costs else nullcontext(),
        llm.session(message, max_new_tokens=tokens, draft=False, ignore_eos=True) as plain,
        llm.session(message, max_new_tokens=tokens, ignore_eos=True) as drafting,
    ):
        sessions, seconds = (plain, drafting), [0.0, 0.0]
        for session in sessions:
            session.prefill()
        for end in range(CHUNK, tokens + CHUNK, CHUNK):
            for index, session in enumerate(sessions):
                seconds[index] += _decode_to(session, end)
        if plain.tokens != drafting.tokens:
            raise EESDError("Drafting gave other tokens than plain decoding.")
        return Start(seconds[0] / seconds[1], drafting.stats.tokens_per_round, drafting.stats.guard_pauses)


def _decode_to(session: Session, tokens: int) -> float:
    """Seconds of the rounds until a session has so many new tokens."""
    started = time.perf_counter()
    while session.finish_reason is None and session.stats.new_tokens < tokens:
        session.step()
    return time.perf_counter() - started


if __name__ == "__main__":
    try:
        print(json.dumps(_start(*json.load(sys.stdin))))
    except EESDError as error:
        sys.exit(str(error))
