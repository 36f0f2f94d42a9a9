"""The plain torch engine: the modules of ``model/`` themselves, on the CPU or on a GPU, in the engine directory's own type.

On a GPU the passes are CUDA graphs, one for each node count, the slab has its full length from the beginning (its addresses
must not change), and what is copied from and to the host goes through pinned memory. Nothing else differs from the CPU, and
only the CPU's side of these three is covered by tests that need no GPU.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from eesd.export.manifest import Manifest
from eesd.model.decoder import KV, MASKED, Inputs
from eesd.model.graphs import Draft, Verify
from eesd.runtime.engine import Outputs, Slab
from eesd.runtime.slab import STEP, GrowingSlab
from eesd.runtime.torch_weights import fitting_gpu, load_programs


class TorchSlab(GrowingSlab):
    """A slab on the device, in the engine's type. On a GPU it has all of its slots at once and never grows."""

    data: Tensor

    def __init__(self, manifest: Manifest, device: torch.device, slots: int = STEP) -> None:
        self._dtype: torch.dtype = getattr(torch, manifest.dtype)
        self._device = device
        super().__init__(manifest, manifest.max_seq_len if device.type == "cuda" else slots)

    def _zeros(self, shape: tuple[int, ...]) -> Tensor:
        with fitting_gpu(f"The KV caches of {shape[4]} slots"):
            return torch.zeros(shape, dtype=self._dtype, device=self._device)

    def read(self, index: int) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        keys, values = self.data[index].float().cpu().numpy().copy()
        return keys, values


class TorchEngine:
    """One of the two programs, with its weights on a device. ``caches`` are the indices of those it reads and writes."""

    def __init__(
        self, program: Draft | Verify, caches: Sequence[int], tables: tuple[Tensor, Tensor], manifest: Manifest
    ) -> None:
        self.program = program
        self.caches = caches
        self.tables = tables
        self.manifest = manifest
        self.device = tables[0].device

    def new_slab(self) -> TorchSlab:
        return TorchSlab(self.manifest, self.device)

    def bind(self, slab: Slab) -> "TorchBinding":
        assert isinstance(slab, TorchSlab)
        return TorchBinding(self, slab)


def open_torch(
    directory: Path, manifest: Manifest, threads: int, draft: bool, device: str | None = None
) -> tuple[TorchEngine, TorchEngine | None]:
    """Verify and (if wanted) draft over one set of weights, on the GPU if torch sees one. On the CPU ``threads`` becomes the
    number of threads of this process's torch, which has one for all."""
    place = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if place.type == "cpu":
        torch.set_num_threads(threads)
    programs = load_programs(directory, manifest, place, draft)
    verify = TorchEngine(programs.verify, range(manifest.num_caches), programs.tables, manifest)
    if programs.draft is None:
        return verify, None
    return verify, TorchEngine(programs.draft, manifest.draft.caches, programs.tables, manifest)


class _Results(NamedTuple):
    """Logits [n, V] of a pass; from the draft also its K likeliest tokens, ids over log-probabilities [2, n, K]."""

    logits: Tensor
    candidates: Tensor | None


Compute = Callable[[Tensor, Tensor], _Results]


class TorchBinding:
    """A :class:`TorchEngine` on one slab."""

    def __init__(self, engine: TorchEngine, slab: TorchSlab) -> None:
        self._engine = engine
        self._slab = slab
        self._pinned = engine.device.type == "cuda"
        self._captured: dict[int, _Captured] = {}
        self._pool: Any = torch.cuda.graph_pool_handle() if self._pinned else None
        self._generation = -1
        self._caches: list[KV] = []

    @torch.inference_mode()
    def forward(
        self,
        tokens: Sequence[int],
        positions: Sequence[int],
        slot: int,
        base: int = 0,
        visible: NDArray[np.bool_] | None = None,
    ) -> Outputs:
        if self._generation != self._slab.generation:
            self._generation = self._slab.generation
            self._caches = [(self._slab.data[index, 0], self._slab.data[index, 1]) for index in self._engine.caches]
        numbers = torch.tensor([*tokens, *positions, slot], pin_memory=self._pinned)
        logits, candidates = self._run(numbers, self._mask(len(tokens), slot, base, visible))
        if candidates is None:
            return Outputs(lambda: _to_host(logits), None, None)
        ids, logprobs = _to_host(candidates)
        return Outputs(lambda: _to_host(logits), ids.astype(np.int64), logprobs)

    def _mask(self, count: int, slot: int, base: int, visible: NDArray[np.bool_] | None) -> Tensor:
        """The additive mask [1, 1, n, S], on the host."""
        shape = (count, self._slab.slots)
        mask = torch.full(shape, MASKED, dtype=self._slab.data.dtype, pin_memory=self._pinned)
        if visible is None:
            mask.triu_(slot + 1)  # node i sees the slots up to slot + i
        else:
            mask[:, :base] = 0
            mask[:, base : base + visible.shape[1]].masked_fill_(torch.from_numpy(visible), 0)
        return mask[None, None]

    def _run(self, numbers: Tensor, mask: Tensor) -> _Results:
        device, count = self._engine.device, mask.shape[2]
        if device.type == "cpu":
            return self._compute(numbers, mask)
        if count > self._engine.manifest.max_tree_nodes + 1:  # a prefill's chunk: their counts are many
            return self._compute(numbers.to(device, non_blocking=True), mask.to(device, non_blocking=True))
        captured = self._captured.get(count)
        if captured is None:
            captured = _Captured(self._compute, numbers.to(device), mask.to(device), self._pool)
            self._captured[count] = captured
        return captured.replay(numbers, mask)

    def _compute(self, numbers: Tensor, mask: Tensor) -> _Results:
        """One pass; ``numbers`` holds n tokens, n positions and the slot of the first."""
        engine, count = self._engine, mask.shape[2]
        inputs = Inputs(*engine.tables, numbers[None, count : 2 * count], numbers[2 * count :], mask)
        outputs = engine.program(numbers[None, :count], inputs, self._caches)
        if isinstance(engine.program, Verify):
            return _Results(outputs[0][0], None)
        logits, ids, logprobs, _ = outputs
        # One tensor is one copy to the host; a float32 holds every id below 2^24 exactly.
        return _Results(logits[0], torch.stack((ids[0].float(), logprobs[0])))


class _Captured:
    """The pass of one node count as a CUDA graph: its inputs have fixed places, and each replay overwrites its results.

    The graphs of a binding share a pool of memory, so a replay may overwrite the results of the others, too.
    """

    def __init__(self, compute: Compute, numbers: Tensor, mask: Tensor, pool: Any) -> None:
        self._numbers, self._mask = numbers, mask
        compute(numbers, mask)  # libraries set themselves up in a first pass; the replay will write the same to the slab
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph, pool=pool):
            self._results = compute(numbers, mask)

    def replay(self, numbers: Tensor, mask: Tensor) -> _Results:
        self._numbers.copy_(numbers, non_blocking=True)
        self._mask.copy_(mask, non_blocking=True)
        self._graph.replay()
        return self._results


def _to_host(tensor: Tensor) -> NDArray[np.float32]:
    """A float32 tensor as an array, when it is ready; on the CPU a view."""
    if tensor.device.type == "cuda":
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        host.copy_(tensor, non_blocking=True)
        torch.cuda.current_stream().synchronize()
        tensor = host
    array: NDArray[np.float32] = tensor.numpy()
    return array
