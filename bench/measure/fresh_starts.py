"""Real starts: fresh processes, each of which decodes a prompt plainly and drafting in turn, and compares the times."""

import json
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from eesd.bench.measure.tasks import read_texts
from eesd.common.errors import EESDError
from eesd.runtime.decoding.session import Session
from eesd.runtime.llm import Prompt, Speculation, load

CHUNK = 10
"""Tokens that one session decodes before it is the other's turn, so that both meet the same load of the machine."""


def read_prompts(path: Path, count: int) -> list[str]:
    """``count`` prompts from a file of texts (:func:`read_texts`), spread over all of it; the first turn of several."""
    found = read_texts(path)
    return [found[i * len(found) // count][1][0] for i in range(count)]


def measure_starts(directory: Path, prompts: Sequence[str], drafter: str, threads: int | None, tokens: int) -> Iterator[float]:
    """The speed over plain decoding of the first ``tokens`` tokens behind each prompt (a chat message), in a process each.

    Raises:
        EESDError: A process failed, or its two texts differ.
    """
    for prompt in prompts:
        told = json.dumps([str(directory), prompt, drafter, threads, tokens])
        done = subprocess.run([sys.executable, "-m", __name__], input=told, capture_output=True, text=True)
        if done.returncode:
            raise EESDError(f"A process failed: {(done.stderr.strip() or 'no message').splitlines()[-1]}")
        yield float(done.stdout)


def _speed(directory: str, prompt: str, drafter: str, threads: int | None, tokens: int) -> float:
    """Decode plainly and drafting in turn, in this process: plain seconds over drafting ones."""
    llm = load(Path(directory), threads=threads, speculation=Speculation(drafter=drafter))
    message: Prompt = [{"role": "user", "content": prompt}] if llm.codec.chat_template else prompt
    with (
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
        return seconds[0] / seconds[1]


def _decode_to(session: Session, tokens: int) -> float:
    """Seconds of the rounds until a session has so many new tokens."""
    started = time.perf_counter()
    while session.finish_reason is None and session.stats.new_tokens < tokens:
        session.step()
    return time.perf_counter() - started


if __name__ == "__main__":
    try:
        print(_speed(*json.load(sys.stdin)))
    except EESDError as error:
        sys.exit(str(error))
