"""Reading ``manifest.json``: every value is checked before anything uses it."""

from collections.abc import Mapping, Sequence
from dataclasses import is_dataclass
from pathlib import Path
from types import UnionType
from typing import Any, get_args, get_origin, get_type_hints

from eesd.common.errors import EESDError
from eesd.common.geometry import draft_caches, exit_caches
from eesd.common.json_input import read_json
from eesd.common.manifest import FORMAT_VERSION, MANIFEST_FILE, WEIGHTS_FILE, GraphInfo, Manifest, TensorInfo
from eesd.common.weights import DTYPES, QUANTIZED

_SIZES = ("vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads", "head_dim")
_LIMITS = ("max_seq_len", "max_tree_nodes", "draft_top_k")


def load_manifest(directory: Path) -> Manifest:
    """Read and check the manifest of an engine directory, and check that every file is there and has its full size.

    Raises:
        EESDError: ``directory`` is not an engine directory, is damaged, or has another format version.
    """
    path = directory / MANIFEST_FILE
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
            f"{path} has format version {version}, this EESD reads version {FORMAT_VERSION}; export the model again."
        )
    try:
        manifest = _parse(raw)
    except (AttributeError, TypeError, ValueError):
        raise EESDError(f"{path} is damaged (a value is missing or invalid); export the model again.") from None
    for name, size in manifest.sizes.items():
        file = directory / name
        if not file.exists():
            raise EESDError(f"{file} is missing; export the model again.")
        if file.stat().st_size != size:
            raise EESDError(f"{file} has {file.stat().st_size} bytes where the manifest says {size}; export the model again.")
    return manifest


def _parse(raw: Mapping[str, Any]) -> Manifest:
    """Build a manifest from JSON. Raises AttributeError, TypeError or ValueError if a value is missing or invalid."""
    manifest: Manifest = _from_json(Manifest, raw)
    exit_head = manifest.exit_head
    sizes = [getattr(manifest.geometry, name) for name in _SIZES] + [getattr(manifest, name) for name in _LIMITS]
    if min(*sizes, exit_head.layer, exit_head.blocks) < 1 or manifest.dtype not in DTYPES:
        raise ValueError("a size is below 1, or the element type is unknown")
    quantized = manifest.quantization
    if quantized is not None and (quantized.weights not in QUANTIZED or quantized.block < 1):
        raise ValueError("an unknown quantization")
    if not {WEIGHTS_FILE, *(graph.file for graph in manifest.graphs)} <= manifest.files.keys():
        raise ValueError("a file is not listed")
    if any(Path(name).name != name for name in (*manifest.files, *manifest.linked)):
        raise ValueError("a file is outside the directory")
    _check_graph(manifest.draft, draft_caches(manifest.geometry, exit_head), manifest, first=True, last=True)
    _check_stages(manifest)
    if not manifest.plans.keys() <= {graph.file for graph in manifest.graphs}:
        raise ValueError("a plan of no graph")
    if any(Path(plan.file).name != plan.file for plan in manifest.plans.values()):
        raise ValueError("a plan is outside the directory")
    return manifest


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


def _from_json(kind: Any, value: Any) -> Any:
    """Convert a JSON value to the annotated type ``kind``: a dataclass, a tuple, a dict, an optional or a plain type."""
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is UnionType:
        return value if type(value) in arguments else _from_json(arguments[0], value)
    if is_dataclass(kind):
        hints = get_type_hints(kind)
        if value.keys() != hints.keys():
            raise ValueError(kind)
        return kind(**{name: _from_json(hints[name], item) for name, item in value.items()})  # type: ignore[operator]
    if origin is tuple and type(value) is list:
        return tuple(_from_json(arguments[0], item) for item in value)
    if origin is dict and type(value) is dict:
        return {name: _from_json(arguments[1], item) for name, item in value.items()}
    if type(value) is not kind:  # isinstance would accept True as a number
        raise TypeError(kind)
    return value


def _check_graph(graph: GraphInfo, caches: Sequence[int], manifest: Manifest, first: bool, last: bool) -> None:
    """Check that a graph has exactly these caches, and the inputs and outputs that the runtime binds.

    The first stage takes token ids and the last returns logits. Between stages a hidden state is passed on.
    """
    shape = ("B", manifest.geometry.num_kv_heads, "S", manifest.geometry.head_dim)
    wanted = [(f"{part}_{index}", shape) for index in caches for part in ("key", "value")]
    hidden = (("B", "n", manifest.geometry.hidden_size), manifest.dtype)
    x = TensorInfo("input_ids", ("B", "n"), "int64") if first else TensorInfo("hidden", *hidden)
    y = TensorInfo("logits", ("B", "n", manifest.geometry.vocab_size), "float32") if last else TensorInfo("hidden_out", *hidden)
    if list(graph.caches) != caches or [(tensor.name, tensor.shape) for tensor in graph.inputs[4:]] != wanted:
        raise ValueError("caches")
    if graph.inputs[:1] != (x,) or graph.outputs[:1] != (y,):
        raise ValueError("input_ids, hidden or logits")
