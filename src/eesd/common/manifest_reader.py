"""Reading ``manifest.json``: every value is checked before anything uses it."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import is_dataclass, replace
from functools import cache
from pathlib import Path
from types import UnionType
from typing import Any, cast, get_args, get_origin, get_type_hints

from eesd.common.checks import is_file_name, shown
from eesd.common.errors import EESDError
from eesd.common.files import remove_leftovers
from eesd.common.geometry import deep_fault, draft_caches, draft_columns, eagle_fault, exit_caches
from eesd.common.json_input import read_json
from eesd.common.manifest import (
    DRAFT_VOCAB_FILE,
    FORMAT_VERSION,
    MANIFEST_FILE,
    MAX_SLOTS,
    MAX_TOP_K,
    MAX_TREE_NODES,
    WEIGHTS_FILE,
    GraphInfo,
    Manifest,
    TensorInfo,
)
from eesd.common.weights import (
    BLOCKS,
    DTYPES,
    EMBEDDINGS,
    FP8_WEIGHTS,
    LEVELS,
    NVFP4,
    OWN_BLOCKS,
    SCALE_TYPES,
    Quantizations,
    is_linear,
    model_shapes,
)

_MOST = {"max_seq_len": MAX_SLOTS, "max_tree_nodes": MAX_TREE_NODES, "draft_top_k": MAX_TOP_K}


def load_manifest(directory: Path) -> Manifest:
    """Read and check the manifest of an engine directory, and check that every file is there and has its full size.

    A directory that a killed export had moved aside is put back first.

    Raises:
        EESDError: ``directory`` is not an engine directory, is damaged, or has another format version.
    """
    path = directory / MANIFEST_FILE
    if not directory.exists():  # a killed export may have moved it aside to replace it
        with suppress(OSError, RuntimeError):  # of links that lead in a circle
            remove_leftovers(directory.resolve().parent, directory.resolve().name)
    if not directory.is_dir():
        raise EESDError(f"{directory} is not a directory; give the output directory of eesd-export.")
    if not path.exists():
        raise EESDError(f"{directory} has no {MANIFEST_FILE}; give the output directory of eesd-export.")
    raw = read_json(path, "export the model again")
    version = raw.get("format_version") if isinstance(raw, dict) else None
    if version is None:
        raise EESDError(f"{path} is not an EESD manifest; give the output directory of eesd-export.")
    if version != FORMAT_VERSION:
        raise EESDError(
            f"{path} has format version {shown(version)}, this EESD reads version {FORMAT_VERSION}; export the model again."
        )
    try:
        manifest = _parse(raw)
    except ValueError as error:
        raise EESDError(f"{path} is damaged ({error}); export the model again.") from None
    for name, size in manifest.sizes.items():
        file = directory / name
        if not file.exists():
            raise EESDError(f"{file} is missing; export the model again.")
        if file.stat().st_size != size:
            raise EESDError(f"{file} has {file.stat().st_size} bytes where the manifest says {size}; export the model again.")
    return manifest


def _parse(raw: Mapping[str, Any]) -> Manifest:
    """Build a manifest from JSON. Raises ValueError if a value is missing or invalid."""
    manifest: Manifest = _from_json(Manifest, raw)
    exit_head, num_layers = manifest.exit_head, manifest.geometry.num_layers
    for name, most in _MOST.items():
        if not 1 <= getattr(manifest, name) <= most:
            raise ValueError(f"{name} must be between 1 and {most}")
    if manifest.max_seq_len <= manifest.max_tree_nodes:
        raise ValueError("max_seq_len has no room for the nodes of a round")
    if manifest.dtype not in DTYPES:
        raise ValueError("the element type is unknown")
    least = 0 if exit_head.eagle else 1
    most = num_layers if not exit_head.blocks else num_layers - 1
    if not (least <= exit_head.layer <= most and 0 <= exit_head.blocks <= num_layers):  # before anything is sized by them
        raise ValueError("the exit head does not fit the model")
    manifest.geometry.check_window(manifest.max_tree_nodes)
    if fault := deep_fault(num_layers, exit_head) or eagle_fault(manifest.geometry, exit_head):
        raise ValueError(fault)
    if exit_head.read_layers and len(manifest.verify) > 1:
        raise ValueError("states of layers in several stages")
    if not _draft_vocab_fits(manifest):
        raise ValueError("the draft vocabulary")
    _check_quantization(manifest.quantization)
    if not {WEIGHTS_FILE, *(graph.file for graph in manifest.graphs)} <= manifest.files.keys():
        raise ValueError("a file is not listed")
    if not all(is_file_name(name) for name in (*manifest.files, *manifest.linked)):
        raise ValueError("a file is outside the directory")
    _check_graph(manifest.draft, draft_caches(manifest.geometry, exit_head), manifest, first=True, last=True)
    _check_stages(manifest)
    _check_tensors(manifest)
    if not manifest.plans.keys() <= {graph.file for graph in manifest.graphs}:
        raise ValueError("a plan of no graph")
    if not all(is_file_name(plan.file) for plan in manifest.plans.values()):
        raise ValueError("a plan is outside the directory")
    return manifest


def _draft_vocab_fits(manifest: Manifest) -> bool:
    """Whether the directory has no draft vocabulary, or the file of one with enough tokens for the candidates of a node."""
    head, listed = manifest.exit_head, DRAFT_VOCAB_FILE in manifest.files
    if not head.draft_vocab:
        return not listed
    fits = manifest.draft_top_k <= head.draft_vocab <= manifest.geometry.vocab_size
    return fits and head.own_lm_head and listed and manifest.files[DRAFT_VOCAB_FILE].size == 8 * head.draft_vocab


def _check_quantization(quantization: Quantizations) -> None:
    """Check that every kind of quantization is known."""
    for one in quantization.used:
        known = one.weights in LEVELS and one.block in OWN_BLOCKS and one.scales in (None, *SCALE_TYPES)
        if one != NVFP4 and not (known and (one.integers or replace(one, block=32, scales=None) == FP8_WEIGHTS)):
            raise ValueError("an unknown quantization")
    if not all(one in (None, NVFP4) or one.block in BLOCKS for one in quantization.places.values()):
        raise ValueError("an unknown quantization")


def _check_tensors(manifest: Manifest) -> None:
    """Check that the tensors with levels of their own are the model's, and consist of whole blocks."""
    tensors = manifest.quantization.tensors
    shapes = model_shapes(manifest.geometry) if tensors else {}
    for name, one in tensors.items():
        if not (is_linear(name) or name == EMBEDDINGS) or name not in shapes or shapes[name][1] % one.block:
            raise ValueError(f"quantization.tensors.{shown(name)}")
        if name == EMBEDDINGS and one.weights != "int8":
            raise ValueError("the quantization of the embedding table")
    if tensors and manifest.linked:
        raise ValueError("linked weights with levels of their own")


def _check_stages(manifest: Manifest) -> None:
    """Check that each stage begins where the previous one ends, and that the first has every cache of the draft."""
    end, last = 0, len(manifest.verify) - 1
    for number, stage in enumerate(manifest.verify):
        exits = exit_caches(manifest.geometry, manifest.exit_head) if number == 0 else range(0)
        begin, end = end, end + len(stage.caches) - len(exits)
        if end < max(begin + 1, manifest.exit_head.layer):
            raise ValueError("stages")
        _check_graph(stage, [*range(begin, end), *exits], manifest, first=number == 0, last=number == last)
    if end != manifest.geometry.num_layers:
        raise ValueError("stages")


def _from_json(kind: Any, value: Any, where: str = "") -> Any:
    """Convert a JSON value to the annotated type ``kind``: a dataclass, a tuple, a dict, an optional or a plain type."""
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is UnionType:
        return value if type(value) in arguments else _from_json(arguments[0], value, where)
    if is_dataclass(kind) and type(value) is dict:
        hints = _hints(cast(type, kind))
        if value.keys() != hints.keys():
            odd = min(map(str, value.keys() ^ hints.keys()))
            raise ValueError(f"{where}{shown(odd)} is missing or unknown")
        return kind(**{name: _from_json(hints[name], item, f"{where}{name}.") for name, item in value.items()})  # type: ignore[operator]
    if origin is tuple and type(value) is list:
        return tuple(_from_json(arguments[0], item, f"{where}{index}.") for index, item in enumerate(value))
    if origin is dict and type(value) is dict:
        return {name: _from_json(arguments[1], item, f"{where}{shown(name)}.") for name, item in value.items()}
    if type(value) is not kind:  # isinstance would accept True as a number
        raise ValueError(f"{where.removesuffix('.') or 'it'} is {shown(value)}, which is of another type")
    return value


@cache
def _hints(kind: Any) -> dict[str, Any]:
    """The annotated types of a dataclass. A manifest has hundreds of values of a few classes."""
    return get_type_hints(kind)


def _check_graph(graph: GraphInfo, caches: Sequence[int], manifest: Manifest, first: bool, last: bool) -> None:
    """Check that a graph has exactly these caches, and the inputs and outputs that the runtime binds.

    The first stage takes token ids and the last returns logits. Between stages a hidden state is passed on.
    """
    geometry, dtype = manifest.geometry, manifest.dtype
    shape = ("B", geometry.num_kv_heads, "S", geometry.head_dim)
    names = [f"{part}_{index}" for index in caches for part in ("key", "value")]
    hidden = (("B", "n", geometry.hidden_size), dtype)
    is_draft = graph is manifest.draft
    rows = last and not is_draft
    columns = draft_columns(geometry, manifest.exit_head) if is_draft else geometry.vocab_size
    inputs = [
        TensorInfo("input_ids", ("B", "n"), "int64") if first else TensorInfo("hidden", *hidden),
        TensorInfo("position_ids", ("B", "n"), "int64"),
        TensorInfo("write_indices", ("B",), "int64"),
        TensorInfo("attn_mask", ("B", 1, "n", "S"), dtype),
        *([TensorInfo("logit_rows", ("R",), "int64")] if rows else ()),
        *(TensorInfo(name, shape, dtype) for name in names),
    ]
    top = ("B", "n", manifest.draft_top_k)
    candidates = [TensorInfo("topk_ids", top, "int64"), TensorInfo("topk_logprobs", top, "float32")]
    outputs = [
        TensorInfo("logits", ("B", "R" if rows else "n", columns), "float32") if last else TensorInfo("hidden_out", *hidden),
        *(candidates if is_draft else ()),
        *(TensorInfo(f"{name}_out", shape, dtype) for name in names),
    ]
    given = {tensor.name for tensor in graph.inputs}
    missing = [tensor.name for tensor in inputs if tensor.name not in given]
    if missing:
        raise ValueError(f"{graph.file} has no input {missing[0]}")
    if list(graph.caches) != list(caches) or list(graph.inputs) != inputs or list(graph.outputs) != outputs:
        raise ValueError("inputs, outputs or caches of a graph")
