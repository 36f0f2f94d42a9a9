"""Helpers that inspect engine directories, and damage copies of them."""

import json
import shutil
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import ModelProto, TensorProto

from eesd.common.geometry import ExitConfig
from eesd.common.integrity import file_info
from eesd.common.manifest import DRAFT_VOCAB_FILE, WEIGHTS_FILE, load_manifest
from eesd.common.weights import weight_bytes, weights_of
from eesd.export.memory import estimate_memory
from eesd.export.widened import reference
from eesd.model.checkpoint import Checkpoint
from eesd.model.loading import make_initial_head, save_exit_head
from eesd.runtime.engines.backends import EngineOptions, open_engines
from eesd.runtime.engines.base import Call, Logits
from support.on_cache import OnCache
from support.tiny_checkpoints import randomise

Damage = Callable[[Path], object]
PROMPT = [1, 17, 5, 40, 3, 88, 61]


def trained_head(
    model: Path, directory: Path, blocks: int, own_lm_head: bool, layer: int = 1
) -> Path:
    """Write a random exit head for the model. The head is marked as trained."""
    checkpoint = Checkpoint(model)
    config = ExitConfig(layer, blocks, own_lm_head, checkpoint.fingerprint(), trained=True)
    head = make_initial_head(checkpoint, config)
    randomise(head, seed=1)
    save_exit_head(head, directory)
    return directory


def reference_logits(directory: Path) -> Logits:
    """Returns the logits [tokens, V] of :data:`PROMPT`, which ONNX Runtime's operators compute from
    the directory's graphs in float32."""
    manifest = load_manifest(directory)
    engine = reference(directory, manifest, manifest.verify, 1)
    [kv_cache] = engine.new_kv_caches()
    kv_cache.reserve(len(PROMPT))
    return engine.forward([Call(kv_cache, PROMPT, range(len(PROMPT)), 0)])[0].logits


def graph_of(directory: Path, name: str) -> ModelProto:
    """Load a graph without its weights."""
    return onnx.load(directory / name, load_external_data=False)


def tensor_locations(model: ModelProto) -> dict[str, tuple[int, int]]:
    """Returns the (offset, length) of every tensor in ``weights.bin``, and of the draft vocabulary
    in its file."""
    external = [
        tensor for tensor in model.graph.initializer if tensor.data_location == TensorProto.EXTERNAL
    ]
    found = {}
    for tensor in external:
        entries = {entry.key: entry.value for entry in tensor.external_data}
        assert entries["location"] == (
            DRAFT_VOCAB_FILE if tensor.name == "exit_head.draft_vocab" else WEIGHTS_FILE
        )
        found[tensor.name] = (int(entries["offset"]), int(entries["length"]))
    return found


def assert_weights_match_manifest(directory: Path) -> None:
    """Check that the manifest's bytes of weights, in total and shared by the draft and verify
    graphs, match the graphs."""
    manifest = load_manifest(directory)
    stored = [tensor_locations(graph_of(directory, graph.file)) for graph in manifest.graphs]
    for graph, weights in zip(manifest.graphs, stored, strict=True):
        assert weight_bytes(manifest, graph) == sum(length for _, length in weights.values())
        tensors = [weight.tensors for weight in weights_of(manifest, graph).values()]
        assert {name: size for group in tensors for name, size in group.items()} == {
            n: s for n, (_, s) in weights.items()
        }
    first, *others = estimate_memory(manifest, 1)
    assert first.shared_weights == sum(
        stored[0][name][1] for name in stored[0].keys() & stored[1].keys()
    )
    assert first.shared_weights < first.draft_weights
    assert not any(device.draft_weights or device.shared_weights for device in others)


def logits_of(
    directory: Path, backend: str, activations: str | None = None
) -> list[NDArray[np.float32]]:
    """Returns the logits of a prompt, of a verify pass over one token, and of a draft step."""
    engines = open_engines(
        directory,
        load_manifest(directory),
        EngineOptions(backend, 1, draft=True, activations=activations),
    )
    assert engines.draft is not None
    kv_cache = engines.verify.new_kv_caches()[0]
    verify = OnCache(engines.verify, kv_cache)
    draft = OnCache(engines.draft, kv_cache)
    calls = ((verify, PROMPT, 0), (verify, [7], len(PROMPT)), (draft, [9], len(PROMPT) + 1))
    return [
        binding.forward(tokens, range(w, w + len(tokens)), w).logits.copy()
        for binding, tokens, w in calls
    ]


def edit_manifest(directory: Path, path: str, value: Any) -> None:
    """Set the value at a path such as ``draft/caches/0`` of the manifest. ``...`` removes it."""
    raw = json.loads((directory / "manifest.json").read_text())
    *keys, last = (int(key) if key.isdigit() else key for key in path.split("/"))
    container = raw
    for key in keys:
        container = container[key]
    if value is ...:
        del container[last]
    else:
        container[last] = value
    (directory / "manifest.json").write_text(json.dumps(raw))


def record(directory: Path, name: str) -> None:
    """Record a changed file in the manifest."""
    edit_manifest(directory, f"files/{name}", asdict(file_info(directory / name)))


def recorded(damage: Damage) -> Damage:
    """Returns a function that does the same damage, and then records the size and the hashes of the
    damaged file in the manifest."""

    def change(directory: Path) -> None:
        damage(directory)
        raw = json.loads((directory / "manifest.json").read_text())
        listed = {**raw["files"], **{plan["file"]: plan for plan in raw["plans"].values()}}
        for name, info in listed.items():
            info |= asdict(file_info(directory / name))
        (directory / "manifest.json").write_text(json.dumps(raw))

    return change


def garble(directory: Path) -> None:
    """Overwrite the verify graph."""
    path = directory / "verify.onnx"
    path.write_bytes(b"\xff" * path.stat().st_size)


def swap_graphs(directory: Path) -> None:
    """Replace the draft graph by the verify graph."""
    shutil.copyfile(directory / "verify.onnx", directory / "draft.onnx")
