"""Published EAGLE-3 heads: every layout is read, drafts as the paper says on every backend, and
changes no token."""

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from support import tiny_models
from support.command import add_tokenizer, assert_refused, run, succeed
from support.eagle_heads import LAYOUTS, Reference, train, write_head
from support.lossless_checks import HEADS_DRAFT, check_drafting, check_kept_prefixes
from support.on_cache import OnCache, both_on_cache
from transformers import AutoModelForCausalLM

from eesd import BatchOptions, EESDError, Service
from eesd.common.manifest import load_manifest
from eesd.export.cli import main as export_main
from eesd.export.inspect import main as inspect_main
from eesd.runtime.engines import operators
from eesd.runtime.engines.backends import EngineOptions, open_engines
from eesd.runtime.llm import Speculation, load

TEXT = np.random.default_rng(5).integers(3, 90, 24).tolist()
LAYERS = {
    "safeailab": (2, 3, 4),
    "specforge": (1, 2, 4),
    "speculators": (1, 2, 4),
    "eagle-3.1": (1, 2, 4),
}
"""Layers of a seven-layer model whose states are read: from the layout, or the default."""
COMMAND = ("--max-seq-len", 256, "--quantize-draft", "none", "--no-check")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model shaped so that a state takes two caches, the second one only in part."""
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


@pytest.fixture(scope="module", params=LAYOUTS)
def exported(request: pytest.FixtureRequest, model: Path) -> Path:
    """A head and its engines. All layouts but one have a draft vocabulary, and one contains the
    model's embedding table."""
    path: Path = model.parent / request.param
    if path.exists():
        return path
    more: dict[str, Any] = {} if request.param == "safeailab" else {"draft_vocab": 60}
    table = load_file(model / "model.safetensors")["model.embed_tokens.weight"]
    more |= (
        {"embeddings": table.bfloat16()}
        if request.param == "speculators"
        else {"num_attention_heads": 2}
    )
    write_head(path / "head", config_of(model), request.param, seed=len(request.param), **more)
    succeed(
        export_main,
        "--model",
        model,
        "--exit-head",
        path / "head",
        "--output",
        path / "plans",
        *COMMAND,
    )
    return path


def reference(exported: Path, model: Path) -> tuple[Reference, list[torch.Tensor], torch.Tensor]:
    """The reference of a head, the model's states of the text from transformers, and the token of
    each column."""
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


@pytest.mark.parametrize("backend", ["ort", "torch", "ort-standard"])
def test_rounds_draft_what_the_paper_says(
    exported: Path, model: Path, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After prompts, committed chains and trees whose path was moved; for chains and for two tokens
    of one level."""
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
    # A tree: two children of the root, and a child of the second one. The text follows the second
    # child, which is moved when it is accepted.
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


ONE = pytest.mark.parametrize("exported", ["specforge"], indirect=True)
"""For tests that do not depend on the layout."""


@ONE
@pytest.mark.parametrize("backend", ["ort", "torch"])
@pytest.mark.parametrize("speculation", HEADS_DRAFT)
def test_drafting_changes_no_token(exported: Path, backend: str, speculation: Speculation) -> None:
    check_drafting(load(exported / "plans", backend, threads=1), speculation, (TEXT[:6], [9]))


def test_a_trained_head_is_accepted_as_often_as_its_reference(tmp_path: Path) -> None:
    """Rounds of three drafts by the reference, compared with those of the engines."""
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


@ONE
def test_verify_has_the_bits_of_the_model_without_the_head(
    exported: Path, model: Path, tmp_path: Path
) -> None:
    succeed(
        export_main, "--model", model, "--exit-layer", 1, "--output", tmp_path / "plans", *COMMAND
    )
    logits = []
    for directory in (exported / "plans", tmp_path / "plans"):
        engines = open_engines(
            directory, load_manifest(directory), EngineOptions("ort", 1, draft=False)
        )
        cache = engines.verify.new_kv_caches()[0]
        cache.reserve(64)
        logits.append(
            OnCache(engines.verify, cache).forward(TEXT, range(len(TEXT)), 0).logits.copy()
        )
    assert logits[0].tobytes() == logits[1].tobytes()


@ONE
def test_a_service_gives_what_a_request_gets_alone(exported: Path) -> None:
    """Also with kept prefixes, including their states."""
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


@pytest.mark.parametrize("backend", ["ort", "torch"])
def test_kept_prefixes_hold_the_states(exported: Path, backend: str) -> None:
    """The first computed token, whichever it is, reads the state of the last kept token."""
    assert check_kept_prefixes(exported / "plans", backend, [*TEXT, *TEXT[:16]]) > 200


@ONE
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


@ONE
def test_a_linked_model_gets_a_copy_of_the_head(
    exported: Path, model: Path, tmp_path: Path
) -> None:
    """Its file has the name of the model's."""
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
    ({"embed_tokens.weight": torch.ones(97, 32)}, "embedding table of its own"),
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


@ONE
def test_what_a_head_cannot_do_is_refused(exported: Path, model: Path, tmp_path: Path) -> None:
    command = ("--model", model, "--output", tmp_path / "plans", "--exit-head", exported / "head")
    assert_refused(
        run(export_main, *command, "--stages", 2), "--stages 2", "states after the layers"
    )
    assert_refused(run(export_main, *command, "--exit-layer", 2), "leave --exit-layer out")
    with pytest.raises(EESDError, match="EAGLE-3 head cannot be split"):
        load_manifest(exported / "plans").on_rank(2)
