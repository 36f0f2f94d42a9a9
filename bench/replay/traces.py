"""Traces of real runs and code that records them. Any drafting policy can be replayed exactly on a
trace.

Decoding is lossless (greedy, or ``coupled`` with a fixed seed), so the text of a request does not
depend on the policy. The policy only determines which positions of the text become roots. So a
trace treats *every* position of the text as a root. It holds the chain that the draft proposes
there (up to ``depth`` tokens, each conditioned on the previous tokens), the features of each token
that a controller sees, and the number of tokens that the verifier accepts. A replay starts at
position 0, lets the policy draft n tokens of the chain, and continues at position + min(n,
accepted) + 1. Its rounds are the same as in a real run with this policy.

Chains continue after their first wrong token, because a policy may draft beyond it.
"""

import hashlib
import json
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from math import log
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np
from numpy.typing import NDArray

from eesd.bench.measure.run import Bench, EncodedPrompt, Options
from eesd.bench.measure.tasks import TaskPrompt, split_prompts
from eesd.bench.replay.costs import CostModel, mean_call_costs
from eesd.common.draft_vocab import WHOLE, DraftColumns
from eesd.common.errors import EESDError
from eesd.common.files import written_whole
from eesd.common.json_input import from_json
from eesd.common.manifest import Manifest
from eesd.common.prior import CalibrationPrior
from eesd.controllers import DraftStep
from eesd.runtime.decoding.draft_tree import DraftTree
from eesd.runtime.decoding.samplers import make_sampler
from eesd.runtime.decoding.sampling import Sampling
from eesd.runtime.engines.base import Call, Engine
from eesd.runtime.llm import LLM, Prompt
from eesd.runtime.session import Session

TRACE_FILE = "trace.npz"
TUNING_TRACE_FILE = "tuning.npz"
FORMAT = 2
ARRAYS = ("logprob", "margin", "accepted")
FloatArray = NDArray[np.floating[Any]]


@dataclass(frozen=True)
class TracedRequest:
    """One generation of T new tokens. Row t belongs to the round that begins after t new tokens.

    Attributes:
        task: Task of the prompt.
        logprob: Logarithm [T, depth] of the probability in :class:`~eesd.controllers.DraftStep`. It
            is NaN beyond the last token that the request may draft. The logarithm keeps
            probabilities near 0 and near 1 precise in float16.
        margin: The margin [T, depth] as in :class:`~eesd.controllers.DraftStep`.
        accepted: Number [T] of tokens of each chain that the verifier accepts.
    """

    task: str
    logprob: FloatArray
    margin: FloatArray
    accepted: NDArray[np.int32]

    @property
    def tokens(self) -> int:
        """Number of new tokens, T."""
        return len(self.accepted)

    @cached_property
    def steps(self) -> list[list[DraftStep]]:
        """The features that a controller sees at each position and depth."""
        logprob = self.logprob.astype(np.float64)
        columns = [
            array.tolist()
            for array in (np.exp(logprob), np.exp(np.cumsum(logprob, axis=1)), self.margin)
        ]
        return [
            [
                DraftStep(depth, p, path, margin, depth)
                for depth, (p, path, margin) in enumerate(zip(*row, strict=True), 1)
            ]
            for row in zip(*columns, strict=True)
        ]

    def room(self, position: int) -> int:
        """Return the number of tokens that a round at ``position`` may draft. The bonus token must
        fit after them."""
        return min(self.tokens - 1 - position, int(self.logprob.shape[1]))


@dataclass(frozen=True)
class Trace:
    """Requests in the order in which they ran.

    Attributes:
        requests: The requests.
        origin: The engine, the options and the prompts. Traces with equal origins have equal
            requests.
        costs: The costs that were measured on the engine that ran the requests.
        prior: Calibration prior in that engine's directory.
    """

    requests: tuple[TracedRequest, ...]
    origin: dict[str, Any]
    costs: CostModel | None = None
    prior: CalibrationPrior | None = None

    @property
    def depth(self) -> int:
        """Length of the longest chain."""
        return max(int(request.logprob.shape[1]) for request in self.requests)

    @property
    def tasks(self) -> list[str]:
        """The tasks in order of first appearance."""
        return list(dict.fromkeys(request.task for request in self.requests))

    def save(self, path: Path) -> None:
        """Write one npz file without pickled objects. The rows of all requests are concatenated."""
        meta = {
            "format": FORMAT,
            "origin": self.origin,
            "tasks": [request.task for request in self.requests],
            "costs": self.costs and self.costs.to_dict(),
            "prior": self.prior and asdict(self.prior),
        }
        arrays: dict[str, Any] = {
            name: np.concatenate([getattr(request, name) for request in self.requests])
            for name in ARRAYS
        }
        with written_whole(path) as partial, partial.open("wb") as file:
            np.savez_compressed(
                file,
                meta=np.array(json.dumps(meta)),
                tokens=np.array([r.tokens for r in self.requests]),
                **arrays,
            )


def load_trace(path: Path) -> Trace:
    """Read a file that :meth:`Trace.save` wrote. Raises :class:`EESDError` for any other file."""
    try:
        with np.load(path, allow_pickle=False) as file:
            meta = json.loads(str(file["meta"]))
            if meta["format"] != FORMAT:
                raise EESDError(
                    f"{path} has trace format {meta['format']}, this EESD reads format "
                    f"{FORMAT}; record it again."
                )
            ends = np.cumsum(file["tokens"])[:-1]
            parts = [np.split(file[name], ends) for name in ARRAYS]
        requests = tuple(
            TracedRequest(task, *rows) for task, *rows in zip(meta["tasks"], *parts, strict=True)
        )
        costs = meta["costs"] and CostModel.from_dict(meta["costs"])
        return Trace(
            requests,
            meta["origin"],
            costs,
            meta["prior"] and from_json(CalibrationPrior, meta["prior"]),
        )
    except FileNotFoundError:
        raise EESDError(f"There is no trace {path}; record one first.") from None
    except (
        OSError,
        EOFError,
        ValueError,
        KeyError,
        TypeError,
        AttributeError,
        BadZipFile,
        zlib.error,
    ):
        raise EESDError(f"{path} is not a trace; record one first.") from None


def check_same_origin(trace: Trace, tuning: Trace) -> None:
    """Raise :class:`EESDError` unless both traces have the same engine and options but different
    prompts."""
    if trace.origin.get("prompts") == tuning.origin.get("prompts"):
        raise EESDError("Both traces have the same prompts; tune on prompts that are not reported.")
    if trace.origin | {"prompts": ""} != tuning.origin | {"prompts": ""}:
        raise EESDError(
            "The traces are from different engines or options; record both with one command."
        )


def check_sampling(sampling: Sampling) -> None:
    """Raise :class:`EESDError` for a sampling whose text depends on the drafts."""
    if not sampling.greedy and sampling.method != "coupled":
        raise EESDError(
            "Traces need greedy or coupled sampling: with rejection sampling the text depends "
            "on the drafts."
        )


def check_depth(manifest: Manifest, depth: int) -> None:
    """Raise :class:`EESDError` for chains that are longer than a round of this engine allows."""
    if not 1 <= depth <= manifest.max_tree_nodes:
        raise EESDError(
            f"The depth of a trace is {depth}; this engine allows 1 to {manifest.max_tree_nodes}."
        )


class ChainDrafter:
    """Drafts chains after the last token of a session, and commits nothing."""

    def __init__(
        self,
        session: Session,
        draft: Engine,
        sampling: Sampling,
        vocab_size: int,
        columns: DraftColumns = WHOLE,
    ) -> None:
        self._session = session
        self._draft = draft
        self._sampler = make_sampler(sampling, vocab_size, columns)

    def draft(self, count: int) -> tuple[list[int], list[DraftStep]]:
        """Draft ``count`` tokens. Returns the tokens, and the features of each token that a
        controller sees."""
        tokens = self._session.tokens
        steps = list[DraftStep]()
        tree = DraftTree(tokens[-1], count)
        self._sampler.begin_round(tokens)
        self._session.kv_cache.reserve(len(tokens) + count)
        for _ in range(count):
            [node] = tree.frontier
            position = len(tokens) - 1 + node.depth
            [outputs] = self._draft.forward(
                [Call(self._session.kv_cache, [node.token], [position], position)]
            )
            step = tree.grow([self._sampler.propose(node, outputs, 0, 1)])
            assert step is not None
            steps.append(step)
        return tree.frontier[0].path(), steps


def record(
    llm: LLM, task: str, prompt: Prompt, sampling: Sampling, new_tokens: int = 128, depth: int = 16
) -> TracedRequest:
    """Generate after a prompt, and draft ``depth`` tokens from every position.

    The LLM must have been loaded with speculation, but its controller is not used.

    Raises:
        EESDError: The sampling is ``rejection``, or the engine does not allow the depth.
    """
    check_sampling(sampling)
    check_depth(llm.manifest, depth)
    assert llm.engines.draft is not None
    features = np.full((2, new_tokens, depth), np.nan, np.float16)
    chains: list[list[int]] = []
    with llm.session(
        prompt, sampling, max_new_tokens=new_tokens, draft=False, ignore_eos=True
    ) as session:
        session.prefill()
        vocab_size = llm.manifest.geometry.vocab_size
        drafter = ChainDrafter(session, llm.engines.draft, sampling, vocab_size, llm.draft_columns)
        while session.finish_reason is None:
            room = (
                min(
                    new_tokens - session.stats.new_tokens,
                    llm.manifest.max_seq_len - len(session.tokens),
                )
                - 1
            )
            chain, steps = drafter.draft(min(depth, room))
            rows = [(log(max(step.probability, 1e-300)), step.margin) for step in steps]
            features[:, len(chains), : len(rows)] = np.array(rows).reshape(-1, 2).T
            chains.append(chain)
            session.step()
        text = session.tokens[session.stats.prompt_tokens :]
    accepted = [_num_equal(chain, text[position:]) for position, chain in enumerate(chains)]
    logprob, margin = features[:, : len(text)]
    return TracedRequest(task, logprob, margin, np.array(accepted, np.int32))


def _num_equal(chain: list[int], text: list[int]) -> int:
    """Return the length of the common prefix of the chain and the text."""
    return next(
        (
            i
            for i, (drafted, verified) in enumerate(zip(chain, text, strict=False))
            if drafted != verified
        ),
        len(chain),
    )


def record_traces(
    bench: Bench, prompts: Sequence[TaskPrompt], options: Options, depth: int, output: Path
) -> Iterator[None]:
    """Record two traces of one engine. One has the tuning prompts, and the other has the reported
    prompts. Yields after each prompt.

    ``options`` sets the sampling and the number of prompts of each task to record. If the recording
    is interrupted, no old trace is left next to a new one in ``output``.

    Raises:
        EESDError: The depth is not allowed, or no prompt fits.
    """
    check_depth(bench.manifest, depth)
    tasks = {prompt.id: prompt.task for prompt in prompts}
    groups = [
        bench.encode(part, options)
        for part in split_prompts(prompts, options.tuning_per_task, options.per_task)
    ]
    parts = dict(zip((output / TUNING_TRACE_FILE, output / TRACE_FILE), groups, strict=True))
    for path in parts:
        path.unlink(missing_ok=True)
    output.mkdir(parents=True, exist_ok=True)
    costs = _measure_costs(bench, groups[0], options)
    for path, encoded in parts.items():
        requests = []
        for prompt in encoded:
            sampling = options.sampling(options.samplings[0], prompt.number)
            requests.append(
                record(
                    bench.llm,
                    tasks[prompt.id],
                    prompt.tokens,
                    sampling,
                    options.max_new_tokens,
                    depth,
                )
            )
            yield
        origin = _origin(bench, encoded, options, depth)
        Trace(tuple(requests), origin, costs, bench.manifest.exit_head.calibration).save(path)


def _measure_costs(bench: Bench, prompts: Sequence[EncodedPrompt], options: Options) -> CostModel:
    """Measure the costs of a chain's calls in rounds after these prompts."""
    latencies = [latency for prompt in prompts for latency in bench.latencies("", prompt, options)]
    manifest = bench.manifest
    return CostModel.from_seconds(
        f"{manifest.model}, {manifest.dtype}, as measured", mean_call_costs(latencies)["", 1]
    )


def _origin(
    bench: Bench, prompts: Sequence[EncodedPrompt], options: Options, depth: int
) -> dict[str, Any]:
    """Return everything that determines the requests of a trace."""
    names = ("samplings", "temperature", "seed", "max_new_tokens", "backend", "threads")
    chosen = {name: value for name, value in options.to_dict().items() if name in names}
    digest = hashlib.sha256(json.dumps([prompt.tokens for prompt in prompts]).encode()).hexdigest()
    prior = bench.manifest.exit_head.calibration
    return (
        bench.describe()
        | chosen
        | {"depth": depth, "prompts": digest, "prior": prior and asdict(prior)}
    )
