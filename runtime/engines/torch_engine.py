"""The plain torch engine: the modules of ``model/`` themselves, on the CPU or on GPUs, in the engine directory's own type."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path

from torch import Tensor, set_num_threads

from eesd.common.manifest import Manifest
from eesd.model.decoder import Inputs
from eesd.model.graphs import Draft, Verify
from eesd.runtime.engines.device import Call, DeviceKVCache, Place, Run, device_streams
from eesd.runtime.engines.device_engine import DeviceEngine, engine_pair
from eesd.runtime.engines.torch_weights import load_modules


class TorchStageRunner:
    """A module with its weights at a place, and the rotary tables [S, D/2] there."""

    capturable = True

    def __init__(self, module: Draft | Verify, caches: Sequence[int], tables: tuple[Tensor, Tensor], place: Place) -> None:
        self.module = module
        self.caches = caches
        self.place = place
        self._tables = tables

    def prepare(self, call: Call) -> Run:
        inputs = Inputs(*self._tables, call.position_ids, call.write_indices, call.attn_mask)

        def run() -> list[Tensor]:
            results: list[Tensor] = list(self.module(call.x, inputs, call.caches)[:-1])
            return results

        return run


def open_torch(
    directory: Path, manifest: Manifest, threads: int, draft: bool, device: str | None = None
) -> tuple[DeviceEngine, DeviceEngine | None]:
    """Verify and (if wanted) draft over one set of weights, on the GPUs if torch sees any. On the CPU ``threads`` becomes the
    number of threads of this process's torch, which has one for all."""
    places = device_streams(len(manifest.verify), device)
    on_cpu = places[0].stream is None
    if on_cpu:
        set_num_threads(threads)
    stages = load_modules(directory, manifest, [place.device for place in places], draft)
    verify = [
        TorchStageRunner(stage.verify, graph.caches, stage.tables, place)
        for stage, graph, place in zip(stages, manifest.verify, places, strict=True)
    ]
    make_kv_cache = partial(DeviceKVCache, manifest, places, grow=on_cpu)
    first = stages[0]
    drafter = TorchStageRunner(first.draft, manifest.draft.caches, first.tables, places[0]) if first.draft else None
    return engine_pair(manifest, verify, drafter, make_kv_cache, fill=not on_cpu)
