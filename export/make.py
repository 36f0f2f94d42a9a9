"""Make an engine directory from a model and a user's choices. The steps are to choose the exit head
and the types of weights, to export, to check, and to report."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from shutil import disk_usage
from typing import TYPE_CHECKING

from eesd.common.checks import first_fault
from eesd.common.errors import EESDError
from eesd.common.geometry import draft_columns
from eesd.common.machine import available_memory, pip_install, torch_sees_gpu
from eesd.common.manifest import DEFAULT_SLOTS, DEFAULT_TOP_K, DEFAULT_TREE_NODES, WEIGHTS_FILE
from eesd.common.outputs import existing_parent
from eesd.common.quantization import (
    BLOCK,
    DTYPES,
    FP8,
    FP8_WEIGHTS,
    MXFP4,
    NVFP4,
    QUANTIZED,
    SEARCHED_INT4,
    Quantization,
    Quantizations,
    is_linear,
)
from eesd.common.terminal import notice
from eesd.common.weights import model_shapes, stored_weight, weight_bytes
from eesd.export.memory import slot_bytes
from eesd.export.steps import shown_steps

QUANTIZED_OR_NONE = (*QUANTIZED, "none")
KEEP = "keep"
OWN_HEAD = "own"
WHOLE_MODEL = "quantized"
NO_HEAD = "none"
NOT_STORED = (OWN_HEAD, WHOLE_MODEL, NO_HEAD)
"""Values of ``--exit-head`` other than the path or id of a head."""
EARLY_EXIT = "layerskip"
"""Part of the names of models that were trained to exit early (arXiv 2404.16710)."""
LARGE_MODEL = 1_000_000_000
"""Number of weights above which the default draft has 4-bit weights."""

if TYPE_CHECKING:  # --help must not load torch
    from eesd.common.geometry import Geometry
    from eesd.common.manifest import Manifest
    from eesd.export.engine_dir import Head
    from eesd.export.onnx_graph import ExportOptions
    from eesd.export.outline import Outline
    from eesd.model.checkpoint import Checkpoint


@dataclass(frozen=True)
class Choices:
    """The options of an export, as ``eesd-export --help`` explains them. An option that is None
    selects the default.

    Attributes:
        model: A directory, a GGUF file, a Hugging Face id or a short name.
        plans: Whether plans may be built from 16-bit engines. A 4-bit draft then has no minimums,
            because TensorRT cannot read them.
        packed: Whether weights are written only packed for the CPU.
    """

    model: str
    exit_layer: int | None = None
    exit_head: str | None = None
    dtype: str | None = None
    quantize: str | None = None
    quantize_head: str | None = None
    quantize_draft: str | None = None
    symmetric: bool | None = None
    layers: int | None = None
    max_seq_len: int | None = None
    max_tree_nodes: int = DEFAULT_TREE_NODES
    draft_top_k: int = DEFAULT_TOP_K
    stages: int = 1
    link_weights: bool = False
    check: bool | None = None
    pack: bool | None = None
    round_on: Path | None = None
    plans: bool = True
    packed: bool = False


def lacks(work: str, error: ImportError) -> EESDError:
    """An error that names a missing package, and how to install it."""
    extra = "torch" if error.name == "torch" else "export"
    return EESDError(f"{work} needs {error.name}; install it with: {pip_install(extra)}.")


def make_engines(
    choices: Choices,
    output: Path,
    say: Callable[[str], None],
    log: Callable[[str], None],
    finish: Callable[[Path], None] = lambda _: None,
) -> None:
    """Export a model to an engine directory.

    Args:
        choices: The user's options.
        output: The engine directory to write.
        say: Called with each line for the user, before and after the long work.
        log: Called with the name of each step if no progress bar can be shown.
        finish: Called with the complete directory, just before it is renamed. If it raises, nothing
            is left behind.

    Raises:
        EESDError: A package is missing, the choices do not fit the model, the model is not
            supported, or the disk is too small.
    """
    with shown_steps(log) as steps:
        steps.begin("reading the checkpoint")
        try:
            from eesd.export.engine_dir import check_output, export
            from eesd.model.checkpoint import Checkpoint
            from eesd.model.hub import find_model

            if choices.check:
                import eesd.export.parity  # noqa: F401
        except ImportError as error:
            raise lacks("Exporting with --check" if choices.check else "Exporting", error) from None
        check_output(output)
        checkpoint = Checkpoint(find_model(choices.model))
        if choices.layers is not None:
            checkpoint = checkpoint.first_layers(choices.layers)
        head, options = _choose(choices, checkpoint)
        unquantized: list[int] = []
        if options.quantization.layers is not None:
            unquantized = _unquantized_widths(checkpoint, options)
        report: list[str] = []

        def check(directory: Path, manifest: Manifest) -> None:
            if choices.check:
                steps.begin("comparing with torch")
                report.extend(_check_with_torch(directory, manifest, rounded, head))
            finish(directory)

        def announce(manifest: Manifest, size: int) -> None:
            for line in _forecast(manifest, size, disk_usage(existing_parent(output)).free):
                say(line)
            if choices.check is None:
                steps.begin("checking some layers and the head")
                report.extend(_check_quickly(rounded, head, options))

        def say_layer(layer: int, layers: int) -> None:
            steps.progress(f"rounding layer {layer}", 1, layers)

        if choices.round_on is not None:
            steps.begin("rounding the weights on the text")
        with _rounded_on(
            choices.round_on, checkpoint, head.config.layer, options, output, say_layer
        ) as rounded:
            manifest = export(
                rounded, head, options, output, check, steps.progress, announce, choices.packed
            )
        if not choices.packed:
            steps.begin("building for the CPU")
            report += _pack(output, manifest, choices.pack)
    say(_summary(output, manifest, options, own=_keeps_levels(checkpoint, options.quantization)))
    if (
        not manifest.exit_head.is_whole(checkpoint.geometry)
        and manifest.exit_head.can_draft
        and not head.config.blocks
    ):
        say(
            "draft: the model's own final norm and LM head after its exit layer, without an "
            "exit head"
        )
    if unquantized:
        say(
            f"weights with {' and '.join(map(str, unquantized))} inputs stay {options.dtype}: "
            f"not a multiple of {BLOCK}"
        )
    if choices.link_weights:
        linked = sum(info.size for info in manifest.linked.values())
        say(
            f"weights: {linked / 1e9:.2f} GB linked, "
            f"{manifest.files[WEIGHTS_FILE].size / 1e9:.2f} GB copied"
        )
    for line in report:
        say(line)
    say(f"exported in {steps.seconds()}")
    _warn(output, choices, checkpoint, head)


def _rounded_on(
    text: Path | None,
    checkpoint: Checkpoint,
    layers: int,
    options: ExportOptions,
    output: Path,
    say: Callable[[int, int], None],
) -> AbstractContextManager[Checkpoint]:
    """Call :func:`~eesd.export.rounding.rounded_on` if there is a text. It needs torch."""
    if text is None:
        return nullcontext(checkpoint)
    try:
        from eesd.export.rounding import rounded_on
    except ImportError as error:
        raise EESDError(
            f"--round-on needs {error.name}; install it with: {pip_install('distill')}."
        ) from None
    return rounded_on(text, checkpoint, layers, options, output, say)


def _forecast(manifest: Manifest, size: int, free: int) -> list[str]:
    """Returns lines that describe the model and its needs. The model has ``size`` bytes of weights,
    and the disk has ``free`` bytes left."""
    geometry = manifest.geometry
    slots = manifest.max_seq_len * slot_bytes(manifest, manifest.num_caches)
    weights = sum(map(prod, model_shapes(geometry).values()))
    return [
        f"{manifest.model}: {geometry.architecture}, {geometry.num_layers} layers of "
        f"{geometry.hidden_size}, "
        f"{weights / 1e6:,.0f} M weights",
        f"will take {size / 1e9:.2f} GB of the {free / 1e9:.0f} GB free on disk; running it takes "
        f"as much memory, and {slots / 1e9:.2f} GB for a request that fills "
        f"{manifest.max_seq_len} slots",
    ]


def _choose(choices: Choices, checkpoint: Checkpoint) -> tuple[Head, ExportOptions]:
    """Choose the exit head and the options of the export from the choices and this model's
    defaults."""
    from eesd.export.onnx_graph import ExportOptions

    config = checkpoint.config
    found = _choose_head(checkpoint, choices.model, choices.exit_layer, choices.exit_head)
    dtype = choices.dtype or checkpoint.dtype
    quantization = choose_quantization(
        checkpoint,
        dtype,
        choices.quantize,
        choices.quantize_head,
        choices.quantize_draft,
        choices.symmetric,
        choices.link_weights,
        whole=found is None,
        plans=choices.plans,
    )
    head = found or _default_head(checkpoint, quantization, choices.exit_head)
    if not head.config.can_draft:
        quantization = replace(quantization, draft=None)
    options = ExportOptions(
        dtype,
        choices.max_seq_len or min(config.max_positions, DEFAULT_SLOTS),
        choices.max_tree_nodes,
        min(choices.draft_top_k, draft_columns(config.geometry, head.config)),
        choices.stages,
        choices.link_weights,
        quantization,
    )
    _check_options(options, config.max_positions)
    return head, options


def _summary(output: Path, manifest: Manifest, options: ExportOptions, own: bool) -> str:
    """One line about the export."""
    head = manifest.exit_head
    geometry = manifest.geometry
    read = ", ".join(map(str, head.read_layers))
    drafts = f"EAGLE-3 over the layers {read}" if head.eagle else f"exit after layer {head.layer}"
    if not head.can_draft:
        drafts = "no exit head"
    if head.is_whole(geometry):
        drafts = "the whole model drafts"
    return (
        f"{output}: {geometry.architecture}, {_types(options, own)}, {drafts}, "
        f"{options.max_seq_len} slots"
    )


def _keeps_levels(checkpoint: Checkpoint, quantization: Quantizations) -> bool:
    """Whether the layers keep the levels of a checkpoint whose ``config.json`` describes its
    quantization."""
    return quantization.layers is not None and quantization.layers == checkpoint.quantization


def _warn(output: Path, choices: Choices, checkpoint: Checkpoint, head: Head) -> None:
    """Print notices about the checkpoint, the choices and the head."""
    from tokenizers import Tokenizer

    for text in filter(None, (*checkpoint.config.notices, checkpoint.config.sampling.notice)):
        notice(text)
    tokenizer = output / "tokenizer.json"
    size = checkpoint.geometry.vocab_size
    if not tokenizer.exists():
        notice("The model has no tokenizer, so prompts are token ids.")
    elif (
        largest := max(Tokenizer.from_file(str(tokenizer)).get_vocab().values(), default=0)
    ) >= size:
        notice(
            f"The tokenizer has ids up to {largest}, but the model only has ids below "
            f"{size}; prompts with other ids are refused."
        )
    rounds_again = bool({choices.quantize, choices.quantize_head} & set(QUANTIZED))
    if rounds_again and checkpoint.own_levels:
        notice(
            "The weights of the file are already quantized, and --quantize rounds them a "
            "second time; use --quantize keep to avoid this."
        )
    keeps = checkpoint.quantization is not None or checkpoint.own_levels
    if checkpoint.config.packing is not None and not keeps:
        again = " --quantize rounds them a second time." if choices.quantize in QUANTIZED else ""
        notice(
            "The checkpoint's quantized weights are dequantized, because engines do not have "
            f"their levels.{again}"
        )
    if not head.config.can_draft:
        notice(
            "Drafts come only from repeated text, because 4-bit weights cannot be "
            "reduced further. Train an exit head with eesd-distill to draft on all text."
        )
    elif not head.config.trained:
        notice(
            "The exit head is not trained, so acceptance will be low; train one with eesd-distill."
        )


def _check_options(options: ExportOptions, max_positions: int) -> None:
    fault = first_fault(
        {
            f"--max-seq-len {options.max_seq_len} is more than the model's {max_positions} "
            "positions.": options.max_seq_len > max_positions,
            f"--max-tree-nodes {options.max_tree_nodes} does not fit a cache of "
            f"{options.max_seq_len} slots.": options.max_tree_nodes >= options.max_seq_len,
            f"The checkpoint's type {options.dtype} cannot be exported; give --dtype "
            f"{'|'.join(DTYPES)}.": options.dtype not in DTYPES,
        }
    )
    if fault:
        raise EESDError(fault)


def choose_quantization(
    checkpoint: Checkpoint | Outline,
    dtype: str,
    layers: str | None,
    head: str | None,
    draft: str | None,
    symmetric: bool | None,
    link_weights: bool,
    whole: bool,
    plans: bool = True,
) -> Quantizations:
    """Resolve the quantization options together. A checkpoint's quantized weights keep their
    levels.

    Args:
        checkpoint: The model.
        dtype: Element type of the engines.
        layers: ``--quantize``.
        head: ``--quantize-head``.
        draft: ``--quantize-draft``.
        symmetric: Value of ``--symmetric`` or ``--asymmetric``.
        link_weights: ``--link-weights``.
        whole: Whether the draft is the whole model.
        plans: Whether plans may be built from 16-bit engines.
    """
    own = checkpoint.quantization
    tensors = checkpoint.own_levels
    if layers is None and tensors and _can_keep(tensors, dtype) and not link_weights:
        layers = KEEP
    if layers == KEEP:
        _check_keep(checkpoint, dtype, head, link_weights)
        layers = None
    else:
        tensors = {}
    if layers == "none":
        own = None
    if layers is not None and own is not None:
        raise EESDError(
            "The checkpoint's weights are quantized already, and are taken as they are; leave "
            "--quantize out, or give "
            "--quantize none to dequantize them."
        )
    if link_weights and {layers, head} - {None, "none"}:
        raise EESDError(
            "--link-weights uses the weights as they are, and --quantize changes them; give "
            "one of the two."
        )
    head = head or layers
    if whole and draft == "none":
        raise EESDError(
            "--quantize-draft none makes the draft as slow as the whole model; leave the option "
            "out, or give "
            "--exit-head none to draft from the text alone."
        )
    if draft is None and whole:
        eight_bits = layers == "int8" or (own is not None and own.weights == "int8")
        # The CPU reads the upper 4 of 8 bits.
        draft = None if eight_bits and dtype == "float32" else "int4"
    elif draft is None:
        draft = layers
        if (dtype == "float32" or _is_large(checkpoint)) and not link_weights:
            draft = "int4"
    if dtype == "float32" and {layers, head, draft} & {"fp8", "nvfp4"}:
        raise EESDError(
            "fp8 and nvfp4 weights are for engines of 16 bits; give --dtype float16 or "
            "bfloat16, or take int8 or int4."
        )
    if symmetric is not None and "int4" not in (layers, head, draft):
        raise EESDError("--symmetric and --asymmetric are for int4; leave the option out.")
    if symmetric is None:
        symmetric = plans and dtype != "float32"  # TensorRT lacks 4-bit zero points

    def scheme(kind: str | None) -> Quantization | None:
        if kind in (None, "none"):
            return None
        if kind == "int4" and not symmetric:
            return SEARCHED_INT4
        return {"fp8": FP8_WEIGHTS, "nvfp4": NVFP4}.get(str(kind), Quantization(str(kind), BLOCK))

    return Quantizations(
        scheme(layers) if own is None else own, scheme(head), scheme(draft), tensors=dict(tensors)
    )


def _is_large(checkpoint: Checkpoint | Outline) -> bool:
    """Whether reading the draft's weights takes so long that a 4-bit copy pays off."""
    return sum(map(prod, model_shapes(checkpoint.geometry).values())) > LARGE_MODEL


def _can_keep(tensors: Mapping[str, Quantization], dtype: str) -> bool:
    """Whether engines of this element type can keep the levels of these tensors. 16-bit engines can
    keep only MXFP4 levels, whose products are exact."""
    return dtype == "float32" or {*tensors.values()} == {MXFP4}


def _check_keep(
    checkpoint: Checkpoint | Outline, dtype: str, head: str | None, link_weights: bool
) -> None:
    """Raise :class:`EESDError` if the file's own levels cannot be kept."""
    fault = first_fault(
        {
            "--quantize keep is for quantized weights, and the checkpoint's are not; leave "
            "the option out.": not checkpoint.own_levels,
            f"--quantize keep is for float32 engines, and these are {dtype}; give --dtype "
            "float32, or leave --quantize out.": not _can_keep(checkpoint.own_levels, dtype),
            "--link-weights uses a checkpoint's weights in its own files, and --quantize keep "
            "stores levels; give one.": link_weights,
            "--quantize keep also keeps the levels of the LM head; leave --quantize-head out, "
            "or give --quantize.": head is not None,
        }
    )
    # A checkpoint that describes its quantization always keeps its levels.
    if checkpoint.quantization is None and fault:
        raise EESDError(fault)


def _types(options: ExportOptions, own: bool) -> str:
    """Describes the element type and the quantization in words."""
    texts = [
        f"{one.name} {place}"
        for place, one in options.quantization.places.items()
        if one is not None
    ]
    if own:
        texts[0] = f"the checkpoint's own {texts[0]}"
    kept = sorted({one.weights for one in options.quantization.tensors.values()})
    if kept:
        texts.insert(0, f"the file's own {' and '.join(kept)} levels")
    return f"{options.dtype} with {', '.join(texts)}" if texts else options.dtype


def _unquantized_widths(checkpoint: Checkpoint, options: ExportOptions) -> list[int]:
    """Returns the input sizes of the linear weights that cannot be quantized. Raises EESDError if
    no weight can be quantized."""
    linear = {
        name: shape for name, shape in model_shapes(checkpoint.geometry).items() if is_linear(name)
    }
    stored = [
        stored_weight(name, shape, options.dtype, options.quantization)
        for name, shape in linear.items()
    ]
    widths = sorted({weight.shape[1] for weight in stored if weight.quantization is None})
    if all(weight.quantization is None for weight in stored):
        raise EESDError(
            f"--quantize needs weights whose number of inputs is a multiple of {BLOCK}; this "
            "model's weights have "
            f"{', '.join(map(str, widths))} inputs. Leave the option out."
        )
    return widths


def _default_head(checkpoint: Checkpoint, quantization: Quantizations, given: str | None) -> Head:
    """Choose the draft without training. It is the whole model in fewer bits if the model's weights
    have more than 4 bits. If they do not, there is no head.

    Raises:
        EESDError: The user chose the whole model as the draft, and its weights have too few bits.
    """
    from eesd.export.engine_dir import no_head, whole_model

    if given == NO_HEAD:
        return no_head(checkpoint)
    if not most_have_few_bits(checkpoint.geometry, quantization):
        return whole_model(checkpoint)
    if given == WHOLE_MODEL:
        raise EESDError(
            "--exit-head quantized drafts with the whole model in 4 bits, and most of this "
            "model's weights have no more than "
            "the draft would; give --exit-head DIR, or leave the option out to draft from the text."
        )
    return no_head(checkpoint)


def most_have_few_bits(geometry: Geometry, quantization: Quantizations) -> bool:
    """Whether most linear weights have no more bits than a 4-bit draft would have."""
    shapes = {name: shape for name, shape in model_shapes(geometry).items() if is_linear(name)}
    few = sum(
        prod(shape) for name, shape in shapes.items() if _has_few_bits(quantization.of(name, shape))
    )
    return 2 * few > sum(map(prod, shapes.values()))


def _has_few_bits(levels: Quantization | None) -> bool:
    """Whether these levels have too few bits for a draft that reads half of the bits."""
    return (
        levels is not None
        and levels.weights != FP8
        and (levels.weights != "int8" or levels.block != BLOCK)
    )


def _choose_head(
    checkpoint: Checkpoint, name: str, exit_layer: int | None, given: str | None
) -> Head | None:
    """Open the exit head that is ``given``, or the one in the model directory. If there is neither,
    this function chooses another head. If the model's ``name`` shows that it was trained to exit
    early, it uses the model's own exit. If not, it makes an untrained head after ``exit_layer``.

    Returns:
        The head, or None to let :func:`_default_head` choose.
    """
    from eesd.export.engine_dir import eagle_head, early_exit, stored_head, untrained_head
    from eesd.model.eagle_file import is_eagle
    from eesd.model.exit_head_file import CONFIG_FILE, HEAD_FILES
    from eesd.model.hub import find_head

    if given in (WHOLE_MODEL, NO_HEAD):
        if exit_layer is not None:
            raise EESDError(f"--exit-head {given} has no exit layer; leave --exit-layer out.")
        return None
    directory = None if given is None or given == OWN_HEAD else find_head(given)
    if given is None and any((checkpoint.path / name).exists() for name in HEAD_FILES):
        directory = checkpoint.path  # refused later if a file is missing
    exits_early = EARLY_EXIT in Path(name).name.lower()
    if given == OWN_HEAD or (directory is None and exits_early and exit_layer is not None):
        if exit_layer is None:
            raise EESDError(
                "The draft with the model's own norm and LM head needs a layer to exit after; "
                "give --exit-layer N."
            )
        return early_exit(checkpoint, exit_layer)
    if directory is not None and not (directory / CONFIG_FILE).exists() and is_eagle(directory):
        if exit_layer is not None:
            raise EESDError("An EAGLE-3 head follows the embeddings; leave --exit-layer out.")
        return eagle_head(checkpoint, directory)
    if directory is not None:
        head = stored_head(checkpoint, directory)
        if exit_layer not in (None, head.config.layer):
            raise EESDError(
                f"The exit head in {directory} was trained for an exit after layer "
                f"{head.config.layer}, but --exit-layer is "
                f"{exit_layer}; leave the option out or give another --exit-head."
            )
        return head
    return None if exit_layer is None else untrained_head(checkpoint, exit_layer)


def _pack(directory: Path, manifest: Manifest, wanted: bool | None) -> list[str]:
    """Build for the CPU. If that fails, a line about the failure is returned."""
    size = sum(weight_bytes(manifest, graph) for graph in manifest.graphs)
    if wanted is False or (wanted is None and torch_sees_gpu()):
        return []
    if wanted is None and size > available_memory():  # this machine is unlikely to run the model
        return [
            (
                "not built for the CPU: this machine has too little memory; eesd-build --target "
                f"cpu {directory} builds it"
            )
        ]
    try:
        from eesd.export.cpu.build import build_for_cpu
        from eesd.runtime.engines import operators
    except ImportError as error:  # ONNX Runtime is broken
        return [f"not built for the CPU: {error}"]
    if problem := operators.missing():
        return [f"not built for the CPU: {problem}"]
    try:
        build_for_cpu(directory, manifest)
    except EESDError as error:
        return [
            f"not built for the CPU; try again with eesd-build --target cpu {directory}: {error}"
        ]
    return []


def _check_quickly(checkpoint: Checkpoint, head: Head, options: ExportOptions) -> list[str]:
    """Run the quick check if this machine can.

    Returns:
        A line that reports its result.

    Raises:
        EESDError: A graph or packed weights are wrong.
    """
    from eesd.export.quick_check import QuickCheck
    from eesd.runtime.engines.operators import missing

    if missing():
        return []
    check = QuickCheck(checkpoint, head, options)
    if check.memory > available_memory() // 4:
        return [f"not checked: that needs about {check.memory / 1e9:.0f} GB of memory"]
    differences = check.differences()
    bad = [kind for kind, difference in differences.items() if not difference <= 1]
    if bad:
        raise EESDError(
            f"The {' and '.join(bad)} graph and its packed weights do not compute the same; please "
            "report this model."
        )
    return [
        "checked: two layers and the head agree with ONNX Runtime's operators (the largest "
        f"difference is {max(differences.values()):.0%} of what rounding can explain)"
    ]


def _check_with_torch(
    directory: Path, manifest: Manifest, checkpoint: Checkpoint, head: Head
) -> list[str]:
    """Compare the whole graphs with torch, and return lines that report the result.

    Raises:
        EESDError: A graph is wrong.
    """
    from eesd.export.parity import check_bits, compare_graphs, quantization_drift

    differences = compare_graphs(directory, manifest, checkpoint, head)
    bad = [kind for kind, difference in differences.items() if not difference.acceptable]
    if bad:
        raise EESDError(
            f"The {' and '.join(bad)} graph does not compute the same as the model; please "
            "report this model."
        )
    lines = [
        (
            f"{kind}: largest difference to torch {difference.largest:.2e} (largest logit "
            f"{difference.scale:.1f})"
        )
        for kind, difference in differences.items()
    ]
    lines.append(
        f"verify: logits of calls of 1 to {manifest.max_tree_nodes + 1} tokens "
        f"{check_bits(directory, manifest).chains}"
    )
    if (manifest.quantization.layers or manifest.quantization.head) and not _keeps_levels(
        checkpoint, manifest.quantization
    ):
        drift = quantization_drift(manifest, checkpoint, head)
        lines.append(
            f"quantized: logits change by {drift.logit_change:.1%} of their standard "
            "deviation; the most "
            f"likely token is the unquantized model's at {drift.same_token} of "
            f"{drift.positions} positions of a sampled text"
        )
    return lines
