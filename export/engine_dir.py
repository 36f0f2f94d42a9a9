"""Export a checkpoint and an exit head to an engine directory. The directory appears complete or
not at all."""

import contextlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from itertools import chain
from pathlib import Path
from typing import Any

import onnx

import eesd
from eesd.common.draft_vocab import Ids
from eesd.common.errors import EESDError
from eesd.common.files import directory_written_whole, remove_leftovers, temporary_beside
from eesd.common.geometry import ExitConfig, Geometry
from eesd.common.integrity import file_info, sha256_of
from eesd.common.json_input import read_json
from eesd.common.manifest import (
    DRAFT_VOCAB_FILE,
    FORMAT_VERSION,
    MANIFEST_FILE,
    WEIGHTS_FILE,
    FileInfo,
    GraphInfo,
    Manifest,
)
from eesd.common.outputs import existing_parent, resolved
from eesd.common.prior import CalibrationPrior
from eesd.common.quantization import EXIT_HEAD, LM_HEAD
from eesd.common.weights import (
    DRAFT_VOCAB,
    HEAD_TABLES,
    ROTARY_TABLES,
    StoredWeight,
    checkpoint_names,
    lm_head_name,
    model_shapes,
    weights_of,
)
from eesd.export.cache import other_file
from eesd.export.cpu.build import write_build
from eesd.export.cpu.readers import SourceReader
from eesd.export.memory import split_layers
from eesd.export.onnx_graph import ExportOptions, Graph, make_graph, to_proto
from eesd.export.weights import (
    JointTensor,
    TensorSource,
    WeightLayout,
    check_space,
    joined,
    layout_weights,
    link_files,
    linkable_tensors,
    write_weights,
)
from eesd.model import initial_head
from eesd.model.arrays import Array, to_float32
from eesd.model.checkpoint import Checkpoint, exit_head_tensors, stored_draft_vocab
from eesd.model.eagle_file import read_eagle
from eesd.model.exit_head_file import read_exit_config
from eesd.model.generation_config import GENERATION_CONFIG_FILE
from eesd.model.gguf_file import GgufTensor
from eesd.model.rotary import rotary_tables
from eesd.model.safetensors_file import CheckpointTensor
from eesd.model.tokenizer_files import resolved_tokenizer
from eesd.runtime.decoding.sampling import Sampling
from eesd.runtime.engines.cpu_build import FILES, place_of

WHOLE_MODEL_PRIOR = CalibrationPrior((-0.35, 4.3, 0.22, 0.16, 0.03), (1.6, 0.37, 0.14, 0.12, -0.25))
"""Calibration prior of a draft that is the whole model in fewer bits. It is the mean of fits to
three such drafts (docs/controllers.md)."""
Progress = Callable[[str, int, int], None]
"""A function that is called with the name of the current step or weight, the number of bytes just
written, and the total (0 if it is unknown)."""


class ComputedTensor:
    """A tensor that is computed and not read. It is a rotary table, or the rows of an LM head for a
    draft vocabulary."""

    def __init__(self, compute: Callable[[], Array]) -> None:
        self.read = compute


@dataclass(frozen=True)
class Head:
    """The exit head of an export.

    Attributes:
        config: Configuration of the head. With a draft vocabulary, it has a separate LM head.
        sources: Sources of the weights, by their names in the head.
        draft_vocab: Ids of the draft vocabulary [Vd] (int64) in ascending order, or None if there
            is no draft vocabulary.
    """

    config: ExitConfig
    sources: Mapping[str, TensorSource]
    draft_vocab: Ids | None = None


def stored_head(checkpoint: Checkpoint, directory: Path) -> Head:
    """Open a trained exit head.

    Args:
        checkpoint: The base model.
        directory: Directory of the head.

    Raises:
        EESDError: The head is missing or damaged, or was trained for another model.
    """
    config = read_exit_config(directory, checkpoint.fingerprint())
    sources: dict[str, TensorSource] = dict(
        exit_head_tensors(checkpoint.geometry, config, directory)
    )
    if not config.draft_vocab:
        return Head(config, sources)
    ids = stored_draft_vocab(checkpoint.geometry, config, directory)
    if not config.own_lm_head:
        whole = checkpoint.tensors[lm_head_name(checkpoint.geometry)]
        sources[LM_HEAD] = ComputedTensor(lambda: whole.read()[ids])
    return Head(replace(config, own_lm_head=True), sources, ids)


def eagle_head(checkpoint: Checkpoint, directory: Path) -> Head:
    """Open a published EAGLE-3 head.

    Raises:
        EESDError: The head is damaged, not supported, or for another model.
    """
    config, tensors, ids = read_eagle(checkpoint, directory)
    # The head is copied and never linked, because its files have the names of a model's files.
    return Head(
        config, {name: ComputedTensor(tensor.read) for name, tensor in tensors.items()}, ids
    )


def untrained_head(checkpoint: Checkpoint, layer: int) -> Head:
    """Make an exit head after ``layer`` layers from the model's last layer, final norm and LM
    head."""
    return _models_own(checkpoint, ExitConfig(layer=layer, base=checkpoint.fingerprint()))


def early_exit(checkpoint: Checkpoint, layer: int) -> Head:
    """Make an early exit after ``layer`` layers, for a model that was trained for it. The exit uses
    the model's final norm and LM head, and has no block."""
    return _models_own(
        checkpoint, ExitConfig(layer=layer, blocks=0, base=checkpoint.fingerprint(), trained=True)
    )


def whole_model(checkpoint: Checkpoint) -> Head:
    """Use the whole model as its draft. The draft has all layers, the final norm and the LM head,
    with fewer bits for each weight."""
    return _models_own(
        checkpoint, untrained_draft(checkpoint.geometry, True, checkpoint.fingerprint())
    )


def no_head(checkpoint: Checkpoint) -> Head:
    """Make a placeholder without weights, for drafts that come only from the text."""
    return _models_own(
        checkpoint, untrained_draft(checkpoint.geometry, False, checkpoint.fingerprint())
    )


def untrained_draft(geometry: Geometry, whole: bool, base: str = "") -> ExitConfig:
    """Returns the configuration of a draft that is the whole model. If ``whole`` is false, it is
    the placeholder for drafts from the text alone."""
    if whole:
        return ExitConfig(
            geometry.num_layers, blocks=0, base=base, trained=True, calibration=WHOLE_MODEL_PRIOR
        )
    return ExitConfig(1, blocks=0, base=base)


def _models_own(checkpoint: Checkpoint, config: ExitConfig) -> Head:
    """A head that consists of the model's weights."""
    initial_head.check_exit(checkpoint.geometry, config)
    names = initial_head.initial_names(checkpoint.geometry, config)
    sources = {name: _own_source(checkpoint, config, name, base) for name, base in names.items()}
    return Head(config, sources)


def _own_source(
    checkpoint: Checkpoint, config: ExitConfig, name: str, base: Sequence[str]
) -> TensorSource:
    """The source of a head's parameter that comes from the model's tensors. A single tensor is
    returned unchanged, so that it can be linked."""
    parts = [checkpoint.tensors[part] for part in base]
    geometry = checkpoint.geometry
    if len(parts) == 1 and geometry.experts is None and config.mlp is None:
        return parts[0]
    return ComputedTensor(
        lambda: initial_head.joined(
            name, [to_float32(part.read()) for part in parts], geometry, config
        )
    )


def export(
    checkpoint: Checkpoint,
    head: Head,
    options: ExportOptions,
    output: Path,
    check: Callable[[Path, Manifest], None] | None = None,
    progress: Progress = lambda *_: None,
    announce: Callable[[Manifest, int], None] = lambda *_: None,
    packed: bool = False,
) -> Manifest:
    """Write an engine directory.

    Everything is written into a temporary directory beside ``output``, which is renamed at the end.
    An existing engine directory is replaced.

    Args:
        checkpoint: The base model.
        head: The exit head.
        options: Options of the export.
        output: The engine directory to write.
        check: Called with the temporary directory and its manifest. If it raises, nothing is left
            behind.
        progress: Called when a step begins, and after each weight.
        announce: Called before anything is written. Its arguments are the manifest (without
            descriptions of files) and the number of bytes of the weights.
        packed: Whether to write the weights packed for the CPU, and not as ``weights.bin``. Only
            this project's operators can run such a directory.

    Raises:
        EESDError: The options do not fit the model, its tokenizer cannot be loaded, the disk is too
            small, or ``output`` holds other files. If they appeared during the export, the new
            directory is kept next to ``output``, and the message gives its path.
    """
    output = resolved(output)
    check_output(output)
    before = _any_manifest(output)

    def foreign(directory: Path) -> str:
        return _foreign(directory) or "another run has just written it" * (
            _any_manifest(directory) != before
        )

    try:
        checkpoint.geometry.check_window(options.max_tree_nodes)
    except ValueError as error:
        raise EESDError(
            f"{checkpoint.path} cannot be exported so: {error}; give a smaller --max-tree-nodes."
        ) from None
    try:
        Sampling(**checkpoint.config.sampling.given)
    except EESDError as error:
        raise EESDError(
            f"{checkpoint.path / GENERATION_CONFIG_FILE} cannot be used: {error} Correct the file."
        ) from None
    progress("loading the tokenizer", 0, 0)
    # Some models are refused here, so this comes before the long work.
    texts = resolved_tokenizer(checkpoint.path)
    engines = prepared(checkpoint, head, options)
    layout = engines.layout
    expected = engines.packed_size if packed else layout.size
    announce(engines.manifest, expected)
    check_space(existing_parent(output), expected + 64_000_000)
    progress("packing the weights" if packed else "writing the weights", 0, 0)
    with directory_written_whole(output, foreign) as directory:
        files = _write_texts(directory, engines, texts)
        if head.draft_vocab is not None:
            head.draft_vocab.astype("<i8").tofile(directory / DRAFT_VOCAB_FILE)
            files[DRAFT_VOCAB_FILE] = file_info(directory / DRAFT_VOCAB_FILE)

        def wrote(name: str, size: int) -> None:
            progress(name, size, expected)

        manifest = replace(engines.manifest, files=files)
        if packed:
            place = place_of(directory, manifest)
            place.mkdir()
            engines.pack(place, wrote)
            manifest = replace(manifest, packed=sha256_of(place / FILES))
        else:
            linked = (engines.linked[name] for name in engines.linked.keys() & layout.locations)
            links = link_files(directory, linked)
            files[WEIGHTS_FILE] = write_weights(
                directory / WEIGHTS_FILE, layout, engines.sources, wrote
            )
            manifest = replace(manifest, files=files, linked=links)
        (directory / MANIFEST_FILE).write_text(manifest.to_json())
        if check is not None:
            check(directory, manifest)
    return manifest


def weight_sources(checkpoint: Checkpoint, head: Head, slots: int) -> dict[str, TensorSource]:
    """Returns the source of every tensor that graphs use, by its name. These are the tensors of the
    checkpoint and the exit head, and the rotary tables.

    Args:
        checkpoint: The base model.
        head: The exit head.
        slots: Number of rows of the rotary tables, S.
    """
    sources: dict[str, TensorSource] = {
        name: checkpoint.tensors[name] for name in model_shapes(checkpoint.geometry)
    }
    sources |= {EXIT_HEAD + name: source for name, source in head.sources.items()}
    if (ids := head.draft_vocab) is not None:
        sources[EXIT_HEAD + DRAFT_VOCAB] = ComputedTensor(lambda: ids)
    tables = [(ROTARY_TABLES, checkpoint.geometry)]
    if head.config.eagle:
        tables.append((HEAD_TABLES, head.config.eagle.block))
    for names, of in tables:
        sources |= {
            name: ComputedTensor(partial(_table, of, slots, index))
            for index, name in enumerate(names)
        }
    return sources


def _table(geometry: Geometry, slots: int, index: int) -> Array:
    """cos or sin [S, D/2]."""
    return rotary_tables(geometry, slots)[index]


def stored_sources(
    weights: Iterable[StoredWeight], sources: Mapping[str, TensorSource], geometry: Geometry
) -> dict[str, TensorSource]:
    """Returns the source of each weight of the graphs, by its name in the graphs. ``sources`` has
    the names of the checkpoint and the exit head."""
    names = {weight.name: checkpoint_names(weight.name, geometry) for weight in weights}
    return {name: joined([sources[part] for part in parts]) for name, parts in names.items()}


@dataclass(frozen=True)
class Prepared:
    """The engines of a directory before it is written.

    Attributes:
        graphs: The standard graphs by name.
        layout: Locations of the weights in ``weights.bin``.
        linked: Weights that stay in the checkpoint's files, by name.
        sources: Source of each weight of the graphs, by its name in the graphs.
        manifest: The manifest, without descriptions of files.
    """

    graphs: Mapping[str, Graph]
    layout: WeightLayout
    linked: Mapping[str, CheckpointTensor]
    sources: Mapping[str, TensorSource]
    manifest: Manifest

    @property
    def packed_size(self) -> int:
        """Returns the approximate bytes of the build for the CPU. Blocks of GGUF files keep their
        size."""
        weights = {one.name: one for graph in self.graphs.values() for one in graph.weights}
        return sum(_packed_bytes(self.sources[name], weights[name]) for name in weights)

    def pack(self, place: Path, progress: Callable[[str, int], None] = lambda *_: None) -> None:
        """Write the build for the CPU directly from the checkpoint into ``place``."""
        write_build(self.manifest, place, self._reader, progress)

    def _reader(self, graph: GraphInfo) -> SourceReader:
        return SourceReader(weights_of(self.manifest, graph), self.sources)

    def write_graphs(self, directory: Path) -> list[str]:
        """Write the standard graphs, and return the names of their files."""
        for graph in self.graphs.values():
            onnx.save(to_proto(graph, self.layout.locations), directory / graph.info.file)
        return [graph.info.file for graph in self.graphs.values()]


def _packed_bytes(source: TensorSource, weight: StoredWeight) -> int:
    parts = source.parts if isinstance(source, JointTensor) else [source]
    blocks = [one.nbytes for one in parts if isinstance(one, GgufTensor)]
    if weight.quantization is None or len(blocks) < len(parts):
        return weight.nbytes
    return sum(blocks)


def prepared(checkpoint: Checkpoint, head: Head, options: ExportOptions) -> Prepared:
    """The graphs of a model, and the sources of its weights. No weight is read.

    Raises:
        EESDError: The model cannot be split into this many stages, or has no weights to link.
    """
    geometry = checkpoint.geometry
    config = head.config
    splits = split_layers(geometry, config, options.dtype, options.quantization, options.stages)
    sources = weight_sources(checkpoint, head, options.max_seq_len)
    linked = linkable_tensors(sources, options.dtype) if options.link_weights else {}
    names = frozenset(linked)
    graphs = {"draft": make_graph("draft", geometry, config, options, None, names)}
    for number, layers in enumerate(splits):
        name = f"verify_{number}" if len(splits) > 1 else "verify"
        graphs[name] = make_graph(name, geometry, config, options, layers, names)
    layout = layout_weights((graph.weights for graph in graphs.values()), linked)
    every = chain.from_iterable(graph.weights for graph in graphs.values())
    stored = stored_sources(every, sources, geometry)
    return Prepared(graphs, layout, linked, stored, _manifest(checkpoint, config, options, graphs))


def _write_texts(
    directory: Path, engines: Prepared, texts: Mapping[str, bytes]
) -> dict[str, FileInfo]:
    """Write the graphs and the files of the tokenizer."""
    names = engines.write_graphs(directory)
    files = {name: file_info(directory / name) for name in names}
    for name, content in texts.items():
        (directory / name).write_bytes(content)
        files[name] = file_info(directory / name)
    return files


def _manifest(
    checkpoint: Checkpoint,
    exit_config: ExitConfig,
    options: ExportOptions,
    graphs: Mapping[str, Graph],
) -> Manifest:
    """Returns the manifest of a directory, without descriptions of files."""
    return Manifest(
        format_version=FORMAT_VERSION,
        model=checkpoint.path.resolve().name,
        geometry=checkpoint.geometry,
        exit_head=exit_config,
        dtype=options.dtype,
        quantization=options.quantization,
        max_seq_len=options.max_seq_len,
        max_tree_nodes=options.max_tree_nodes,
        draft_top_k=options.draft_top_k,
        bos_token_id=checkpoint.config.bos_token_id,
        eos_token_ids=checkpoint.config.eos_token_ids,
        sampling=checkpoint.config.sampling,
        draft=graphs["draft"].info,
        verify=tuple(graph.info for name, graph in graphs.items() if name != "draft"),
        files={},
        linked={},
        tools=_tools(),
        plans={},
    )


def _tools() -> dict[str, str]:
    tools = {"eesd": eesd.__version__, "onnx": onnx.__version__}
    with contextlib.suppress(PackageNotFoundError):
        tools["transformers"] = version("transformers")
    return tools


def check_output(output: Path) -> None:
    """Check that an export may write to ``output``. This function also removes files that killed
    runs left next to this directory and in it.

    An existing directory must be empty, or an engine directory without other files. Packed weights
    count as a part of it.

    Args:
        output: The directory, without links and "..".

    Raises:
        EESDError: ``output`` holds files that replacing it would delete, one of its parents is a
            file, or it cannot be written.
    """
    remove_leftovers(output.parent, output.name)
    remove_leftovers(output)
    existing = output if output.exists() else existing_parent(output)
    if not existing.is_dir():
        raise EESDError(f"{existing} is a file; give another --output.")
    if output.exists() and (reason := _foreign(output)):
        raise EESDError(f"{output} is not replaced: {reason}; give another --output.")
    try:
        with temporary_beside(existing_parent(output) / output.name):
            pass  # This raises an error if the place cannot be written.
    except OSError as error:
        raise EESDError(
            f"{output} cannot be written ({error.strerror}); give another --output."
        ) from None


def _foreign(output: Path) -> str:
    """Returns the reason not to replace a directory. It is "" if the directory is empty, or is an
    engine directory without other files."""
    manifest = _any_manifest(output)
    if manifest is None:
        return "it is not an engine directory" * any(output.iterdir())
    listed = [
        found for part in ("files", "linked") if isinstance(found := manifest.get(part), dict)
    ]
    return other_file(output, {MANIFEST_FILE}.union(*listed))


def _any_manifest(directory: Path) -> dict[str, Any] | None:
    """Read an EESD manifest of any format version. Returns None for anything else, because other
    programs also write a manifest.json."""
    with contextlib.suppress(EESDError):
        raw = read_json(directory / MANIFEST_FILE, "")
        if isinstance(raw, dict) and raw.keys() >= {"format_version", "draft", "verify"}:
            return raw
    return None
