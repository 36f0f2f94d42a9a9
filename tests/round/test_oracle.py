"""Tests that use transformers as the oracle. A checkpoint gives the tokens of transformers, or it
is refused."""

import json
import logging
import os
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import cycle, islice, product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from support.checkpoint_grid import POSITIONS, ROPES, VOCABULARY, Case, cases
from support.command import add_tokenizer, export_engine, slow_but
from support.distilling import distill
from support.engine_dirs import trained_head
from support.family_grid import OPTIONS, SMALL, FamilyCase, family_cases
from support.without_operators import float32_activations
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

import eesd
from eesd.common.errors import EESDError
from eesd.distill.own_engine import EngineTeacher
from eesd.distill.teacher import Teacher
from eesd.model.checkpoint import Checkpoint
from eesd.model.config import load_config
from eesd.model.inputs import causal_inputs, empty_caches
from eesd.model.loading import load_decoder
from eesd.model.rotary import rotary_tables
from eesd.runtime.llm import Speculation

TOLERANCE = 2e-4
PROMPT_TOKENS = 4
TABLES = [name for name in ROPES if name not in ("dynamic", "longrope")]
THETAS = (10000.0, 5e5, 1e6)
ROTARY = [*product(TABLES, THETAS)]


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    verbosity = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity(logging.CRITICAL)
    transformers.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    with torch.no_grad():
        yield
    transformers.logging.set_verbosity(verbosity)


@pytest.mark.parametrize(
    ("name", "theta"), slow_but(ROTARY, *zip(TABLES, cycle(THETAS), strict=False))
)
def test_rotary_tables_are_those_of_transformers(tmp_path: Path, name: str, theta: float) -> None:
    """A frequency that is rounded differently is off by thousandths at the last of 131,072
    positions. torch rounds a few powers to the second nearest float32. All other columns differ
    only by the rounding of cosines and sines.
    """
    config = LlamaConfig(
        hidden_size=256,
        num_attention_heads=2,
        max_position_embeddings=4096,
        rope_parameters={"rope_theta": theta} | ROPES[name],
    )
    raw = {
        "model_type": "llama",
        "vocab_size": 61,
        "hidden_size": 256,
        "intermediate_size": 8,
        "num_hidden_layers": 1,
    }
    raw |= {
        "num_attention_heads": 2,
        "max_position_embeddings": 4096,
        "rope_scaling": ROPES[name] | {"rope_theta": theta},
    }
    (tmp_path / "config.json").write_text(json.dumps(raw))
    positions = torch.arange(131072)[None]
    reference: Any = LlamaRotaryEmbedding(config)
    tables = rotary_tables(load_config(tmp_path).geometry, 131072)
    # The last bit of a frequency causes this error of the angle.
    step = positions[0, :, None].numpy() * np.spacing(reference.inv_freq.numpy())
    for ours, theirs in zip(tables, reference(torch.zeros(1), positions), strict=True):
        difference = np.abs(ours - theirs[0, :, :64].numpy()) / reference.attention_scaling
        # YaRN adds two such frequencies, and the angles are rounded, too.
        assert (difference <= 4 * step + 1.2e-7).all()
        assert (difference.max(0) > 1.2e-7).sum() <= 1


def expected(directory: Path, tokens: Tensor) -> tuple[Tensor, Tensor] | None:
    """Returns the logits of transformers, and the greedy tokens that it generates after the first
    few tokens with its own KV cache. Returns None if transformers cannot run the model."""
    try:
        reference: Any = AutoModelForCausalLM.from_pretrained(
            directory,
            dtype=torch.float32,
            attn_implementation="eager",
            experts_implementation="eager",
        )
        logits: Tensor = reference.eval()(tokens, use_cache=False).logits
        prompt = tokens[:, :PROMPT_TOKENS]
        count = tokens.shape[1] - PROMPT_TOKENS
        generated: Tensor = reference.generate(
            prompt, max_new_tokens=count, do_sample=False, eos_token_id=None
        )
    except Exception:
        return None
    return logits, generated


def ours(checkpoint: Checkpoint, tokens: Tensor) -> Tensor:
    geometry = checkpoint.geometry
    count = tokens.shape[1]
    caches = empty_caches(geometry, 1, count)
    logits: Tensor = load_decoder(checkpoint)(
        tokens, causal_inputs(geometry, 1, count, count), caches
    )[0]
    return logits


def judge(case: Case | FamilyCase, directory: Path) -> tuple[str, int]:
    """Returns ``exact``, ``refused`` or ``different``, and the number of tokens that were
    compared."""
    case.write(directory)
    try:
        checkpoint = Checkpoint(directory)
    except EESDError as error:
        assert "\n" not in str(error)
        return "refused", 0
    count = min(checkpoint.config.max_positions, POSITIONS)
    if count <= PROMPT_TOKENS:
        return "refused", 0
    tokens = torch.randint(
        0, VOCABULARY, (1, count), generator=torch.Generator().manual_seed(case.seed)
    )
    reference = expected(directory, tokens)
    if reference is None:
        return "different", 0
    expected_logits, generated = reference
    logits = ours(checkpoint, tokens)
    close = (logits - expected_logits).abs().max() < TOLERANCE * max(
        1.0, float(expected_logits.abs().max())
    )
    equal = bool((logits.argmax(-1) == expected_logits.argmax(-1)).all()) and bool(close)
    # Each generated token is the most likely one after the tokens before it.
    behind = ours(checkpoint, generated)[0, PROMPT_TOKENS - 1 : -1].argmax(-1)
    equal = equal and torch.equal(behind, generated[0, PROMPT_TOKENS:])
    return ("exact" if equal else "different"), count


def check(cases: Iterable[Case | FamilyCase], directory: Path) -> Counter[str]:
    """Judge all cases, and check that no case gives different tokens. Returns the number of exact
    cases and the number of refused cases."""
    results = Counter[str]()
    tokens = 0
    different = list[str]()
    for number, case in enumerate(cases):
        result, compared = judge(case, directory / str(number))
        results[result] += 1
        tokens += compared
        if result == "different":
            different.append(str(case))
    print(f"{dict(results)}, {tokens} tokens")
    assert not different, "\n".join([*different[:20], json.dumps(results)])
    return results


@pytest.mark.parametrize(
    ("count", "seed"), slow_but([(60, 1), (250, 2), (250, 3), (250, 4)], (60, 1))
)
def test_a_checkpoint_is_computed_as_transformers_does_or_refused(
    tmp_path: Path, count: int, seed: int
) -> None:
    results = check(cases(count, seed), tmp_path)
    assert results["exact"] > count // 3 and results["refused"] > count // 20, (
        "the grid says little"
    )


def generated(directory: Path, prompt: list[int], count: int) -> list[int]:
    """Returns the greedy tokens of transformers."""
    # transformers' default implementation of experts does not accept odd sizes on a CPU.
    reference: Any = AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, experts_implementation="eager"
    )
    tokens = reference.generate(
        torch.tensor([prompt]), max_new_tokens=count, do_sample=False, eos_token_id=None
    )
    found: list[int] = tokens[0, len(prompt) :].tolist()
    return found


@pytest.mark.parametrize("number", slow_but(list(range(16)), 0, 3))
def test_exported_engines_generate_the_tokens_of_transformers(tmp_path: Path, number: int) -> None:
    """The test runs all steps from config.json to tokens. These are the export with its check, ONNX
    Runtime, and drafting."""
    supported = (
        case for case in cases(100, seed=8) if _is_supported(case, tmp_path / f"trial-{case.seed}")
    )
    case = next(islice(supported, number, None))
    model = tmp_path / f"trial-{case.seed}"
    positions = min(Checkpoint(model).config.max_positions, POSITIONS)
    plans = export_engine(
        model,
        tmp_path / "plans",
        "--dtype",
        "float32",
        "--max-seq-len",
        positions,
        "--max-tree-nodes",
        4,
    )
    prompt = torch.randint(
        0, VOCABULARY, (6,), generator=torch.Generator().manual_seed(number)
    ).tolist()
    count = positions - len(prompt)
    engines = eesd.load(plans, speculation=Speculation(tree=2, guard=False))
    assert engines.generate(prompt, max_new_tokens=count, ignore_eos=True).tokens == generated(
        model, prompt, count
    ), case.described


def _is_supported(case: Case, directory: Path) -> bool:
    try:
        return Checkpoint(case.write(directory)).config.max_positions >= 12
    except EESDError:
        return False


FAMILY_CASES = int(os.environ.get("FAMILY_CASES", "0"))
"""The number of checkpoints of each family in the thorough grid, or 0 for the usual numbers."""


def test_internlm3_as_published_is_that_of_transformers(tmp_path: Path) -> None:
    """The config uses the model's own names for two fields and for the class."""
    case = FamilyCase("internlm3", SMALL | {"attention_bias": True, "mlp_bias": True}, 1)
    config = case.write(tmp_path) / "config.json"
    saved = load_config(tmp_path)
    raw = json.loads(config.read_text())
    raw |= {"qkv_bias": raw.pop("attention_bias"), "bias": raw.pop("mlp_bias")}
    config.write_text(json.dumps(raw | {"architectures": ["InternLM3ForCausalLM"]}))
    assert load_config(tmp_path) == saved and saved.geometry.output_bias
    for change in ({"bias": False}, {"attention_bias": False}):
        config.write_text(json.dumps(raw | change))
        with pytest.raises(EESDError, match="differ"):
            load_config(tmp_path)


@pytest.mark.parametrize(("count", "seed"), slow_but([(3, 1), (20, 2)], (3, 1)))
@pytest.mark.parametrize("model_type", OPTIONS)
def test_a_family_is_computed_as_transformers_does(
    tmp_path: Path, model_type: str, count: int, seed: int
) -> None:
    results = check(family_cases(model_type, FAMILY_CASES or count, seed), tmp_path)
    assert results.keys() == {"exact"}, "the grid has only what is supported"


@pytest.mark.parametrize(
    ("model_type", "number"),
    slow_but(
        [(name, number) for name in OPTIONS for number in range(3)],
        ("olmo2", 1),
        ("gemma3_text", 1),
        ("hunyuan_v1_dense", 1),
        ("hunyuan_v1_moe", 1),
        ("lfm2", 1),
    ),
)
def test_an_exported_family_generates_the_tokens_of_transformers(
    tmp_path: Path, model_type: str, number: int
) -> None:
    """A random head with the family's own blocks drafts trees. Plain decoding gives the same
    tokens."""
    case = family_cases(model_type, 3, seed=3)[number]
    model = case.write(tmp_path / "model")
    positions = min(Checkpoint(model).config.max_positions, POSITIONS)
    head = trained_head(model, tmp_path / "head", blocks=1 + number % 2, own_lm_head=False)
    options = (
        "--exit-head",
        head,
        "--dtype",
        "float32",
        "--max-seq-len",
        positions,
        "--max-tree-nodes",
        4,
    )
    plans = export_engine(model, tmp_path / "plans", *options)
    prompt = torch.randint(
        0, VOCABULARY, (6,), generator=torch.Generator().manual_seed(number)
    ).tolist()
    count = positions - len(prompt)
    expected = generated(model, prompt, count)
    # Products with quantized weights round activations to 8 bits by default.
    activations = float32_activations("ort") if case.has_levels else None
    for speculation in (Speculation(tree=2, guard=False), None):
        engines = eesd.load(plans, speculation=speculation, activations=activations)
        assert engines.generate(prompt, max_new_tokens=count, ignore_eos=True).tokens == expected, (
            speculation,
            case,
        )


@pytest.mark.parametrize("model_type", slow_but(list(OPTIONS), "gemma2"))
def test_a_head_is_distilled_for_a_family(tmp_path: Path, model_type: str) -> None:
    """The targets from the model's own engine equal the targets from its torch modules, and the
    head can draft."""
    case = next(
        case
        for case in family_cases(model_type, 9, seed=4)
        if case.options["num_hidden_layers"] > 2
    )
    case = FamilyCase(model_type, case.options | {"vocab_size": 97}, case.seed)
    model = case.write(tmp_path / "model")
    add_tokenizer(model)
    checkpoint = Checkpoint(model)
    rows = tmp_path / "rows.npy"
    ids = torch.randint(3, 97, (16, 25), generator=torch.Generator().manual_seed(0))
    np.save(rows, ids.numpy().astype(np.uint16))
    layers = tuple(range(1, checkpoint.geometry.num_layers + 1))
    by_engine = EngineTeacher(checkpoint, tmp_path / "engine", layers, 4, "float32", 32, 1)(
        ids[:1, :24]
    )
    by_torch = Teacher(load_decoder(checkpoint), layers, 4, "float32")(ids[:1, :24])
    for layer in layers:
        # 8-bit activations change the logits by rounding.
        torch.testing.assert_close(by_engine[0][layer], by_torch[0][layer], rtol=2e-2, atol=2e-2)
    with torch.enable_grad():
        distill(model, rows, tmp_path / "head", "--steps", 2, "--shared-lm-head")
    plans = export_engine(
        model, tmp_path / "plans", "--exit-head", tmp_path / "head", "--max-tree-nodes", 4
    )
    engines = eesd.load(plans, speculation=Speculation(guard=False))
    assert (
        engines.generate([1, 5, 9], max_new_tokens=8, ignore_eos=True).tokens
        == eesd.load(plans, speculation=None)
        .generate([1, 5, 9], max_new_tokens=8, ignore_eos=True)
        .tokens
    )
