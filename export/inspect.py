"""``eesd-inspect``: show the content of an engine directory."""

import json
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path

import click

from eesd.common.checks import first_fault
from eesd.common.cli import NAME, PATH, command
from eesd.common.errors import EESDError
from eesd.common.integrity import verify_files, verify_hashes
from eesd.common.manifest import Manifest, load_manifest
from eesd.common.terminal import Console, Table, notice, progress_bar
from eesd.export.make import lacks
from eesd.export.memory import DeviceMemory, estimate_memory, format_bytes, slot_bytes
from eesd.export.predict import ACCEPTANCES, GPUS, Prediction, slots_read
from eesd.export.predict import predict as predict_calls
from eesd.model.hub import find_model
from eesd.runtime.engines.backends import BACKENDS, EngineOptions, open_engines
from eesd.runtime.engines.cpu_build import built_for_cpu, describe_build, find_build, place_of
from eesd.runtime.engines.exactness import Exactness

BAR_WIDTH = 48
"""Characters of the longest bar."""


@command()
@click.argument("directory", type=PATH, required=False)
@click.option(
    "--model",
    type=NAME,
    help=(
        "With --predict or --memory, a model as in eesd-export, instead of DIRECTORY. Only "
        "its config.json is read."
    ),
)
@click.option(
    "--verify", is_flag=True, help="Hash every file, and compare the hashes with the manifest."
)
@click.option(
    "--exact",
    is_flag=True,
    help="Check that calls of 1 to M + 1 tokens, and a tree, give the same bits of logits.",
)
@click.option(
    "--backend",
    type=click.Choice(BACKENDS),
    default="auto",
    help="With --exact, backend to check.",
)
@click.option(
    "--threads",
    type=click.IntRange(1, 1024),
    help="With --exact, number of CPU threads.  [default: check 1 and the default of eesd-run]",
)
@click.option(
    "--memory",
    is_flag=True,
    help="Show only an estimate of the memory needed on each device.",
)
@click.option(
    "--predict",
    type=click.Choice(list(GPUS)),
    help="Show only the predicted times of calls on this GPU, and the predicted speed-up.",
)
@click.option(
    "--max-seq-len",
    type=click.IntRange(2, 2**31 - 1),
    help="With --memory or --predict, number of slots in the KV cache.  [default: as exported]",
)
@click.option(
    "--text-tokens",
    type=click.IntRange(1, 2**31 - 1),
    help="With --predict, number of tokens in the text.  [default: a full cache]",
)
@click.option(
    "--parallel",
    type=click.IntRange(1, 1024),
    help=(
        "With --memory or --predict, number of ranks of the torch backend that share the "
        "weights.  [default: 1]"
    ),
)
@click.option(
    "--batch",
    type=click.IntRange(1, 65536),
    help="With --memory, number of sequences.  [default: 1]",
)
@click.option(
    "--json",
    "as_json",
    is_flag=True,
    help="Print the manifest, the estimate or the prediction as JSON.",
)
def main(
    directory: Path | None,
    model: str | None,
    verify: bool,
    exact: bool,
    backend: str,
    threads: int | None,
    memory: bool,
    predict: str | None,
    max_seq_len: int | None,
    text_tokens: int | None,
    parallel: int | None,
    batch: int | None,
    as_json: bool,
) -> None:
    """Show the content of an engine directory, or of the directory that an export of a model with
    default options would write."""
    fault = first_fault(
        {
            "Give either an engine directory or --model.": (directory is None) == (model is None),
            "--model is for --predict and --memory; export the model to inspect more.": (
                model is not None and (verify or exact or not (memory or predict))
            ),
            "--max-seq-len and --batch only apply to the memory estimate; add --memory.": (
                (batch and not memory) or (max_seq_len and not memory and not predict)
            ),
            "--parallel only applies to the estimate and the prediction; add --memory or "
            "--predict.": parallel and not memory and not predict,
            "--memory and --predict each show one estimate; give one of them.": memory and predict,
            "--backend and --threads are for --exact; add it, or leave them out.": (
                not exact and (backend != "auto" or threads is not None)
            ),
            "--text-tokens only applies to the prediction; add --predict.": (
                text_tokens and not predict
            ),
        }
    )
    if fault:
        raise EESDError(fault)
    manifest = load_manifest(directory) if directory is not None else _outlined(str(model))
    directory = directory or Path(manifest.model)
    ranks = parallel or 1
    console = Console()
    if predict:
        _predict(
            console,
            manifest,
            predict,
            max_seq_len or manifest.max_seq_len,
            text_tokens,
            ranks,
            as_json,
        )
    elif memory:
        _memory(console, manifest, max_seq_len or manifest.max_seq_len, batch or 1, ranks, as_json)
    elif as_json:
        click.echo(manifest.to_json(), nl=False)
    else:
        console.print(_summary(directory, manifest))
        console.print(_files(manifest))
        if manifest.plans:
            console.print(_plans(manifest))
    if verify:
        built = place_of(directory, manifest).glob("*")
        sizes = [*manifest.sizes.values(), *(plan.size for plan in manifest.plans.values())]
        total = sum(sizes) + sum(file.stat().st_size for file in built)
        with progress_bar("hashing", total) as advance:
            verify_all(directory, manifest, advance)
        click.echo("all files are as exported", err=as_json)
    if exact:
        found = check_exactness(
            directory, manifest, backend, [1, None] if threads is None else [threads]
        )
        click.echo(f"logits {found.chains}", err=as_json)
        click.echo(
            f"logits of a tree's nodes, against their paths as chains, {found.trees}", err=as_json
        )
        if found.chains.differing:
            raise EESDError(
                "Logits depend on the number of tokens in a call, so drafting can change tokens "
                "if two are almost equally likely."
            )


def _outlined(model: str) -> Manifest:
    """The manifest that an export with default options would write."""
    try:
        find_model(model, weights=False)  # This is checked before the imports, which take seconds.
        from eesd.export.outline import outlined
    except ImportError as error:
        raise lacks("Reading a model", error) from None
    return outlined(model)


def verify_all(
    directory: Path, manifest: Manifest, progress: Callable[[int], None] = lambda _: None
) -> None:
    """Hash every file that a backend reads. These are the files of the export and of the build for
    the CPU, and plans.

    Raises:
        EESDError: A file is missing or was changed.
    """
    verify_files(directory, manifest, progress)
    check = partial(verify_hashes, progress=progress)
    if manifest.is_packed or place_of(directory, manifest).exists():
        built_for_cpu(directory, manifest, check)
    plans = {plan.file: plan.written for plan in manifest.plans.values()}
    check(directory, plans, f"build it again with: eesd-build --force {directory}")


def check_exactness(
    directory: Path, manifest: Manifest, backend: str, threads: Sequence[int | None]
) -> Exactness:
    """Compare the bits of logits in about M + 45 calls, most of which are short, for each number of
    threads (None for the default)."""
    exactness = Exactness(manifest)
    with progress_bar("comparing bits", exactness.layouts * len(threads)) as advance:
        for count in threads:
            exactness.check(
                open_engines(
                    directory, manifest, EngineOptions(backend, count, draft=False)
                ).verify,
                lambda: advance(1),
            )
    return exactness


def _memory(
    console: Console, manifest: Manifest, slots: int, batch: int, ranks: int, as_json: bool
) -> None:
    if slots <= manifest.max_tree_nodes:
        raise EESDError(
            f"--max-seq-len {slots} has no room for the {manifest.max_tree_nodes} nodes of a "
            "round; give more."
        )
    manifest = replace(manifest, max_seq_len=slots)
    devices = estimate_memory(manifest, batch, ranks)
    if as_json:
        sizes = {"slots": slots, "batch": batch, "ranks": ranks}
        click.echo(json.dumps(sizes | {"devices": [device.to_dict() for device in devices]}))
    else:
        console.print(memory_table(manifest, devices, batch, ranks))
        console.print()
        for line in memory_bars(devices, ranks, console.encoding.startswith("utf")):
            console.print(line, highlight=False)


def _predict(
    console: Console,
    manifest: Manifest,
    gpu: str,
    slots: int,
    text: int | None,
    ranks: int,
    as_json: bool,
) -> None:
    manifest.on_rank(ranks)  # This refuses models that cannot be split.
    text = min(text or slots, slots)
    sized = replace(manifest, max_seq_len=slots)
    hardware = GPUS[gpu]
    slots, drafting = (slots_read(sized, graph, text) for graph in (sized.verify[0], sized.draft))
    predicted = predict_calls(manifest, hardware, slots, drafting, ranks)
    if as_json:
        click.echo(json.dumps({"gpu": gpu, "slots": slots, "ranks": ranks} | predicted.to_dict()))
        return
    devices = estimate_memory(manifest, 1, ranks)
    needed = max(device.total for device in devices)
    if ranks == 1:
        needed = max(device.total + device.shared_weights for device in devices)
    if needed > hardware.memory:
        notice(
            f"A device needs {format_bytes(needed)}, but {hardware.name} has "
            f"{format_bytes(int(hardware.memory))}; split verify with eesd-export "
            "--stages, run more ranks, or quantize the model. The prediction assumes "
            "that the model fits."
        )
    number = f"{ranks} x " if ranks > 1 else ""
    console.print(
        f"{number}{hardware.name}, {slots} slots; predicted with constants that were measured on "
        "an H200"
    )
    console.print("with the torch backend, but without plans and whole models (docs/predict.md)")
    for table in prediction_tables(predicted):
        console.print(table)


def prediction_tables(predicted: Prediction) -> list[Table]:
    """Describe the times of calls, and the best chain for each acceptance. Without a draft engine,
    chains consist of tokens that the text proposes."""
    plain = predicted.verify[0]
    calls = Table("call", "ms", box=None, pad_edge=False)
    if predicted.draft:
        share = f"{predicted.draft / plain:.0%} of verify 1"
        calls.add_row("draft step", f"{predicted.draft * 1e3:.2f} ({share})")
    most = len(predicted.verify)
    for nodes in sorted({1, 2, most, *(count for count in (3, 5, 9, 17, 33, 65) if count < most)}):
        words = f" ({1 / plain:.0f} tokens/s without drafts)" if nodes == 1 else ""
        calls.add_row(f"verify {nodes}", f"{predicted.verify[nodes - 1] * 1e3:.2f}{words}")
    of = "acceptance" if predicted.draft else "of the text"
    best = Table(of, "drafted", "speed-up", box=None, pad_edge=False)
    for acceptance in ACCEPTANCES:
        drafted = predicted.best_length(acceptance)
        best.add_row(
            f"{acceptance:.1f}", str(drafted), f"{predicted.speed_up(acceptance, drafted):.2f}"
        )
    return [calls, best]


def memory_table(
    manifest: Manifest, devices: list[DeviceMemory], batch: int, ranks: int = 1
) -> Table:
    """Format a memory estimate as a table. It has a column for each device, or a single column for
    all ranks.

    Args:
        manifest: Manifest of the engine directory.
        devices: The estimate.
        batch: Number of sequences of the estimate.
        ranks: Number of ranks of the estimate.
    """
    slots = f"{manifest.max_seq_len} slots"
    if batch > 1:
        slots += f" x {batch} sequences"
    sizes = {
        "draft weights": [device.draft_weights for device in devices],
        "verify weights": [device.verify_weights for device in devices],
        "shared by both (once)": [-device.shared_weights for device in devices],
        f"KV cache, {slots}": [device.kv_cache for device in devices],
        f"buffers, {manifest.max_tree_nodes + 1} nodes": [
            device.round_buffers for device in devices
        ],
        f"or prefill of {manifest.gpu_prefill_chunk} tokens": [
            device.prefill_buffers for device in devices
        ],
        "total": [device.total for device in devices],
    }
    rows = {
        "graphs": ["\n".join(device.graphs) for device in devices],
        "layers": [f"{first} to {last}" for first, last in (device.layers for device in devices)],
    } | {name: [*map(format_bytes, column)] for name, column in sizes.items()}
    names = [f"each of {ranks} ranks"]
    if ranks == 1:
        rows["total without sharing"] = [
            format_bytes(device.total + device.shared_weights) for device in devices
        ]
        rows["host memory to build plan"] = [
            f"~ {format_bytes(device.build_host_memory)}" for device in devices
        ]
        names = [f"device {number}" for number in range(len(devices))]
    table = Table("", *names, box=None, pad_edge=False)
    for column in table.columns[1:]:
        column.justify = "right"
    for name, cells in rows.items():
        table.add_row(name, *cells)
    return table


def memory_bars(devices: list[DeviceMemory], ranks: int, blocks: bool) -> list[str]:
    """Format a memory estimate as a bar for each device, followed by a legend.

    Args:
        devices: The estimate.
        ranks: Number of ranks of the estimate.
        blocks: Whether the terminal shows block characters. If it does not, bars are ASCII.
    """
    letters = "█▓░" if blocks else "#=-"
    most = max(device.total for device in devices)
    lines = []
    for number, device in enumerate(devices):
        buffers = max(device.round_buffers, device.prefill_buffers)
        weights = device.total - device.kv_cache - buffers
        # Round the ends of parts, not their lengths, so that the bar's length fits the total.
        ends = [
            round(BAR_WIDTH * part / most)
            for part in (0, weights, weights + device.kv_cache, device.total)
        ]
        parts = zip(letters, pairwise(ends), strict=True)
        bar = "".join(letter * (end - start) for letter, (start, end) in parts)
        name = f"device {number}" if ranks == 1 else "a rank  "
        lines.append(f"{name}  {bar:{BAR_WIDTH}}  {format_bytes(device.total)}")
    legend = zip(letters, ("weights", "KV cache", "buffers"), strict=True)
    return [*lines, "          " + "  ".join(f"{letter} {name}" for letter, name in legend)]


def _summary(directory: Path, manifest: Manifest) -> Table:
    slot = slot_bytes(manifest, manifest.num_caches)
    geometry = manifest.geometry
    exit_head = manifest.exit_head
    cached = f"{geometry.num_kv_heads} KV heads of {geometry.head_dim}"
    if geometry.latent:
        cached = f"latent rows of {geometry.latent.width}"
    rows = {
        "model": f"{manifest.model} ({geometry.architecture})",
        "geometry": (
            f"{geometry.num_layers} layers, hidden size {geometry.hidden_size}, "
            f"{geometry.num_heads} heads and {cached}, vocabulary {geometry.vocab_size}"
        ),
        "exit head": _head(manifest),
        "draft vocabulary": _draft_vocab(manifest),
        "calibration": "prior of this draft" if exit_head.calibration else "default prior",
        "ends of texts": ", ".join(map(str, manifest.eos_token_ids)) or "none",
        "element type": manifest.dtype,
        "linear weights": _linear_weights(manifest),
        "KV cache": (
            f"{manifest.num_caches} caches, {manifest.max_seq_len} slots of {slot / 1024:.1f} KiB, "
            f"{slot * manifest.max_seq_len / 2**20:.0f} MiB when full"
        ),
        ("token tree"): (
            f"at most {manifest.max_tree_nodes} nodes, {manifest.draft_top_k} candidates for each"
        ),
        "made with": ", ".join(f"{name} {value}" for name, value in manifest.tools.items()),
    }
    if len(manifest.verify) > 1:
        rows["stages"] = "\n".join(
            f"{stage.file}: layers {layers.start} to {layers.stop - 1}"
            for stage, layers in zip(manifest.verify, manifest.stage_layers, strict=True)
        )
    build = find_build(directory, manifest)
    if build is not None:
        rows["build for the CPU"] = describe_build(build)
    table = Table(title=str(directory), show_header=False, title_justify="left")
    for name, value in rows.items():
        table.add_row(name, value)
    return table


def _head(manifest: Manifest) -> str:
    """A description of the source of drafts."""
    head = manifest.exit_head
    if not head.can_draft:
        return "none: drafts come from the text alone"
    if head.is_whole(manifest.geometry):
        return "none: the whole model drafts, in fewer bits"
    deep = f", deep layers {', '.join(map(str, head.read_layers))}" if head.read_layers else ""
    if head.eagle:
        return f"EAGLE-3{deep}"
    blocks = f"{head.blocks} block(s)" if head.blocks else "the model's own norm and LM head"
    trained = "" if head.trained else "  (untrained: train it with eesd-distill)"
    return f"after layer {head.layer}, {blocks}{deep}{trained}"


def _draft_vocab(manifest: Manifest) -> str:
    """A description of the tokens that the draft can predict."""
    size = manifest.exit_head.draft_vocab
    whole = manifest.geometry.vocab_size
    return f"{size} of {whole} tokens" if size else f"all {whole} tokens"


def _linear_weights(manifest: Manifest) -> str:
    """A description of the stored linear weights of layers, LM head and draft."""
    quantization = manifest.quantization
    places = quantization.places.items()
    if quantization.tensors:
        kinds = Counter(one.description for one in quantization.tensors.values())
        own = [f"{count} tensors as in the file: {kind}" for kind, count in kinds.most_common()]
        draft = manifest.dtype if quantization.draft is None else quantization.draft.description
        return "\n".join((*own, f"draft: {draft}"))
    words = {place: manifest.dtype if one is None else one.description for place, one in places}
    if len(set(words.values())) == 1:
        return words["layers"]
    return "\n".join(f"{place}: {text}" for place, text in words.items())


def _files(manifest: Manifest) -> Table:
    table = Table("file", "bytes", "SHA-256")
    for name, info in manifest.files.items():
        table.add_row(name, f"{info.size:,}", info.sha256[:16])
    for name, linked in manifest.linked.items():
        table.add_row(
            name, f"{linked.size:,}", f"{linked.samples[:16]} of samples (linked checkpoint file)"
        )
    return table


def _plans(manifest: Manifest) -> Table:
    table = Table("plan", "description")
    for plan in manifest.plans.values():
        gpus = "any supported GPU"
        if plan.compute_capabilities:
            gpus = f"compute capability {', '.join(plan.compute_capabilities)}"
        (_, _, most), *prefill = plan.profiles
        nodes = "one node a call"
        if prefill:
            nodes = f"up to {most} nodes a call, {prefill[0][2]} in prefill"
        table.add_row(
            plan.file,
            f"{plan.size:,} bytes{' without weights' if plan.refit else ''} by {plan.flavour} "
            f"{plan.version} for {gpus}\n"
            f"{nodes}, batch {plan.max_batch}\n"
            f"{plan.fused_attentions} attentions and {plan.fused_cache_updates} cache updates "
            "as single kernels\n"
            f"SHA-256 {plan.sha256[:16]}",
        )
    return table


if __name__ == "__main__":
    main()
