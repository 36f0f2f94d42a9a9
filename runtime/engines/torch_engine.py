"""The torch engine runs the modules of ``model/`` on the CPU or on GPUs, in the element type of the
engine directory."""

import os
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, set_num_threads

from eesd.common.errors import EESDError
from eesd.common.machine import ranks
from eesd.common.manifest import GraphInfo, Manifest
from eesd.model.graphs import Draft, Verify
from eesd.model.torch_ops import EVEN_ROWS, Inputs
from eesd.runtime.engines.base import Call, Logits
from eesd.runtime.engines.device import (
    DeviceStream,
    PreparedCall,
    ResultMemory,
    StepInputs,
    device_streams,
)
from eesd.runtime.engines.device_cache import RowMemory
from eesd.runtime.engines.device_engine import DeviceEngine, has_one_count, make_engines
from eesd.runtime.engines.team import Split, Team, TeamEngine, follow, lead
from eesd.runtime.engines.torch_weights import load_modules
from eesd.runtime.engines.trt_plans import first_slots

ROWS = EVEN_ROWS
"""On the CPU, verify calls are padded to a multiple of this number, so that a token's logits have
the same bits in every call. This is not enough on processors with AMX, where ``eesd-inspect
--exact`` reports differences (:mod:`eesd.runtime.engines.exactness`)."""


class TorchStageRunner:
    """Runs a torch module with its weights and rotary tables [S, D/2] on a device."""

    capturable = True

    def __init__(
        self,
        module: Draft | Verify,
        graph: GraphInfo,
        rotary_tables: tuple[Tensor, Tensor],
        stream: DeviceStream,
        largest_round: int = 0,
    ) -> None:
        """Wrap a module. Calls of several rows of up to ``largest_round`` nodes share memory for
        their results, because logits of many rows are large, and each captured call would keep a
        copy."""
        self.module = module
        self.graph = graph
        self.stream = stream
        self._rotary_tables = rotary_tables
        self._largest_round = largest_round
        self._results = ResultMemory(graph, stream.device, largest_round)

    def prepare(self, inputs: StepInputs) -> PreparedCall:
        rows, count = inputs.position_ids.shape
        mask = inputs.mask.outline if count <= self.module.unmasked else inputs.mask.tensor
        given = *self._rotary_tables, inputs.position_ids, inputs.write_indices, mask
        shared = Inputs(*given, logit_rows=inputs.logit_rows, tree=inputs.mask.tree)

        def run() -> list[Tensor]:
            results: list[Tensor] = list(self.module(inputs.x, shared, inputs.caches)[:-1])
            return results

        if rows == 1 or count > self._largest_round:
            return run
        logits, *_ = self._results.tensors(inputs)

        def run_and_keep() -> list[Tensor]:
            found, *others = run()
            return [logits.copy_(found), *others]

        return run_and_keep


def open_torch(
    directory: Path,
    manifest: Manifest,
    threads: int,
    draft: bool,
    device: str | None = None,
    exact: bool | None = None,
    split: Split | None = None,
    kernels: bool | None = None,
) -> tuple[DeviceEngine, DeviceEngine | None]:
    """Load the engines of a directory over one set of weights.

    Args:
        directory: Engine directory.
        manifest: Its manifest.
        threads: Number of torch's threads on the CPU. Torch has one setting for all engines of a
            process.
        draft: Whether to load the draft engine.
        device: Device to run on; see :func:`~eesd.runtime.engines.device.device_streams`.
        exact: See :func:`~eesd.runtime.engines.device_engine.buckets_for`. It only matters on GPUs.
        split: The part of the weights that this process has, or None for all weights.
        kernels: See :func:`~eesd.runtime.engines.torch_weights.load_modules`.

    Returns:
        The verify engine and the draft engine.

    Raises:
        EESDError: Graphs, weights and manifest do not match, the GPU has too little memory, or
            ranks cannot have equal parts.
    """
    own = manifest if split is None else manifest.on_rank(split.ranks)
    streams = device_streams(len(manifest.verify), device)
    on_gpu = streams[0].on_gpu
    if not on_gpu:
        set_num_threads(threads)
    stages = load_modules(
        directory, manifest, [stream.device for stream in streams], draft, split, kernels
    )
    several = on_gpu and not has_one_count(manifest, exact)
    verify = [
        TorchStageRunner(
            stage.verify,
            graph,
            stage.rotary_tables,
            stream,
            manifest.max_tree_nodes + 1 if several else 0,
        )
        for stage, graph, stream in zip(stages, manifest.verify, streams, strict=True)
    ]
    first = stages[0]
    drafter = (
        TorchStageRunner(first.draft, manifest.draft, first.rotary_tables, streams[0])
        if first.draft
        else None
    )
    spare = manifest.max_tree_nodes + ROWS
    make_memory = partial(RowMemory, own, streams, grow=not on_gpu, spare=spare)
    slots = first_slots(manifest.gpu_slots) if several else ()
    engines = partial(
        make_engines,
        manifest,
        verify,
        drafter,
        make_memory,
        pad=on_gpu,
        multiple=ROWS,
        slots=(slots, slots),
    )
    # Ranks add their parts in an order that may depend on the number of rows.
    if on_gpu and not several and split is None and all(stage.by_rows for stage in stages):
        found = engines(exact=exact, by_rows=True)
        if has_equal_rows(found[0]):
            return found
    return engines(exact=exact)


def has_equal_rows(verify: DeviceEngine) -> bool:
    """Return whether smaller calls give the same bits. For each smaller bucket, a call of only the
    last nodes of a round is compared with a call of all nodes."""
    [kv_cache] = verify.new_kv_caches()
    count = verify.manifest.max_tree_nodes + 1
    tokens = [place % verify.manifest.geometry.vocab_size for place in range(count)]
    kv_cache.reserve(count)

    def logits(start: int) -> Logits:
        return verify.forward([Call(kv_cache, tokens[start:], range(start, count), start)])[
            0
        ].logits.copy()

    every = logits(0)
    return all(
        logits(count - few).tobytes() == every[-few:].tobytes()
        for few in verify.buckets
        if few < count
    )


def open_team(
    directory: Path, manifest: Manifest, threads: int, draft: bool, exact: bool | None = None
) -> tuple[TeamEngine, TeamEngine | None]:
    """Load this rank's part of the weights. Several processes, which were started together, call
    this function. Only rank 0 returns.

    If there are GPUs, each rank takes the GPU with its number on its machine. The arguments and
    errors are those of :func:`open_torch`. It is also an error if there are fewer GPUs than ranks.
    """
    device = "cpu"
    local = int(os.environ.get("LOCAL_RANK", "0"))
    if torch.cuda.is_available():
        device = f"cuda:{local}"
        if local >= torch.cuda.device_count():
            raise EESDError(
                f"Rank {local} of this machine has no GPU, because torch finds only "
                f"{torch.cuda.device_count()}; start fewer processes."
            )
    manifest.on_rank(ranks())  # this raises its errors before the ranks connect
    team = Team(torch.device(device))
    verify, drafter = open_torch(directory, manifest, threads, draft, device, exact, team.split)
    if team.rank:
        follow(team, verify, drafter)
    return lead(team, verify, drafter)
