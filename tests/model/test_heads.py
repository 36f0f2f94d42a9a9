"""Tests of every kind of head. Exit heads are stored, loaded and refused. Heads with deep layers
and published EAGLE-3 heads share a grid of tests. These check, on every backend, that the drafts
equal the reference, that no token changes, and that verify passes keep their bits."""

import json
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file
from support import tiny_models
from support.command import add_tokenizer, assert_refused, run, succeed
from support.eagle_heads import LAYOUTS, Reference, deep_head, train, write_head
from support.lossless_checks import HEADS_DRAFT, check_drafting, check_kept_prefixes
from support.on_cache import both_on_cache
from support.tiny_checkpoints import FAMILIES, build, edit_json, randomise
from transformers import AutoModelForCausalLM

from eesd import BatchOptions, EESDError, Service
from eesd.common.geometry import ExitConfig
from eesd.common.manifest import load_manifest
from eesd.common.prior import CalibrationPrior
from eesd.distill.ages import AGES, random_roots, states_before
from eesd.distill.teacher import Teacher, full_sequence_inputs
from eesd.export.cli import main as export_main
from eesd.export.inspect import main as inspect_main
from eesd.model import exit_head_file
from eesd.model.as_torch import as_torch
from eesd.model.checkpoint import Checkpoint
from eesd.model.decoder import ExitHead
from eesd.model.loading import load_decoder, load_exit_head, make_initial_head, save_exit_head
from eesd.runtime.engines import operators
from eesd.runtime.engines.cpu_engine import CpuEngine
from eesd.runtime.llm import Speculation, load

FamilyDir = Callable[[str], Path]
DEEP = [("llama-bias", 1), ("qwen3", 2), ("qwen2.5-tied", 1), ("mistral", 1)]
"""The families of the heads with deep layers, and the number of blocks of each head."""
BACKENDS = ["ort", "torch", "ort-standard"]
TEXT = np.random.default_rng(5).integers(3, 90, 24).tolist()
ROUNDS = [(6, 3), (9, 1), (10, 4), (14, 2), (16, 6)]
"""For each round, the position of the root and the number of tokens that the round commits."""
SLOTS = 256
COMMAND: tuple[object, ...] = (
    *("--dtype", "float32", "--quantize", "none", "--quantize-draft", "none"),
    *("--max-seq-len", SLOTS),
)
LAYERS = {
    "safeailab": (2, 3, 4),
    "specforge": (1, 2, 4),
    "speculators": (1, 2, 4),
    "eagle-3.1": (1, 2, 4),
}
"""The layers of a seven-layer model whose states are read. They come from the layout or are the
default."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with such sizes that a state takes two caches and fills only a part of the second
    cache."""
    directory = tmp_path_factory.mktemp("eagle")
    add_tokenizer(
        tiny_models.build(
            directory / "model", 97, layers=7, damping=1.0, seed=0, head_dim=12, kv_heads=1
        )
    )
    return directory / "model"


def config_of(model: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((model / "config.json").read_text())
    return found


@pytest.fixture(scope="module", params=[*DEEP, *LAYOUTS], ids=str)
def exported(request: pytest.FixtureRequest, model: Path, family_dir: FamilyDir) -> Path:
    """A directory that contains a ``model``, its ``head``, and the engines of both (``plans``)."""
    path: Path = model.parent / str(request.param)
    if path.exists():
        return path
    path.mkdir()
    options = COMMAND
    if request.param in LAYOUTS:
        (path / "model").symlink_to(model)
        write_eagle(path / "head", model, request.param)
        options = (*COMMAND, "--no-check")
    else:
        family, blocks = request.param
        (path / "model").symlink_to(family_dir(family))
        deep_head(Checkpoint(family_dir(family)), path / "head", blocks)
    given = ("--model", (path / "model").resolve(), "--exit-head", path / "head")
    succeed(export_main, *given, "--output", path / "plans", *options)
    return path


def write_eagle(head: Path, model: Path, layout: str) -> None:
    """Write a head with this layout. All layouts except ``safeailab`` have a draft vocabulary. The
    layout ``speculators`` also contains the model's embedding table."""
    more: dict[str, Any] = {} if layout == "safeailab" else {"draft_vocab": 60}
    if layout == "speculators":
        table = load_file(model / "model.safetensors")["model.embed_tokens.weight"]
        more["embeddings"] = table.bfloat16()
    else:
        more["num_attention_heads"] = 2
    write_head(head, config_of(model), layout, seed=len(layout), **more)


def heads(*params: object) -> pytest.MarkDecorator:
    """Returns a mark for tests of only some of the heads of ``exported``."""
    return pytest.mark.parametrize("exported", params, indirect=True, ids=str)


@heads(*DEEP[:2], "specforge")
@pytest.mark.parametrize("backend", ["ort", "torch"])
@pytest.mark.parametrize("speculation", HEADS_DRAFT)
def test_drafting_changes_no_token(exported: Path, backend: str, speculation: Speculation) -> None:
    check_drafting(load(exported / "plans", backend, threads=1), speculation, (TEXT[:6], [9]))


@heads(*DEEP, "specforge")
def test_verify_has_the_bits_of_the_model_without_the_head(exported: Path, tmp_path: Path) -> None:
    model = ("--model", (exported / "model").resolve(), "--exit-layer", 1)
    succeed(export_main, *model, "--output", tmp_path / "plans", *COMMAND, "--no-check")
    logits = []
    for directory in (exported / "plans", tmp_path / "plans"):
        verify, _, _ = both_on_cache(directory, "ort", 64)
        logits.append(verify.forward(TEXT, range(len(TEXT)), 0).logits.copy())
    assert logits[0].tobytes() == logits[1].tobytes()


@pytest.mark.parametrize("backend", ["ort", "torch"])
def test_kept_prefixes_hold_the_states(exported: Path, backend: str) -> None:
    """The first computed token, whichever it is, reads the state of the last kept token."""
    assert check_kept_prefixes(exported / "plans", backend, [*TEXT, *TEXT[:16]]) > 200


# --- heads with deep layers


def fixed_roots(age: int) -> torch.Tensor:
    """Returns the root (of shape [1, T]) of each position of the text if every position has this
    age. The first positions have a lower age."""
    return (torch.arange(len(TEXT)) - age).clamp_min(0)[None]


def aged_logits(checkpoint: Checkpoint, head: ExitHead, roots: torch.Tensor) -> NDArray[np.float32]:
    """Returns the head's logits [T, V] after each token of the text. Each token is drafted from its
    root."""
    decoder = load_decoder(checkpoint)
    layers = (head.exit_config.layer, *head.exit_config.deep)
    ids = torch.tensor([TEXT])
    states, _ = Teacher(decoder, layers, 1, "float32")(ids)
    inputs, caches = full_sequence_inputs(
        checkpoint.geometry, 1, len(TEXT), len(head.blocks), torch.float32, ids.device
    )
    x, *deep = [states[layer] for layer in layers]
    features = head.lm_head_input(x, inputs, caches, states_before(head, deep, roots))
    lm_head = as_torch(checkpoint.lm_head()).float()
    logits: NDArray[np.float32] = (features @ lm_head.T)[0].detach().numpy()
    return logits


def drafted_logits(directory: Path, backend: str) -> Iterator[tuple[int, int, NDArray[np.float32]]]:
    """Yields the root, the age and the logits of every draft step. The rounds commit the text."""
    verify, draft, _ = both_on_cache(directory, backend.removesuffix("-standard"), 64)
    assert isinstance(draft.engine, CpuEngine) == (backend == "ort" and not operators.missing())
    verify.prefill(TEXT[: ROUNDS[0][0]], 0)
    for root, committed in ROUNDS:
        for age in range(min(committed + 2, len(TEXT) - root)):  # the last two tokens are rejected
            at = root + age
            yield root, age, draft.forward([TEXT[at]], [at], at, at).logits[0].copy()
        verify.forward(TEXT[root : root + committed], range(root, root + committed), root, root)


@heads(*DEEP)
@pytest.mark.parametrize("backend", BACKENDS)
def test_rounds_draft_what_training_computes(
    exported: Path, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if backend == "ort-standard":
        monkeypatch.setattr(operators, "missing", lambda: "left out")
    checkpoint = Checkpoint((exported / "model").resolve())
    head = load_exit_head(checkpoint, exported / "head")
    by_age = [aged_logits(checkpoint, head, fixed_roots(age)) for age in range(AGES)]
    seen = list(drafted_logits(exported / "plans", backend))
    for root, age, logits in seen:
        np.testing.assert_allclose(logits, by_age[age][root + age], atol=2e-4)
    # A stale deep state has another age, and would be detected.
    assert all(
        np.abs(logits - by_age[age + 1][root + age]).max() > 2e-3
        for root, age, logits in seen
        if age + 1 < AGES
    )


def test_random_roots_are_rounds_of_at_most_so_many_ages() -> None:
    roots = random_roots(3, 200, seed=1, number=7)
    ages = torch.arange(200) - roots
    assert torch.equal(roots, random_roots(3, 200, seed=1, number=7))
    assert not torch.equal(roots, random_roots(3, 200, seed=1, number=8))
    assert int(ages.min()) == 0 and int(ages.max()) == AGES - 1
    assert 0.25 < float((ages == 0).float().mean()) < 0.45


def test_mixed_ages_in_one_pass_are_those_of_passes_of_one_age(
    family_dir: FamilyDir, tmp_path: Path
) -> None:
    checkpoint = Checkpoint(family_dir("llama-bias"))
    head = deep_head(checkpoint, tmp_path)
    [roots] = random_roots(1, len(TEXT), seed=2, number=0)
    mixed = aged_logits(checkpoint, head, roots)
    for at, root in enumerate(roots.tolist()):
        expected = aged_logits(checkpoint, head, fixed_roots(at - root))[at]
        np.testing.assert_allclose(mixed[at], expected, atol=1e-5)


def test_an_untrained_deep_head_is_the_plain_one(family_dir: FamilyDir) -> None:
    checkpoint = Checkpoint(family_dir("qwen3-bias"))
    decoder = load_decoder(checkpoint)
    ids = torch.tensor([TEXT])
    states, _ = Teacher(decoder, (1, 2, 3), 1, "float32")(ids)
    inputs, caches = full_sequence_inputs(
        checkpoint.geometry, 1, len(TEXT), 1, torch.float32, ids.device
    )
    plain = make_initial_head(checkpoint, ExitConfig(1))
    deep = make_initial_head(checkpoint, ExitConfig(1, deep=(2, 3)))
    expected = plain.lm_head_input(states[1], inputs, caches)
    state = states_before(deep, [states[2], states[3]], fixed_roots(2))
    found = deep.lm_head_input(states[1], inputs, caches, state)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


@heads(DEEP[0])
def test_deep_layers_that_do_not_fit_are_refused(exported: Path, tmp_path: Path) -> None:
    model = (exported / "model").resolve()
    command = ("--model", model, "--exit-head", exported / "head", "--output", tmp_path / "plans")
    assert_refused(run(export_main, *command, "--stages", 2), "deep layers")
    for deep in ((1,), (2, 2), (3, 2), (99,)):
        config = exit_head_file.read_exit_config(exported / "head", Checkpoint(model).fingerprint())
        exit_head_file.save_config(replace(config, deep=deep), exported / "head")
        try:
            assert_refused(run(export_main, *command), "deep layers must ascend")
        finally:
            exit_head_file.save_config(config, exported / "head")


# --- published EAGLE-3 heads


def reference(exported: Path, model: Path) -> tuple[Reference, list[torch.Tensor], torch.Tensor]:
    """Returns the reference of a head, the states of the text that transformers computes with the
    model, and the token of each column."""
    tensors = load_file(exported / "head" / "model.safetensors")
    config = config_of(exported / "head")
    decoder: Any = AutoModelForCausalLM.from_pretrained(
        model, dtype=torch.float32, attn_implementation="eager"
    )
    with torch.no_grad():
        states = [
            one[0]
            for one in decoder.model(torch.tensor([TEXT]), output_hidden_states=True).hidden_states
        ]
    made = Reference(
        tensors, config, decoder.model.embed_tokens.weight.detach(), LAYERS[exported.name]
    )
    columns = torch.arange(config["draft_vocab_size"])
    return made, states, columns + tensors["d2t"] if "d2t" in tensors else columns


@heads(*LAYOUTS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_rounds_draft_what_the_paper_says(
    exported: Path, model: Path, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The drafts are compared after prompts, after committed chains, and after trees whose path was
    moved. Each draft is a chain, or two tokens of one level."""
    if backend == "ort-standard":
        monkeypatch.setattr(operators, "missing", lambda: "left out")
    made, states, tokens = reference(exported, model)
    verify, draft, cache = both_on_cache(exported / "plans", backend.removesuffix("-standard"), 128)

    def check(found: Any, drafted: list[int], known: int) -> None:
        expected = made.drafted(states, [*TEXT[:known], *drafted], known)
        np.testing.assert_allclose(found, expected.numpy(), atol=2e-4)

    verify.prefill(TEXT[:6], 0)
    for root, committed in ((6, 3), (9, 1), (10, 4)):
        outputs = draft.forward([TEXT[root]], [root], root, root)
        check(outputs.logits[0], [TEXT[root]], root)
        best = int(tokens[outputs.logits[0].argmax()])
        assert outputs.topk_ids is not None and outputs.topk_ids[0, 0] == best
        for age in range(1, 4):
            drafted = [TEXT[root], best, 50, 7][: age + 1]
            check(
                draft.forward(drafted[-1:], [root + age], root + age, root).logits[0], drafted, root
            )
        verify.forward(TEXT[root : root + committed], range(root, root + committed), root, root)
    # The root of this tree has two children, and the second child has a child. The text follows the
    # second child, which is moved when it is accepted.
    root = 14
    other = 80 if TEXT[15] != 80 else 81
    draft.forward([TEXT[14]], [14], 14, 14)
    level = draft.forward(
        [other, TEXT[15]], [15, 15], 15, 14, np.array([[1, 1, 0], [1, 0, 1]], np.bool_)
    )
    for row, token in enumerate((other, TEXT[15])):
        check(level.logits[row], [TEXT[14], token], 14)
    mask = np.array([[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 0, 1, 1]], np.bool_)
    last = draft.forward([TEXT[16]], [16], 17, 14, mask[3:])
    check(last.logits[0], TEXT[14:17], 14)
    verify.forward([TEXT[14], other, *TEXT[15:17]], [14, 15, 15, 16], 14, 14, mask)
    cache.compact(15, [16, 17])
    check(draft.forward([TEXT[17]], [17], 17, 17).logits[0], [TEXT[17]], 17)


def test_a_trained_head_is_accepted_as_often_as_its_reference(tmp_path: Path) -> None:
    """The test compares the rounds of the engines with the rounds that the reference computes. Each
    round drafts three tokens."""
    model = tiny_models.build(
        tmp_path / "model", 97, layers=7, damping=0.3, seed=0, head_dim=12, kv_heads=1
    )
    add_tokenizer(model)
    decoder: Any = AutoModelForCausalLM.from_pretrained(
        model, dtype=torch.float32, attn_implementation="eager"
    )
    head = write_head(tmp_path / "head", config_of(model), "specforge", draft_vocab=60)
    train(head, decoder, LAYERS["specforge"], steps=80)
    succeed(
        export_main, "--model", model, "--exit-head", head, "--output", tmp_path / "plans", *COMMAND
    )
    llm = load(
        tmp_path / "plans",
        "ort",
        threads=1,
        speculation=Speculation("fixed:k=3", guard=False, drafter="exit"),
    )
    tensors = load_file(head / "model.safetensors")
    made = Reference(
        tensors, config_of(head), decoder.model.embed_tokens.weight.detach(), LAYERS["specforge"]
    )
    columns = torch.arange(60) + tensors["d2t"]
    accepted = 0
    expected = 0
    drafts = 0
    for prompt in ([5, 9, 3], [60, 2, 31, 7]):
        found = llm.generate(prompt, max_new_tokens=30, ignore_eos=True)
        assert (
            found.tokens
            == llm.with_speculation(None)
            .generate(prompt, max_new_tokens=30, ignore_eos=True)
            .tokens
        )
        accepted = accepted + found.stats.accepted_tokens
        drafts = drafts + found.stats.draft_tokens
        text = [*prompt, *found.tokens]
        with torch.no_grad():
            states = [
                one[0]
                for one in decoder.model(
                    torch.tensor([text]), output_hidden_states=True
                ).hidden_states
            ]
        root = len(prompt) - 1
        while root < len(text) - 1:
            drafted = [text[root]]
            while len(drafted) <= min(3, len(text) - root - 2):
                drafted.append(
                    int(columns[made.drafted(states, [*text[:root], *drafted], root).argmax()])
                )
            right = next(
                (i for i, token in enumerate(drafted[1:]) if token != text[root + 1 + i]),
                len(drafted) - 1,
            )
            expected = expected + right
            root = root + right + 1
    assert accepted > 5 and abs(accepted - expected) <= 0.02 * drafts


@heads("specforge")
def test_a_service_gives_what_a_request_gets_alone(exported: Path) -> None:
    """The results are equal even with kept prefixes, including their states."""
    llm = load(
        exported / "plans",
        "ort",
        threads=1,
        speculation=Speculation("fixed:k=2", guard=False),
        prefix_memory=1 << 20,
    )
    service = Service(llm, BatchOptions(max_rows=3, prefix_memory=1 << 20))
    prompts = [TEXT[:4], TEXT[3:9], TEXT * 4, TEXT * 4]
    with ThreadPoolExecutor() as pool:
        served = list(
            pool.map(
                service.generate,
                [llm.request(one, max_new_tokens=20, ignore_eos=True) for one in prompts],
            )
        )
    service.close()
    for prompt, one in zip(prompts, served, strict=True):
        assert (
            one.tokens
            == llm.with_speculation(None)
            .generate(prompt, max_new_tokens=20, ignore_eos=True)
            .tokens
        )


@heads("specforge")
def test_a_4_bit_draft_with_an_8_bit_cache(exported: Path, model: Path, tmp_path: Path) -> None:
    command = ("--model", model, "--exit-head", exported / "head", "--output", tmp_path / "plans")
    output = succeed(export_main, *command, "--max-seq-len", 128, "--check").output
    assert "EAGLE-3 over the layers" in output and "uint4 draft" in output
    assert "EAGLE-3" in succeed(inspect_main, tmp_path / "plans").output
    llm = load(tmp_path / "plans", "ort", threads=1, kv_cache_dtype="int8")
    drafting = llm.with_speculation(Speculation("fixed:k=3", guard=False, drafter="exit"))
    plain, found = (
        one.generate(TEXT[:5], max_new_tokens=30, ignore_eos=True)
        for one in (llm.with_speculation(None), drafting)
    )
    assert plain.tokens == found.tokens and found.stats.draft_tokens


@heads("specforge")
def test_a_linked_model_gets_a_copy_of_the_head(
    exported: Path, model: Path, tmp_path: Path
) -> None:
    """The head's file has the same name as the model's."""
    command = (
        "--model",
        model,
        "--exit-head",
        exported / "head",
        "--output",
        tmp_path / "plans",
        "--link-weights",
    )
    assert (
        "largest difference"
        in succeed(export_main, *command, "--max-seq-len", 64, "--check").output
    )
    assert (tmp_path / "plans" / "model.safetensors").samefile(model / "model.safetensors")


def edited(head: Path, directory: Path, **changes: Any) -> Path:
    """A copy of a head with other fields, or with tensors renamed, added or left out."""
    tensors = load_file(head / "model.safetensors")
    config = config_of(head)
    for name, value in changes.items():
        if isinstance(value, torch.Tensor):
            tensors[name] = value
        else:
            config[name] = value
    directory.mkdir()
    save_file(tensors, directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps(config))
    return directory


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"num_hidden_layers": 2}, "several blocks"),
    ({"norm_before_fc": True}, "input_norm.weight of shape [96]"),
    ({"fc_norm": True}, "fc_norm.0.weight of shape [32]"),
    ({"fc_norm": True, "norm_before_fc": True}, "exclude each other"),
    ({"norm_after_fc": True}, "norm_after_fc"),
    ({"hidden_act": "gelu"}, "silu"),
    ({"head_dim": 16, "num_attention_heads": 2}, "head_dim is 16"),
    ({"num_key_value_heads": 4}, "num_kv_heads is 4"),
    ({"vocab_size": 98}, "vocab_size is 98"),
    ({"target_hidden_size": 64}, "states of size 64"),
    ({"architectures": ["MedusaModel"]}, "MedusaModel"),
    ({"eagle_config": {"use_aux_hidden_state": False}}, "last state only"),
    ({"eagle_aux_hidden_state_layer_ids": [1, 2, 9]}, "layers 1, 2, 9"),
    ({"draft_vocab_size": 50}, "d2t"),
    ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "dynamic"),
    ({"d2t": torch.full((60,), 40)}, "d2t"),
    ({"fc_norm.weight": torch.ones(32)}, "fc_norm.weight"),
    ({"embed_tokens.weight": torch.ones(97, 32)}, "separate embedding table"),
    ({"fc.weight": torch.ones(32, 32)}, "fc.weight"),
]


@pytest.mark.parametrize(
    ("changes", "words"), REFUSED, ids=lambda value: value if isinstance(value, str) else ""
)
def test_what_is_not_supported_is_refused_by_name(
    model: Path, tmp_path: Path, changes: dict[str, Any], words: str
) -> None:
    head = write_head(tmp_path / "head", config_of(model), "specforge", draft_vocab=60)
    command = ("--model", model, "--output", tmp_path / "plans", "--exit-head")
    assert_refused(run(export_main, *command, edited(head, tmp_path / "edited", **changes)), words)


@heads("specforge")
def test_what_a_head_cannot_do_is_refused(exported: Path, model: Path, tmp_path: Path) -> None:
    command = ("--model", model, "--output", tmp_path / "plans", "--exit-head", exported / "head")
    assert_refused(
        run(export_main, *command, "--stages", 2), "--stages 2", "states after the layers"
    )
    assert_refused(run(export_main, *command, "--exit-layer", 2), "leave --exit-layer out")
    with pytest.raises(EESDError, match="EAGLE-3 head cannot be split"):
        load_manifest(exported / "plans").on_rank(2)


# --- stored exit heads


def make_head(checkpoint: Checkpoint, blocks: int = 1, own_lm_head: bool = False) -> ExitHead:
    config = ExitConfig(2, blocks, own_lm_head, checkpoint.fingerprint(), trained=True)
    head = make_initial_head(checkpoint, config)
    randomise(head, seed=3)
    return head


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("blocks", "own_lm_head"), [(1, False), (2, True), (3, False)])
@pytest.mark.parametrize("family", ["llama-bias", "qwen3"])
def test_loaded_head_is_the_saved_head(
    family_dir: FamilyDir,
    tmp_path: Path,
    family: str,
    blocks: int,
    own_lm_head: bool,
    dtype: torch.dtype,
) -> None:
    checkpoint = Checkpoint(family_dir(family))
    head = make_head(checkpoint, blocks, own_lm_head)
    save_exit_head(head, tmp_path / "new" / "head", dtype)
    read = load_exit_head(checkpoint, tmp_path / "new" / "head")
    assert read.exit_config == head.exit_config
    expected = {name: value.to(dtype).float() for name, value in head.state_dict().items()}
    assert ("lm_head.weight" in expected) == own_lm_head
    torch.testing.assert_close(read.state_dict(), expected, rtol=0, atol=0)


def test_saving_again_replaces_the_head(family_dir: FamilyDir, tmp_path: Path) -> None:
    checkpoint = Checkpoint(family_dir("mistral"))
    save_exit_head(make_head(checkpoint, blocks=2), tmp_path)
    save_exit_head(make_head(checkpoint, blocks=1, own_lm_head=True), tmp_path)
    assert load_exit_head(checkpoint, tmp_path).exit_config.blocks == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        exit_head_file.CONFIG_FILE,
        exit_head_file.WEIGHTS_FILE,
    ]


@pytest.mark.parametrize(
    ("layer", "blocks", "words"),
    [
        (0, 1, "exit layer must be between 1 and 2 for this 3-layer model; 0 was given"),
        (3, 1, "exit layer must be between 1 and 2 for this 3-layer model; 3 was given"),
        (-1, 1, "exit layer must be between 1 and 2"),
        (1, -1, "between 0 and 3 blocks; -1 were given"),
        (1, 4, "between 0 and 3 blocks; 4 were given"),
    ],
)
def test_impossible_heads_are_refused(
    family_dir: FamilyDir, layer: int, blocks: int, words: str
) -> None:
    with pytest.raises(EESDError, match=words):
        make_initial_head(Checkpoint(family_dir("llama2")), ExitConfig(layer, blocks))


def test_head_of_another_base_model_is_refused(family_dir: FamilyDir, tmp_path: Path) -> None:
    """The geometry is the same, and only the fingerprint differs."""
    checkpoint = Checkpoint(family_dir("mistral"))
    other = Checkpoint(build(FAMILIES["mistral"], tmp_path / "other", seed=1))
    save_exit_head(make_head(checkpoint), tmp_path / "head")
    with pytest.raises(EESDError, match="another base model") as caught:
        load_exit_head(other, tmp_path / "head")
    for word in (str(tmp_path / "head"), checkpoint.fingerprint()[:12], other.fingerprint()[:12]):
        assert word in str(caught.value)


@pytest.fixture(scope="module")
def stored(
    family_dir: FamilyDir, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Checkpoint, Path]:
    checkpoint = Checkpoint(family_dir("qwen2"))
    directory = tmp_path_factory.mktemp("head")
    save_exit_head(make_head(checkpoint), directory)
    return checkpoint, directory


@pytest.fixture
def damaged(stored: tuple[Checkpoint, Path], tmp_path: Path) -> tuple[Checkpoint, Path]:
    """A checkpoint, and a copy of its stored head that the test may damage."""
    return stored[0], shutil.copytree(stored[1], tmp_path / "head")


def refused(checkpoint: Checkpoint, directory: Path, *words: str) -> None:
    with pytest.raises(EESDError) as caught:
        load_exit_head(checkpoint, directory)
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize("name", [exit_head_file.CONFIG_FILE, exit_head_file.WEIGHTS_FILE])
def test_missing_file_is_refused(damaged: tuple[Checkpoint, Path], name: str) -> None:
    checkpoint, directory = damaged
    (directory / name).unlink()
    refused(checkpoint, directory, str(directory / name), "missing")


@pytest.mark.parametrize("keep", [4, 100, -1])
def test_truncated_weights_are_refused(damaged: tuple[Checkpoint, Path], keep: int) -> None:
    checkpoint, directory = damaged
    data = (directory / exit_head_file.WEIGHTS_FILE).read_bytes()
    (directory / exit_head_file.WEIGHTS_FILE).write_bytes(data[:keep])
    refused(checkpoint, directory, exit_head_file.WEIGHTS_FILE, "truncated", "fetch")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"blocks": 2}, "no tensor blocks.1."),
        ({"own_lm_head": True}, "no tensor lm_head.weight"),
        ({"layer": 3}, "exit layer must be between 1 and 2"),
        ({"layer": "two"}, "not an exit head's configuration"),
        ({"layer": ...}, "not an exit head's configuration"),
        ({"blocks": None}, "not an exit head's configuration"),
        ({"blocks": 4}, "between 0 and 3 blocks"),
        ({"base": 7}, "not an exit head's configuration"),
        ({"unknown": 1}, "not an exit head's configuration"),
        ({"base": "0" * 64}, "another base model"),
        ({"calibration": {}}, "calibration in"),
        ({"calibration": asdict(CalibrationPrior()) | {"accept": [1.0]}}, "must have 5 weights"),
        (
            {"calibration": asdict(CalibrationPrior()) | {"accept": "12345"}},
            "accept is '12345', which has the wrong type",
        ),
        (
            {"calibration": asdict(CalibrationPrior()) | {"shift": True}},
            "shift is True, which has the wrong type",
        ),
        (
            {"calibration": asdict(CalibrationPrior()) | {"following": [10**400] * 5}},
            "must be finite",
        ),
        ({"calibration": asdict(CalibrationPrior()) | {"request": -1.0}}, "0 or above"),
    ],
)
def test_damaged_config_is_refused(
    damaged: tuple[Checkpoint, Path], changes: dict[str, Any], words: str
) -> None:
    checkpoint, directory = damaged
    path = directory / exit_head_file.CONFIG_FILE
    edit_json(path, **changes)
    refused(checkpoint, directory, str(directory) if "between" not in words else "", words)


@pytest.mark.parametrize("value", [None, torch.ones(32), torch.ones(64, dtype=torch.int8)])
def test_missing_and_wrong_tensors_are_refused(
    damaged: tuple[Checkpoint, Path], value: torch.Tensor | None
) -> None:
    checkpoint, directory = damaged
    tensors = load_file(directory / exit_head_file.WEIGHTS_FILE)
    del tensors["norm.weight"]
    save_file(
        tensors | ({} if value is None else {"norm.weight": value}),
        directory / exit_head_file.WEIGHTS_FILE,
    )
    refused(checkpoint, directory, str(directory), "norm.weight")
