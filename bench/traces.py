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
import zlib
from dataclasses import dataclass
from functools import cached_property
from math import log
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np
from numpy.typing import NDArray

from eesd.bench.costs import CostModel
from eesd.common.errors import EESDError
from eesd.common.files import written_whole
from eesd.common.manifest import Manifest
from eesd.common.prior import CalibrationPrior
from eesd.controllers import DraftStep
from eesd.runtime.decoding.sampling import Sampling
from eesd.runtime.llm import LLM, Prompt

Features = NDArray[np.floating[Any]]
FORMAT = 2
ROWS = ("logprob", "margin", "entropy", "accepted")


@dataclass(frozen=True)
class Request:
    """One generation of T new tokens. Row t is the root behind which t new tokens are committed already.

    ``logprob``, ``margin`` and ``entropy`` [T, depth] are those of :class:`~eesd.controllers.DraftStep` (of its probability the
    logarithm, which float16 keeps to one part in a thousand at both ends), NaN behind the last token that the request may
    draft. ``accepted`` [T] counts the tokens of each chain that the verifier accepts.
    """

    task: str
    logprob: Features
    margin: Features
    entropy: Features
    accepted: NDArray[np.int32]

    @property
    def tokens(self) -> int:
        return len(self.accepted)

    @cached_property
    def steps(self) -> list[list[DraftStep]]:
        """What a controller is told, for every position and depth."""
        logprob = self.logprob.astype(np.float64)
        arrays = (np.exp(logprob), np.exp(np.cumsum(logprob, axis=1)), self.entropy, self.margin)
        columns = [array.tolist() for array in arrays]
        return [
            [DraftStep(k + 1, p, path, h, margin, k + 1) for k, (p, path, h, margin) in enumerate(zip(*row, strict=True))]
            for row in zip(*columns, strict=True)
        ]

    def room(self, position: int) -> int:
        """How many tokens a round at ``position`` may draft: the verifier's own token must fit behind them."""
        return min(self.tokens - 1 - position, int(self.logprob.shape[1]))


@dataclass(frozen=True)
class Trace:
    """Requests in the order they ran, and what they were made with.

    ``costs`` are those of the engine that ran them, ``prior`` the calibration that it ships, where there are any.
    """

    requests: tuple[Request, ...]
    origin: dict[str, Any]
    costs: CostModel | None = None
    prior: CalibrationPrior | None = None

    @property
    def depth(self) -> int:
        """How long the chains are."""
        return max(int(request.logprob.shape[1]) for request in self.requests)

    @property
    def tasks(self) -> list[str]:
        """Every task once, in order of appearance."""
        return list(dict.fromkeys(request.task for request in self.requests))

    def save(self, path: Path) -> None:
        """Write one npz file: the requests' rows one after another, no pickled objects."""
        meta = {
            "format": FORMAT,
            "origin": self.origin,
            "tasks": [request.task for request in self.requests],
            "costs": self.costs.to_dict() if self.costs else None,
            "prior": self.prior.to_dict() if self.prior else None,
        }
        arrays: dict[str, Any] = {name: np.concatenate([getattr(request, name) for request in self.requests]) for name in ROWS}
        with written_whole(path) as partial, partial.open("wb") as file:
            np.savez_compressed(
                file, meta=np.array(json.dumps(meta)), tokens=np.array([r.tokens for r in self.requests]), **arrays
            )


def load_trace(path: Path) -> Trace:
    """Read what :meth:`Trace.save` wrote. Raises :class:`EESDError` for anything else."""
    try:
        with np.load(path, allow_pickle=False) as file:
            meta = json.loads(str(file["meta"]))
            if meta["format"] != FORMAT:
                raise EESDError(f"{path} has trace format {meta['format']}, this EESD reads {FORMAT}; record it again.")
            ends = np.cumsum(file["tokens"])[:-1]
            parts = [np.split(file[name], ends) for name in ROWS]
        requests = tuple(Request(task, *rows) for task, *rows in zip(meta["tasks"], *parts, strict=True))
        costs = CostModel.from_dict(meta["costs"]) if meta["costs"] else None
        return Trace(requests, meta["origin"], costs, CalibrationPrior.from_dict(meta["prior"]) if meta["prior"] else None)
    except FileNotFoundError:
        raise EESDError(f"There is no trace {path}; record one first.") from None
    except (OSError, EOFError, ValueError, KeyError, TypeError, AttributeError, BadZipFile, zlib.error):
        raise EESDError(f"{path} is not a trace; record one first.") from None


def check_sampling(sampling: Sampling) -> None:
    """Raise :class:`EESDError` where the text would depend on the drafts."""
    if not sampling.greedy and sampling.method != "coupled":
        raise EESDError("Traces need greedy or coupled sampling: with rejection sampling the text depends on what was drafted.")


def check_depth(manifest: Manifest, depth: int) -> None:
    """Raise :class:`EESDError` for chains that no round of this engine may have."""
    if not 1 <= depth <= manifest.max_tree_nodes:
        raise EESDError(f"The depth of a trace is {depth}; this engine allows 1 to {manifest.max_tree_nodes}.")


def record(llm: LLM, task: str, prompt: Prompt, sampling: Sampling, new_tokens: int = 128, depth: int = 16) -> Request:
    """Generate behind a prompt and draft ``depth`` tokens from every position.

    ``llm`` must have been loaded with speculation; its controller is not asked. Costs a plain step and ``depth`` draft steps a
    token. Raises :class:`EESDError` with rejection sampling, whose text depends on the drafts, and for chains that no round of
    this engine may have.
    """
    check_sampling(sampling)
    check_depth(llm.manifest, depth)
    assert llm.engines.draft is not None
    features = np.full((3, new_tokens, depth), np.nan, np.float16)
    chains: list[list[int]] = []
    with llm.session(prompt, sampling, max_new_tokens=new_tokens, draft=False, ignore_eos=True) as session:
        draft = llm.engines.draft.bind(session.kv_cache)
        while session.finish_reason is None:
            chain, steps = session.propose(draft, depth)
            rows = [(log(max(step.probability, 1e-300)), step.margin, step.entropy) for step in steps]
            features[:, len(chains), : len(rows)] = np.array(rows).reshape(-1, 3).T
            chains.append(chain)
            session.step()
        text = session.tokens[session.stats.prompt_tokens :]
    accepted = [_agreement(chain, text[position:]) for position, chain in enumerate(chains)]
    logprob, margin, entropy = features[:, : len(text)]
    return Request(task, logprob, margin, entropy, np.array(accepted, np.int32))


def _agreement(chain: list[int], text: list[int]) -> int:
    return next((i for i, (drafted, own) in enumerate(zip(chain, text, strict=False)) if drafted != own), len(chain))
