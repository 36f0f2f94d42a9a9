"""The export as a whole: checkpoint and exit head in, a complete engine directory out, or nothing."""

import contextlib
import json
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import onnx
import torch
from torch import Tensor

import eesd
from eesd.common.errors import EESDError
from eesd.common.geometry import ExitConfig
from eesd.common.manifest import FORMAT_VERSION, NAME, WEIGHTS, FileInfo, LinkInfo, Manifest, sha256_of
from eesd.export.graph import ExportOptions, Graph, to_proto, trace
from eesd.export.links import link_files, linkable
from eesd.export.stages import split_layers
from eesd.export.weights import TensorSource, WeightLayout, check_space, layout_weights, write_weights
from eesd.model import exit_head
from eesd.model.checkpoint import Checkpoint, exit_tensors
from eesd.model.decoder import rotary_tables

REPLACED = (".onnx", ".bin", ".json", ".jinja", ".plan", ".cache")
"""Kinds of files that a directory may hold when an export takes its place: those of the last export and plans built of it."""
TEXT_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")


class Computed:
    """A weight that is computed rather than read: the rotary tables."""

    def __init__(self, compute: Callable[[], Tensor]) -> None:
        self.read = compute


@dataclass(frozen=True)
class Head:
    """The exit head of an export: its configuration and where each of its tensors comes from."""

    config: ExitConfig
    sources: Mapping[str, TensorSource]


def stored_head(checkpoint: Checkpoint, directory: Path) -> Head:
    """A trained head from its directory; refused if it was trained on another model."""
    config = exit_head.read_exit_config(directory, checkpoint.fingerprint())
    exit_head.check_exit(checkpoint.geometry, config.layer, config.blocks)
    return Head(config, exit_tensors(checkpoint.geometry, config, directory))


def untrained_head(checkpoint: Checkpoint, layer: int) -> Head:
    """A head that reuses the model's last layer and norm as they are."""
    exit_head.check_exit(checkpoint.geometry, layer, 1)
    config = ExitConfig(layer=layer, base=checkpoint.fingerprint())
    names = exit_head.initial_names(checkpoint.geometry, config)
    return Head(config, {name: checkpoint.tensors[base] for name, base in names.items()})


def export(
    checkpoint: Checkpoint,
    head: Head,
    options: ExportOptions,
    output: Path,
    stage: Callable[[str], None],
    progress: Callable[[str, int, int], None],
    check: Callable[[Path, Manifest], None],
) -> Manifest:
    """Write an engine directory; it appears under its name only when it is complete and ``check`` did not raise.

    ``stage`` is told what begins; ``progress`` each weight's name, its bytes, and the bytes of all weights.
    """
    check_output(output)
    splits = split_layers(checkpoint, head.config, options)
    sources = weight_sources(checkpoint, head, options.max_seq_len)
    linked = linkable(sources, options.dtype) if options.link_weights else {}
    in_place = frozenset(linked)
    stage("tracing the draft graph")
    graphs = {"draft": trace("draft", checkpoint.geometry, head.config, options, None, in_place)}
    for number, layers in enumerate(splits):
        name = f"verify_{number}" if len(splits) > 1 else "verify"
        stage(f"tracing the {name} graph")
        graphs[name] = trace(name, checkpoint.geometry, head.config, options, layers, in_place)
    layout = layout_weights((graph.weights for graph in graphs.values()), linked)
    check_space(_existing_parent(output), layout.size + 64_000_000)
    stage("writing the weights")
    with _staging(output) as directory:
        links = link_files(directory, (linked[name] for name in linked.keys() & layout.locations.keys()))
        files = _write_all(directory, checkpoint, sources, graphs, layout, progress)
        manifest = _manifest(checkpoint, head.config, options, graphs, files, links)
        (directory / NAME).write_text(manifest.to_json())
        stage("checking parity")
        check(directory, manifest)
    return manifest


def _write_all(
    directory: Path,
    checkpoint: Checkpoint,
    sources: Mapping[str, TensorSource],
    graphs: Mapping[str, Graph],
    layout: WeightLayout,
    progress: Callable[[str, int, int], None],
) -> dict[str, FileInfo]:
    total = sum(weight.nbytes for weight in layout.weights)
    files = {WEIGHTS: write_weights(directory / WEIGHTS, layout, sources, lambda name, size: progress(name, size, total))}
    for graph in graphs.values():
        onnx.save(to_proto(graph, layout.locations), directory / graph.info.file)
        files[graph.info.file] = _file_info(directory / graph.info.file)
    for name in TEXT_FILES:
        if (checkpoint.directory / name).exists():
            shutil.copyfile(checkpoint.directory / name, directory / name)
            files[name] = _file_info(directory / name)
    return files


def weight_sources(checkpoint: Checkpoint, head: Head, slots: int) -> dict[str, TensorSource]:
    """Where every weight of the graphs comes from, by its name in the graphs."""
    sources: dict[str, TensorSource] = dict(checkpoint.tensors)
    sources |= {f"exit_head.{name}": source for name, source in head.sources.items()}
    sources["cos"] = Computed(lambda: rotary_tables(checkpoint.geometry, slots)[0])
    sources["sin"] = Computed(lambda: rotary_tables(checkpoint.geometry, slots)[1])
    return sources


def _file_info(path: Path) -> FileInfo:
    return FileInfo(path.stat().st_size, sha256_of(path))


def _manifest(
    checkpoint: Checkpoint,
    exit_config: ExitConfig,
    options: ExportOptions,
    graphs: Mapping[str, Graph],
    files: dict[str, FileInfo],
    links: dict[str, LinkInfo],
) -> Manifest:
    return Manifest(
        format_version=FORMAT_VERSION,
        model=checkpoint.directory.resolve().name,
        geometry=checkpoint.geometry,
        exit_head=exit_config,
        dtype=options.dtype,
        quantization=options.quantization,
        max_seq_len=options.max_seq_len,
        max_tree_nodes=options.max_tree_nodes,
        draft_top_k=options.draft_top_k,
        bos_token_id=checkpoint.config.bos_token_id,
        eos_token_ids=checkpoint.config.eos_token_ids,
        draft=graphs["draft"].info,
        verify=tuple(graph.info for name, graph in graphs.items() if name != "draft"),
        files=files,
        linked=links,
        tools=_tools(),
        plans={},
    )


def _tools() -> dict[str, str]:
    tools = {"eesd": eesd.__version__, "torch": torch.__version__, "onnx": onnx.__version__}
    for name in ("onnxscript", "onnx-ir"):
        with contextlib.suppress(PackageNotFoundError):
            tools[name] = version(name)
    return tools


def check_output(output: Path) -> None:
    """Refuse to replace anything but an engine directory with nothing else in it: what it holds will be deleted."""
    existing = output if output.exists() else _existing_parent(output)
    if not existing.is_dir():
        raise EESDError(f"{existing} is a file; give another --output.")
    if not output.exists():
        return
    paths = sorted(output.iterdir())
    raw = _raw_manifest(output)
    if paths and raw is None:
        raise EESDError(f"{output} exists and is not an engine directory; give another --output.")
    links = raw.get("linked") if raw else None
    linked = set(links) if isinstance(links, dict) else set()
    foreign = next((p.name for p in paths if p.is_dir() or (p.suffix not in REPLACED and p.name not in linked)), None)
    if foreign is not None:
        raise EESDError(f"{output} also holds {foreign}, which no export wrote; move it away or give another --output.")


def _raw_manifest(directory: Path) -> dict[str, Any] | None:
    """The EESD manifest there, of whatever version; other programs have a manifest.json too."""
    try:
        raw = json.loads((directory / NAME).read_text("utf-8"))
    except (FileNotFoundError, ValueError):
        return None
    return raw if isinstance(raw, dict) and raw.keys() >= {"format_version", "base_fingerprint"} else None


def _existing_parent(path: Path) -> Path:
    return next(parent for parent in path.resolve().parents if parent.exists())


@contextlib.contextmanager
def _staging(output: Path) -> Iterator[Path]:
    """A directory beside ``output`` that takes its name when the block ends well and vanishes when it does not."""
    output = output.resolve()
    output.parent.mkdir(parents=True, exist_ok=True)
    staged = Path(tempfile.mkdtemp(prefix=f".{output.name}-", dir=output.parent))
    try:
        yield staged
        staged.chmod(0o755)
        if output.exists():
            _replace(output, staged)
        else:
            staged.rename(output)
    finally:
        shutil.rmtree(staged, ignore_errors=True)


def _replace(output: Path, staged: Path) -> None:
    """Put ``staged`` in the place of ``output``, which comes back if that fails."""
    aside = Path(tempfile.mkdtemp(prefix=f".{output.name}-old-", dir=output.parent))
    try:
        output.rename(aside / output.name)
        try:
            staged.rename(output)
        except BaseException:
            (aside / output.name).rename(output)
            raise
    finally:
        shutil.rmtree(aside, ignore_errors=True)
