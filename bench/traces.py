"""Traces of a real run, on which any drafting policy can be replayed exactly.

The text that a request generates does not depend on the policy: decoding is lossless (greedy, or ``coupled`` with a fixed
seed). What a policy changes is only which positions of that text become roots of a round. So a trace holds, for *every*
position of the verified text as root, the chain that the draft proposes from there, conditioned on its own tokens: up to
``depth`` drafted tokens, each with what a controller may see of it, and how many of them the verifier accepts. A replay
starts at position 0, lets the policy draft n tokens of that position's chain, and goes on at position + min(n, accepted) + 1;
it meets the very rounds that the real run would have met with this policy.

Chains go on behind the first wrong token, since a policy may, too.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import exp
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from eesd.controllers import DraftStep
from eesd.runtime.engine import Binding
from eesd.runtime.errors import EESDError
from eesd.runtime.files import written_whole
from eesd.runtime.growth import entropy_of
from eesd.runtime.llm import LLM, Prompt
from eesd.runtime.sampling import Sampling
from eesd.runtime.session import Session
from eesd.runtime.tree import TokenTree

Features = NDArray[np.float32]
FORMAT = 1


@dataclass(frozen=True)
class Request:
    """One generation of T new tokens. Row t is the root behind which t new tokens are committed already.

    ``probability``, ``margin`` and ``entropy`` [T, depth] are those of :class:`~eesd.controllers.DraftStep`, NaN behind the
    last token that the request may draft. ``accepted`` [T] counts the tokens of each chain that the verifier accepts.
    """

    task: str
    probability: Features
    margin: Features
    entropy: Features
    accepted: NDArray[np.int32]

    @property
    def tokens(self) -> int:
        return len(self.accepted)

    @cached_property
    def steps(self) -> list[list[DraftStep]]:
        """What a controller is told, for every position and depth."""
        paths = np.cumprod(self.probability, axis=1)
        columns = [array.tolist() for array in (self.probability, paths, self.entropy, self.margin)]
        return [
            [DraftStep(k + 1, p, path, h, margin, k + 1) for k, (p, path, h, margin) in enumerate(zip(*row, strict=True))]
            for row in zip(*columns, strict=True)
        ]

    def room(self, position: int) -> int:
        """How many tokens a round at ``position`` may draft: the verifier's own token must fit behind them."""
        return min(self.tokens - 1 - position, int(self.probability.shape[1]))


@dataclass(frozen=True)
class Trace:
    """Requests in the order they ran, and what they were made with."""

    requests: tuple[Request, ...]
    origin: dict[str, str]

    @property
    def depth(self) -> int:
        """How long the chains are."""
        return max(int(request.probability.shape[1]) for request in self.requests)

    @property
    def tasks(self) -> list[str]:
        """Every task once, in order of appearance."""
        return list(dict.fromkeys(request.task for request in self.requests))

    def save(self, path: Path) -> None:
        """Write one npz file: the requests' rows one after another, no pickled objects."""
        meta = {"format": FORMAT, "origin": self.origin, "tasks": [request.task for request in self.requests]}
        arrays: dict[str, Any] = {
            name: np.concatenate([getattr(request, name) for request in self.requests])
            for name in ("probability", "margin", "entropy", "accepted")
        }
        with written_whole(path) as partial, partial.open("wb") as file:
            np.savez_compressed(
                file, meta=np.array(json.dumps(meta)), tokens=np.array([r.tokens for r in self.requests]), **arrays
            )


def load_trace(path: Path) -> Trace:
    """Read what :meth:`Trace.save` wrote. Raises :class:`EESDError` for anything else."""
    try:
        with np.load(path, allow_pickle=False) as file:
            meta = json.loads(str(file["meta"]))
            ends = np.cumsum(file["tokens"])[:-1]
            parts = [np.split(file[name], ends) for name in ("probability", "margin", "entropy", "accepted")]
        if meta["format"] != FORMAT:
            raise EESDError(f"{path} has trace format {meta['format']}, this EESD reads {FORMAT}; record it again.")
        requests = tuple(Request(task, *rows) for task, *rows in zip(meta["tasks"], *parts, strict=True))
    except FileNotFoundError:
        raise EESDError(f"There is no trace {path}; record one first.") from None
    except (OSError, ValueError, KeyError, TypeError):
        raise EESDError(f"{path} is not a trace; record one first.") from None
    return Trace(requests, meta["origin"])


def record(
    llm: LLM, prompts: Sequence[tuple[str, Prompt]], sampling: Sampling, new_tokens: int = 128, depth: int = 16
) -> Iterator[Request]:
    """Generate behind every (task, prompt) and draft ``depth`` tokens from every position; one :class:`Request` each.

    ``llm`` must have been loaded with speculation; its controller is not asked. Costs a plain step and ``depth`` draft steps a
    token. Raises :class:`EESDError` with rejection sampling, whose text depends on the drafts.
    """
    if not sampling.greedy and sampling.method != "coupled":
        raise EESDError("Traces need greedy or coupled sampling: with rejection sampling the text depends on what was drafted.")
    for task, prompt in prompts:
        with llm.session(prompt, sampling, max_new_tokens=new_tokens, draft=False, ignore_eos=True) as session:
            yield _record_one(llm, session, task, depth)


def _record_one(llm: LLM, session: Session, task: str, depth: int) -> Request:
    assert llm._draft is not None
    draft = llm._draft.bind(session._slab)
    session.prefill()
    features: list[Features] = []
    chains: list[list[int]] = []
    while session.finish_reason is None:
        rows, chain = _chain(session, draft, depth)
        features.append(rows)
        chains.append(chain)
        session.step()
    text = session.tokens[session.stats.prompt_tokens :]
    accepted = [_agreement(chain, text[position:]) for position, chain in enumerate(chains)]
    probability, margin, entropy = np.stack(features, axis=1)
    return Request(task, probability, margin, entropy, np.array(accepted, np.int32))


def _chain(session: Session, draft: Binding, depth: int) -> tuple[Features, list[int]]:
    """What the draft proposes behind the session's last token: features [3, depth] and tokens, as far as there is room."""
    tree, slot, chooser = TokenTree(session.tokens[-1]), len(session.tokens) - 1, session._chooser
    features = np.full((3, depth), np.nan, np.float32)
    chooser.begin(session.tokens)
    for node in range(min(session._room(), depth)):
        session._slab.reserve(slot + node + 1)
        outputs = draft.forward([tree.tokens[node]], [slot + node], slot + node)
        (proposal,) = chooser.propose(tree, node, outputs, 0, 1)
        tree.add(proposal.token, node, proposal.logprob, proposal.score, proposal.margin)
        features[:, node] = exp(proposal.logprob), proposal.margin, entropy_of(outputs.logits[0])
    return features, tree.tokens[1:]


def _agreement(chain: list[int], text: list[int]) -> int:
    return next((i for i, (drafted, own) in enumerate(zip(chain, text, strict=False)) if drafted != own), len(chain))
