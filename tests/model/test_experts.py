"""Tests of mixtures of experts. They cover the layouts of checkpoints, the refusals, the initial
values of a head, and exports.

``round/test_oracle.py`` compares their fields and tokens with transformers.
``operators/test_operators.py`` tests the operator.
"""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from support.command import add_tokenizer, assert_refused, export_engine, run, slow_but, succeed
from support.family_grid import SMALL, FamilyCase
from support.mutants import mutate
from support.tiny_checkpoints import edit_json
from support.without_operators import without_operators
from torch import Tensor
from torch.nn.functional import silu
from transformers import AutoModelForCausalLM

import eesd
from eesd.common.architecture import Model, mixture_of
from eesd.common.errors import EESDError
from eesd.common.geometry import ExitConfig
from eesd.common.manifest import load_manifest
from eesd.common.shapes import NO_HEAD
from eesd.export.cli import main as export_main
from eesd.export.cpu.build import build_for_cpu
from eesd.model.as_torch import as_torch
from eesd.model.checkpoint import Checkpoint
from eesd.model.initial_head import joined
from eesd.model.loading import load_decoder, make_initial_head
from eesd.model.torch_ops import TorchOperations
from eesd.runtime.engines.backends import EngineOptions, open_engines
from eesd.runtime.engines.exactness import Exactness
from eesd.runtime.llm import Speculation

Shared = Callable[[str, Callable[[Path], object]], Path]
SIZES = SMALL | {"intermediate_size": 32, "num_local_experts": 4, "num_experts_per_tok": 2}
OWN: dict[str, dict[str, Any]] = {
    "mixtral": {},
    "qwen3_moe": {"moe_intermediate_size": 24, "mlp_only_layers": [1], "norm_topk_prob": True},
}


@pytest.fixture
def models(shared: Shared) -> Callable[[str], Path]:
    """Returns a function that gives a model of a family. Tests must not change this model."""
    return lambda name: shared(
        f"experts-{name}", lambda path: FamilyCase(name, SIZES | OWN[name], 2).write(path)
    )


@pytest.fixture(params=OWN)
def model(request: pytest.FixtureRequest, models: Callable[[str], Path]) -> Path:
    return models(request.param)


@pytest.fixture
def mixtral(models: Callable[[str], Path], tmp_path: Path) -> Path:
    """A copy of the Mixtral model that the test may change."""
    return Path(shutil.copytree(models("mixtral"), tmp_path / "mixtral"))


def tensors_of(model: Path) -> dict[str, Tensor]:
    return {
        name: value
        for file in model.glob("*.safetensors")
        for name, value in load_file(file).items()
    }


def rewrite(model: Path, tensors: dict[str, Tensor]) -> None:
    """Replace all tensors of the model by ``tensors``."""
    for file in [*model.glob("*.safetensors"), *model.glob("*.index.json")]:
        file.unlink()
    save_file(tensors, model / "model.safetensors", {"format": "pt"})


def test_experts_that_are_one_tensor_are_those_apart(model: Path, tmp_path: Path) -> None:
    """transformers joins the experts' tensors in memory. It can also read joint tensors from
    files."""
    fused = Path(shutil.copytree(model, tmp_path / "fused"))
    tensors = dict[str, Tensor]()
    experts = SIZES["num_local_experts"]
    names = {
        "w1": "gate",
        "w2": "down",
        "w3": "up",
        "gate_proj": "gate",
        "down_proj": "down",
        "up_proj": "up",
    }
    apart: dict[str, dict[str, Tensor]] = {}
    for name, value in tensors_of(model).items():
        name = name.replace("block_sparse_moe", "mlp")
        before, there, rest = name.partition(".mlp.experts.")
        if there:
            number, module, _ = rest.split(".")
            apart.setdefault(before, {})[f"{names[module]}{number}"] = value
        else:
            tensors[name] = value
    for before, parts in apart.items():
        both = [
            torch.cat((parts[f"gate{number}"], parts[f"up{number}"])) for number in range(experts)
        ]
        tensors[f"{before}.mlp.experts.gate_up_proj"] = torch.stack(both)
        tensors[f"{before}.mlp.experts.down_proj"] = torch.stack(
            [parts[f"down{number}"] for number in range(experts)]
        )
    rewrite(fused, tensors)
    assert Checkpoint(fused).fingerprint() == Checkpoint(model).fingerprint()
    reference = AutoModelForCausalLM.from_pretrained(fused, dtype=torch.float32).state_dict()
    for layer in {before.removeprefix("model.layers.") for before in apart}:
        whole = reference[f"model.layers.{layer}.mlp.experts.gate_up_proj"]
        own = Checkpoint(fused).tensors[f"model.layers.{layer}.mlp.experts.3.up_proj.weight"].read()
        assert torch.equal(as_torch(own).float(), whole[3, whole.shape[1] // 2 :])


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"num_experts_per_tok": 5}, ("num_experts_per_tok is 5", "from 1 to 4")),
        ({"num_local_experts": 0}, ("num_local_experts is 0",)),
        ({"num_experts": 8}, ("num_local_experts and num_experts differ",)),
        ({"layer_types": ["full_attention"] * 3}, ("layer_types",)),
        ({"num_local_experts": 5}, ("mlp.gate.weight", "[4, 32]", "[5, 32]")),
        ({"num_local_experts": 3}, ("mlp.gate.weight", "[4, 32]", "[3, 32]")),
        ({"intermediate_size": 16}, ("mlp.experts.0.gate_proj.weight", "[32, 32]", "[16, 32]")),
        (
            {"model_type": "jamba", "architectures": ["JambaForCausalLM"]},
            ("JambaForCausalLM", "not supported", "mixtral"),
        ),
    ],
)
def test_configs_that_do_not_fit_are_refused(
    mixtral: Path, tmp_path: Path, changed: Any, words: tuple[str, ...]
) -> None:
    edit_json(mixtral / "config.json", **changed)
    assert_refused(
        run(export_main, "--model", mixtral, "--exit-layer", 1, "-o", tmp_path / "plans"), *words
    )


@pytest.mark.parametrize(
    "changed",
    [{"mlp_only_layers": 1}, {"mlp_only_layers": ["1"]}, {"decoder_sparse_step": 0}],
    ids=str,
)
def test_layers_that_are_none_are_refused(
    models: Callable[[str], Path], tmp_path: Path, changed: dict[str, Any]
) -> None:
    model = Path(shutil.copytree(models("qwen3_moe"), tmp_path / "model"))
    edit_json(model / "config.json", **changed)
    assert_refused(
        run(export_main, "--model", model, "--exit-layer", 1, "-o", tmp_path / "plans"),
        next(iter(changed)),
    )


def test_experts_with_equal_rows_of_the_router_are_refused(mixtral: Path) -> None:
    """torch breaks ties between equal shares differently from ONNX, and on a GPU differently from a
    CPU."""
    tensors = tensors_of(mixtral)
    tensors["model.layers.1.block_sparse_moe.gate.weight"][3] = tensors[
        "model.layers.1.block_sparse_moe.gate.weight"
    ][0]
    rewrite(mixtral, tensors)
    with pytest.raises(
        EESDError, match=r"two experts have equal rows in model\.layers\.1\.mlp\.gate\.weight"
    ):
        Checkpoint(mixtral)
    edit_json(mixtral / "config.json", num_experts_per_tok=4)  # a token uses all experts
    Checkpoint(mixtral)


def test_a_missing_expert_is_named(mixtral: Path) -> None:
    tensors = tensors_of(mixtral)
    del tensors["model.layers.2.block_sparse_moe.experts.1.w3.weight"]
    rewrite(mixtral, tensors)
    with pytest.raises(
        EESDError, match=r"no tensor model\.layers\.2\.mlp\.experts\.1\.up_proj\.weight"
    ):
        Checkpoint(mixtral)


def check_modules(model: Path) -> None:
    """A mixture gives the results of transformers, whether an expert is computed for the tokens
    that use it or for all tokens. Unused results may overflow."""
    checkpoint = Checkpoint(model)
    reference: Any = (
        AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).model.layers[2].mlp
    )
    decoder = load_decoder(checkpoint)
    o = decoder.operations()
    block = Model(checkpoint.geometry, NO_HEAD).layer(2)
    mixture = mixture_of(block)
    x = torch.randn(2, 9, 32, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = reference(x)
        shares = o.shares(x, block, mixture)
        found = o.mixture(x, block, mixture, "", None, ())
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
        found = o.on_all(x, shares, block, mixture)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
        unused = shares[..., 0] == 0
        for part in ("up_proj", "down_proj"):
            decoder.get_parameter(f"model.layers.2.mlp.experts.0.{part}.weight").mul_(1e30)
        found = o.on_all(x, shares, block, mixture)
        torch.testing.assert_close(found[unused], expected[unused], rtol=1e-4, atol=1e-5)


MUTANTS = [
    ("shares", "if experts.normed", "if not experts.normed"),
    ("shares", "experts.used, -1", "experts.used - 1, -1"),
    ("shares", ".softmax(-1)", ".sigmoid()"),
    ("on_all", "x * (share != 0).to(x.dtype)", "x"),
    ("on_all", ") * share", ") * (share > 0)"),
    ("on_all", "y + self", "self"),
    ("on_chosen", "* shares[tokens, index, None]", ""),
    ("on_chosen", "given[rows]", "given[rows - rows[0]]"),
]


def test_a_mixture_is_that_of_transformers(model: Path) -> None:
    check_modules(model)


@pytest.mark.parametrize(("name", "old", "new"), MUTANTS)
def test_a_mistake_is_caught(
    models: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, name: str, old: str, new: str
) -> None:
    mutate(monkeypatch, TorchOperations, name, old, new)
    with pytest.raises(AssertionError, match="not close"):
        check_modules(models("qwen3_moe"))


def test_a_head_starts_from_experts_of_equal_weight(model: Path) -> None:
    checkpoint = Checkpoint(model)
    head: Any = make_initial_head(checkpoint, ExitConfig(1))
    mlp: Any = head.blocks[0].mlp
    x = torch.randn(1, 5, 32, generator=torch.Generator().manual_seed(0))
    is_mixtral = "mixtral" in model.name
    assert not hasattr(mlp, "experts") and mlp.up_proj.out_features == (64 if is_mixtral else 32)
    decoder: Any = load_decoder(checkpoint)
    last = decoder.model.layers[2]
    experts = last.mlp.experts
    with torch.no_grad():
        if is_mixtral:  # the layer has room for two experts
            both = (mlp_of(experts[0], x) + mlp_of(experts[1], x)) / 2
            torch.testing.assert_close(mlp_of(mlp, x), both)
        else:  # the layer has one expert, and 8 of the 24 columns of another
            assert torch.equal(mlp.gate_proj.weight[24:], experts[1].gate_proj.weight[:8])
            assert torch.equal(mlp.down_proj.weight[:, 24:], experts[1].down_proj.weight[:, :8] / 2)


def mlp_of(module: Any, x: Tensor) -> Tensor:
    gated: Tensor = silu(module.gate_proj(x)) * module.up_proj(x)
    return torch.Tensor(module.down_proj(gated))


def test_a_head_with_more_room_than_experts_has_zeros(model: Path) -> None:
    geometry = replace(Checkpoint(model).geometry, intermediate_size=40)
    parts = [np.ones((32, 16), np.float32)] * 2
    found = joined("blocks.0.mlp.down_proj.weight", parts, geometry, ExitConfig(1))
    assert found.shape == (32, 40) and (found[:, :32] == 0.5).all() and not found[:, 32:].any()


def check_tokens_and_bits(plans: Path, backend: str) -> None:
    """Drafting changes no token. The logits of a token have the same bits if the other tokens of
    the call use other experts."""
    prompt = [1, 17, 5, 40, 3]
    manifest = load_manifest(plans)
    found = [
        eesd.load(plans, speculation=speculation, backend=backend)
        .generate(prompt, max_new_tokens=24, ignore_eos=True)
        .tokens
        for speculation in (None, Speculation(tree=2, guard=False))
    ]
    assert found[0] == found[1]
    exactness = Exactness(manifest)
    exactness.check(open_engines(plans, manifest, EngineOptions(backend, 1, draft=False)).verify)
    assert exactness.chains.calls > 20 and not exactness.chains.differing


WAYS = [
    (name, backend, quantized)
    for name in OWN
    for backend in ("ort", "torch")
    for quantized in ("none", "int4")
]


@pytest.mark.parametrize(
    ("name", "backend", "quantized"),
    slow_but(WAYS, ("mixtral", "ort", "int4"), ("qwen3_moe", "torch", "none")),
)
def test_bits_do_not_depend_on_the_experts_of_others(
    models: Callable[[str], Path], shared: Shared, name: str, backend: str, quantized: str
) -> None:
    options = (
        "--dtype",
        "float32",
        "--max-seq-len",
        64,
        "--max-tree-nodes",
        8,
        "--quantize",
        quantized,
    )
    plans = (
        shared(
            f"{name}-{quantized}",
            lambda path: export_engine(models(name), path / "plans", *options),
        )
        / "plans"
    )
    check_tokens_and_bits(plans, backend)
    if backend == "ort":
        with without_operators():
            check_tokens_and_bits(plans, backend)


def test_stages_have_experts(models: Callable[[str], Path], tmp_path: Path) -> None:
    model = models("qwen3_moe")
    options = ("--dtype", "float32", "--max-seq-len", 64, "--max-tree-nodes", 8)
    plans = [
        export_engine(model, tmp_path / str(stages), *options, "--stages", stages)
        for stages in (1, 2)
    ]
    whole, staged = (
        eesd.load(one).generate([1, 17, 5], max_new_tokens=24, ignore_eos=True).tokens
        for one in plans
    )
    assert whole == staged


def test_the_first_layers_of_a_mixture(models: Callable[[str], Path], tmp_path: Path) -> None:
    options = ("--dtype", "bfloat16", "--max-seq-len", 64, "--max-tree-nodes", 8, "--layers", 2)
    plans = export_engine(models("qwen3_moe"), tmp_path / "plans", *options)
    assert load_manifest(plans).geometry.num_layers == 2
    assert len(eesd.load(plans).generate([1, 17, 5], max_new_tokens=8, ignore_eos=True).tokens) == 8


def test_a_manifest_of_other_experts_is_refused(mixtral: Path, tmp_path: Path) -> None:
    plans = export_engine(
        mixtral,
        tmp_path / "plans",
        "--dtype",
        "float32",
        "--max-seq-len",
        64,
        "--max-tree-nodes",
        8,
    )
    manifest = json.loads((plans / "manifest.json").read_text())
    for name, value, words in (
        ("used", 5, "number of experts that a token uses is 5"),
        ("count", 0, "number of experts is 0"),
        ("size", 1 << 30, "size of the experts"),
        ("dense_layers", [1, 0], "must ascend"),
        ("dense_layers", [-1], "must ascend"),
        ("normed", 1, "normed"),
    ):
        changed = manifest["geometry"] | {
            "experts": manifest["geometry"]["experts"] | {name: value}
        }
        (plans / "manifest.json").write_text(json.dumps(manifest | {"geometry": changed}))
        with pytest.raises(EESDError, match=words):
            load_manifest(plans)
    changed = manifest["geometry"] | {
        "experts": manifest["geometry"]["experts"] | {"dense_layers": [1]}
    }
    (plans / "manifest.json").write_text(json.dumps(manifest | {"geometry": changed}))
    for packed in plans.glob("cpu-*"):
        shutil.rmtree(packed)
    with pytest.raises(EESDError, match="do not fit"):
        eesd.load(plans, backend="torch")
    with pytest.raises(EESDError, match="do not fit"):
        build_for_cpu(plans, load_manifest(plans))


def test_experts_are_rounded_on_the_tokens_that_use_them(mixtral: Path, tmp_path: Path) -> None:
    """Graphs and modules agree on the stored weights."""
    add_tokenizer(mixtral)
    (tmp_path / "text").write_text("3.14159 26535 89793 23846 " * 200)
    options = ("--exit-layer", 1, "--quantize", "int4", "--round-on", tmp_path / "text", "--check")
    succeed(export_main, "--model", mixtral, "--output", tmp_path / "plans", *options)
