"""Tests that supported model directories are read, and that damaged and unsupported directories are
refused in one sentence."""

import json
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from support.command import refused
from support.tiny_checkpoints import FAMILIES, GEOMETRY, build, edit_json
from torch import Tensor
from transformers import AutoModelForCausalLM

from eesd.common.errors import EESDError
from eesd.model.as_torch import as_torch
from eesd.model.checkpoint import Checkpoint
from eesd.model.config import load_config
from eesd.model.families import FAMILIES as SUPPORTED_FAMILIES
from eesd.model.loading import load_decoder
from eesd.model.safetensors_file import read_header

SUPPORTED = tuple(SUPPORTED_FAMILIES)
FamilyDir = Callable[[str], Path]
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"


@pytest.fixture
def model_dir(family_dir: FamilyDir, tmp_path: Path) -> Path:
    """A small checkpoint that the test may damage."""
    return shutil.copytree(family_dir("llama-linear"), tmp_path / "model")


@pytest.fixture
def sharded_dir(family_dir: FamilyDir, tmp_path: Path) -> Path:
    return shutil.copytree(family_dir("codellama"), tmp_path / "sharded")


def edit_tensors(directory: Path, **changes: Tensor | None) -> None:
    """Replace tensors of a single-file checkpoint. In the names, ``__`` stands for a dot. The value
    None removes a tensor."""
    tensors: dict[str, Tensor | None] = dict(load_file(directory / WEIGHTS))
    tensors |= {name.replace("__", "."): value for name, value in changes.items()}
    save_file(
        {name: value for name, value in tensors.items() if value is not None}, directory / WEIGHTS
    )


def as_written_by_transformers_4(raw: dict[str, Any], kind_key: str) -> dict[str, Any]:
    rope = dict(raw.pop("rope_parameters"))
    raw["rope_theta"] = rope.pop("rope_theta")
    kind = rope.pop("rope_type")
    raw["rope_scaling"] = None if kind == "default" else {kind_key: kind, **rope}
    raw["torch_dtype"] = raw.pop("dtype")
    return raw


@pytest.mark.parametrize("kind_key", ["type", "rope_type"])
@pytest.mark.parametrize("family", [name for name in FAMILIES if name != "gemma4"])
def test_configs_of_transformers_4_and_5_are_equal(
    family_dir: FamilyDir, tmp_path: Path, family: str, kind_key: str
) -> None:
    raw = json.loads((family_dir(family) / "config.json").read_text())
    assert "rope_parameters" in raw and "rope_theta" not in raw
    (tmp_path / "config.json").write_text(json.dumps(as_written_by_transformers_4(raw, kind_key)))
    shutil.copy(family_dir(family) / "generation_config.json", tmp_path)
    assert load_config(tmp_path) == load_config(family_dir(family))


def test_keys_that_old_configs_lack_have_defaults(model_dir: Path) -> None:
    absent = dict.fromkeys(
        ("rope_parameters", "head_dim", "dtype", "num_key_value_heads", "attention_bias"), ...
    )
    edit_json(model_dir / "config.json", **absent)
    edit_tensors(
        model_dir,
        **{
            f"model__layers__{i}__self_attn__{p}_proj__weight": torch.ones(64, 64)
            for i in range(3)
            for p in "kv"
        },
    )
    config = load_config(model_dir)
    geometry = config.geometry
    assert (geometry.rope_theta, geometry.rope_scaling) == (10000.0, None)
    assert (geometry.head_dim, geometry.num_kv_heads) == (16, 4)
    assert (config.dtype, geometry.qkv_bias) == (None, False)
    assert Checkpoint(model_dir).dtype == "float32", "that of the weights"


def test_unused_sliding_window_does_not_limit_the_positions(
    family_dir: FamilyDir, tmp_path: Path
) -> None:
    shutil.copy(family_dir("qwen2") / "config.json", tmp_path)
    full = ["full_attention"] * 3
    sliding = ["full_attention", "full_attention", "sliding_attention"]
    for on, types, first, limit in (
        (False, ..., 0, 256),
        (True, ..., 2, 32),
        (True, ..., 3, 256),
        (True, sliding, 3, 32),
        (True, full, 0, 256),
    ):
        changes = {"use_sliding_window": on, "layer_types": types, "max_window_layers": first}
        edit_json(tmp_path / "config.json", sliding_window=32, **changes)
        assert load_config(tmp_path).max_positions == limit


@pytest.mark.parametrize(
    ("in_config", "in_generation_config", "expected"),
    [(2, ..., (2,)), (2, [2, 5], (2, 5)), ([3, 4], None, (3, 4)), (None, ..., ()), (2, 0, (0,))],
)
def test_eos_ids_of_the_generation_config_take_precedence(
    model_dir: Path, in_config: Any, in_generation_config: Any, expected: tuple[int, ...]
) -> None:
    edit_json(model_dir / "config.json", eos_token_id=in_config)
    edit_json(model_dir / "generation_config.json", eos_token_id=in_generation_config)
    assert load_config(model_dir).eos_token_ids == expected
    edit_json(model_dir / "generation_config.json", eos_token_id=[10**20])
    refused(lambda: load_config(model_dir), "generation_config.json", "eos_token_id", "token id")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, ("GPT2LMHeadModel", *SUPPORTED)),
        ({"architectures": ..., "model_type": ...}, ("not supported", *SUPPORTED)),
        (
            {"architectures": ["MistralForCausalLM"]},
            ("model_type is 'llama'", "MistralForCausalLM"),
        ),
        ({"architectures": 5}, ("architectures is 5", "list")),
        (
            {"rope_parameters": {"rope_type": "longrope", "factor": 4.0, "long_factor": []}},
            ("'short_factor'",),
        ),
        (
            {
                "rope_parameters": {
                    "rope_type": "longrope",
                    "short_factor": [1.0],
                    "long_factor": [],
                }
            },
            ("a list of 8 numbers",),
        ),
        (
            {"rope_parameters": {"full_attention": {"rope_type": "default"}}},
            ("kinds of layers", "full_attention"),
        ),
        ({"rope_parameters": "linear"}, ("rope_parameters is 'linear'", "object")),
        ({"rope_parameters": {"rope_type": "yarn"}}, ("'factor'",)),
        ({"rope_parameters": {"rope_type": "linear", "factor": "2"}}, ("factor is '2'", "number")),
        ({"rope_parameters": {"rope_type": "linear", "factor": 0}}, ("factor is 0", "above 0")),
        ({"rope_parameters": {"rope_theta": -1.0}}, ("rope_theta is -1", "above 0")),
        ({"rope_parameters": {"rope_theta": float("nan")}}, ("rope_theta is nan", "number")),
        (
            {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "beta_fast": -1}},
            ("beta_fast is -1", "above 0"),
        ),
        (
            {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "beta_slow": 1e-310}},
            ("beta_slow is 1e-310", "1e-6"),
        ),
        ({"rope_parameters": {"rope_type": "linear", "factor": 1e-300}}, ("factor is 1e-300",)),
        (
            {
                "rope_parameters": {
                    "rope_type": "llama3",
                    "factor": 4.0,
                    "low_freq_factor": 1,
                    "high_freq_factor": 1,
                }
            },
            ("below",),
        ),
        (
            {
                "original_max_position_embeddings": 10**400,
                "rope_parameters": {"rope_type": "yarn", "factor": 2.0},
            },
            ("original_max",),
        ),
        ({"max_position_embeddings": 10**30}, ("max_position_embeddings is 1000", "16777216")),
        ({"attention_chunk_size": 8}, ("attention_chunk_size",)),
        ({"text_config": {}}, ("text_config", "text model")),
        (
            {"layer_types": ["sliding_attention"] * 3},
            ("layer_types", "all layers have full attention"),
        ),
        ({"rms_norm_eps": float("nan")}, ("rms_norm_eps is nan",)),
        ({"rms_norm_eps": -1.0}, ("rms_norm_eps is -1.0", "at least 0")),
        ({"num_key_value_heads": 3}, ("3 key-value heads do not divide 4 heads",)),
        ({"head_dim": 15}, ("head_dim is 15", "even")),
        (
            {"head_dim": ..., "num_attention_heads": 3},
            ("does not divide hidden_size 64", "head_dim"),
        ),
        ({"vocab_size": 1}, ("vocab_size is 1", "between 2")),
        ({"intermediate_size": 0}, ("intermediate_size is 0", "at least 1")),
        ({"hidden_size": -64}, ("hidden_size is -64",)),
        ({"num_hidden_layers": 200000}, ("num_hidden_layers is 200000", "4096")),
        ({"num_hidden_layers": 10**400}, ("num_hidden_layers is 1000", "from 1 to")),
        ({"num_hidden_layers": True}, ("num_hidden_layers is True", "integer")),
        ({"bos_token_id": [1]}, ("bos_token_id is [1]", "integer")),
        ({"eos_token_id": "2"}, ("eos_token_id is '2'", "token id")),
        ({"eos_token_id": [2, True]}, ("eos_token_id", "token id")),
        ({"eos_token_id": [2, 10**20]}, ("eos_token_id", "token id")),
        ({"tie_word_embeddings": 1}, ("tie_word_embeddings is 1", "true or false")),
        ({"dtype": 16}, ("dtype is 16", "string")),
        ({"quantization_config": {"quant_method": "hqq"}}, ("quantization_config", "unquantized")),
        ({"quantization_config": {"quant_method": "gptq"}}, ("config.json", "'bits'")),
        ({"per_layer_config": {"0": {}}}, ("per_layer_config",)),
        (
            {"rope_parameters": ..., "rope_scaling": {"type": "ntk", "factor": 2.0}},
            ("'ntk'", "LlamaForCausalLM", "linear"),
        ),
        ({"rope_parameters": {"rope_type": "linear"}}, ("config.json", "'factor'")),
        ({"rope_parameters": ..., "partial_rotary_factor": 0.5}, ("partial rotary",)),
        ({"hidden_act": "gelu"}, ("'gelu'", "'silu'")),
        ({"hidden_act": ["silu"]}, ("activation ['silu']",)),
        ({"hidden_size": ...}, ("config.json", "'hidden_size'")),
        ({"num_hidden_layers": "many"}, ("config.json", "many")),
        ({"vocab_size": None}, ("config.json", "cannot be used")),
    ],
)
def test_unsupported_configs_are_refused(
    model_dir: Path, changes: dict[str, Any], words: tuple[str, ...]
) -> None:
    edit_json(model_dir / "config.json", **changes)
    refused(lambda: Checkpoint(model_dir), *words)


@pytest.mark.parametrize("model_type", ["olmo3", "gemma3_text"])
def test_a_truncate_that_transformers_overlooks_is_refused(tmp_path: Path, model_type: str) -> None:
    """transformers looks for this field next to the kinds of layers:
    ``config.rope_parameters.get("truncate", True)``."""
    default = {"rope_type": "default", "rope_theta": 1e4}
    full: dict[str, Any] = default | {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    for more, is_refused in (({}, False), ({"truncate": True}, False), ({"truncate": False}, True)):
        ropes = {"full_attention": full | more, "sliding_attention": default}
        (tmp_path / "config.json").write_text(
            json.dumps(GEOMETRY | {"model_type": model_type, "rope_parameters": ropes})
        )
        if is_refused:
            refused(lambda: load_config(tmp_path), "config.json", "truncate", "transformers")
        else:
            assert load_config(tmp_path).geometry.rope_scaling is not None


def test_a_switch_that_mistral_does_not_have_does_not_switch_the_window_off(
    family_dir: FamilyDir, tmp_path: Path
) -> None:
    shutil.copy(family_dir("mistral-window") / "config.json", tmp_path)
    edit_json(tmp_path / "config.json", use_sliding_window=False)
    assert load_config(tmp_path).max_positions == 32
    edit_json(tmp_path / "config.json", sliding_window=..., max_position_embeddings=8192)
    assert load_config(tmp_path).max_positions == 4096


def test_a_window_limits_a_llama_whose_cache_forgets_what_lies_before_it(model_dir: Path) -> None:
    """The Llama of transformers has no mask for the window, but its KV cache uses the window.
    ``generate`` and full attention therefore give different tokens."""
    edit_json(model_dir / "config.json", sliding_window=24)
    assert load_config(model_dir).max_positions == 24


def test_a_scaled_model_has_the_positions_that_the_scaling_is_for(model_dir: Path) -> None:
    """Model cards recommend adding the scaling, not changing the positions."""
    edit_json(
        model_dir / "config.json",
        rope_scaling={"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256},
    )
    assert load_config(model_dir).max_positions == 1024


def test_scalings_that_depend_on_the_length_limit_the_positions_to_those_where_they_do_not(
    model_dir: Path,
) -> None:
    """The frequencies of scalings that depend on the length change when a text grows, which would
    invalidate keys in the KV cache."""
    edit_json(model_dir / "config.json", rope_scaling={"type": "dynamic", "factor": 2.0})
    config = load_config(model_dir)
    assert (config.max_positions, config.geometry.rope_scaling) == (256, None)
    assert any(
        "dynamic has other frequencies for more than 256 tokens" in notice
        for notice in config.notices
    )
    factors = {
        "short_factor": [1.0] * 8,
        "long_factor": [4.0] * 8,
        "original_max_position_embeddings": 64,
    }
    edit_json(model_dir / "config.json", rope_scaling={"type": "longrope"} | factors)
    assert load_config(model_dir).max_positions == 64


def test_fields_and_tensors_that_are_ignored_are_reported(
    family_dir: FamilyDir, tmp_path: Path
) -> None:
    directory = shutil.copytree(family_dir("mistral"), tmp_path / "model")
    assert Checkpoint(directory).config.notices == ()
    edit_json(
        directory / "config.json",
        attention_bias=True,
        mlp_bias=False,
        residual_scale=0.5,
        use_cache=False,
    )
    edit_json(directory / "config.json", rope_scaling={"type": "linear", "factor": 2.0, "beta": 3})
    edit_tensors(directory, model__layers__0__mlp__up_proj__bias=torch.ones(96))
    notices = "\n".join(Checkpoint(directory).config.notices)
    for words in (
        "MistralForCausalLM has no attention_bias;",
        "'residual_scale'",
        "rope_parameters is ignored",
        "has no 'beta'",
    ):
        assert words in notices
    assert "has no tensors model.layers.0.mlp.up_proj.bias;" in notices
    assert "mlp_bias" not in notices and "use_cache" not in notices


@pytest.mark.parametrize("stored", ["equal", "different", "head-only"])
def test_a_stored_head_of_a_tied_config_is_used_as_transformers_does(
    family_dir: FamilyDir, tmp_path: Path, stored: str
) -> None:
    directory = shutil.copytree(family_dir("llama-tied"), tmp_path / "model")
    table = load_file(directory / WEIGHTS)["model.embed_tokens.weight"]
    head = table.flip(0).contiguous() if stored == "different" else table.clone()
    edit_tensors(
        directory,
        lm_head__weight=head,
        **{"model__embed_tokens__weight": None} if stored == "head-only" else {},
    )
    checkpoint = Checkpoint(directory)
    assert (
        checkpoint.geometry.tied_embeddings
        == checkpoint.config.geometry.tied_embeddings
        == (stored != "different")
    )
    assert torch.equal(as_torch(checkpoint.lm_head()), head) and checkpoint.fingerprint()


def test_a_single_file_wins_over_shards_as_in_transformers(
    sharded_dir: Path, model_dir: Path
) -> None:
    shutil.copy(model_dir / WEIGHTS, sharded_dir / WEIGHTS)
    shutil.copy(model_dir / "config.json", sharded_dir / "config.json")
    assert Checkpoint(sharded_dir).fingerprint() == Checkpoint(model_dir).fingerprint()


def test_a_shard_outside_of_the_directory_is_refused(sharded_dir: Path) -> None:
    edit_json(
        sharded_dir / "model.safetensors.index.json",
        weight_map={"lm_head.weight": "../secret.safetensors"},
    )
    refused(lambda: Checkpoint(sharded_dir), "outside of its directory")


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_weights_that_are_not_finite_are_refused(model_dir: Path, value: float) -> None:
    norm = torch.ones(64)
    norm[7] = value
    edit_tensors(model_dir, model__norm__weight=norm)
    refused(partial(load_decoder, Checkpoint(model_dir)), "model.norm.weight", "not finite")


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "",
        "[1]",
        '{"a": }',
        "[" * 100_000,
        '{"a": ' + "9" * 5000 + "}",
        '{"a":' * 70 + "1" + "}" * 70,
    ],
)
def test_invalid_json_is_refused(model_dir: Path, text: str) -> None:
    (model_dir / "config.json").write_text(text)
    refused(lambda: Checkpoint(model_dir), "config.json", "fetch")


def test_json_with_a_byte_order_mark_is_read(model_dir: Path) -> None:
    before = load_config(model_dir)
    text = (model_dir / "config.json").read_text()
    (model_dir / "config.json").write_bytes(b"\xef\xbb\xbf" + text.encode())
    assert load_config(model_dir) == before


def test_missing_files_are_refused(model_dir: Path, sharded_dir: Path) -> None:
    refused(lambda: Checkpoint(model_dir / "nowhere"), "nowhere", "not a directory")
    (model_dir / WEIGHTS).unlink()
    refused(lambda: Checkpoint(model_dir), str(model_dir), WEIGHTS, "only safetensors")
    (model_dir / "config.json").unlink()
    refused(lambda: Checkpoint(model_dir), "config.json is missing", "model directory")
    shard = sorted(sharded_dir.glob("*.safetensors"))[1]
    shard.unlink()
    refused(lambda: Checkpoint(sharded_dir), shard.name, "missing", "incomplete")


@pytest.mark.parametrize("weight_map", [..., {}, [1], "model.safetensors", {"lm_head.weight": 3}])
def test_damaged_shard_index_is_refused(sharded_dir: Path, weight_map: Any) -> None:
    edit_json(sharded_dir / INDEX, weight_map=weight_map)
    refused(lambda: Checkpoint(sharded_dir), str(sharded_dir), "fetch")


@pytest.mark.parametrize("first", [0, 1])
def test_the_index_decides_which_of_two_tensors_counts(sharded_dir: Path, first: int) -> None:
    """A shard may hold an outdated copy, before or after the right one."""
    index = json.loads((sharded_dir / INDEX).read_text())
    expected = load_decoder(Checkpoint(sharded_dir)).state_dict()
    shards = sorted(sharded_dir.glob("*.safetensors"))[:: -1 if first else 1]
    name, tensor = next(iter(load_file(shards[0]).items()))
    save_file(load_file(shards[-1]) | {name: torch.zeros_like(tensor)}, shards[-1])
    found = load_decoder(Checkpoint(sharded_dir)).state_dict()
    assert all(torch.equal(found[key], expected[key]) for key in expected)
    for other in (
        ...,
        sorted(set(index["weight_map"].values()) - {shards[0].name, shards[-1].name})[0],
    ):
        edit_json(
            sharded_dir / INDEX,
            weight_map={**index["weight_map"], name: other}
            if other is not ...
            else {key: shard for key, shard in index["weight_map"].items() if key != name},
        )
        refused(lambda: Checkpoint(sharded_dir), INDEX, name, "fetch")


@pytest.mark.parametrize("keep", [0, 5, 8, 200, -1, -5000], ids=lambda keep: f"[:{keep}]")
def test_truncated_weights_are_refused(model_dir: Path, keep: int) -> None:
    """The file is cut within the header's length, within the header (200) or within the data (-1
    and -5000)."""
    data = (model_dir / WEIGHTS).read_bytes()
    (model_dir / WEIGHTS).write_bytes(data[:keep])
    refused(lambda: Checkpoint(model_dir), WEIGHTS, "truncated", "fetch")


def test_file_that_shrinks_after_it_was_opened_is_refused(model_dir: Path) -> None:
    """Missing values must not become zeros."""
    checkpoint = Checkpoint(model_dir)
    data = (model_dir / WEIGHTS).read_bytes()
    (model_dir / WEIGHTS).write_bytes(data[:-1])
    refused(partial(load_decoder, checkpoint), WEIGHTS, "truncated")


def test_files_of_other_formats_are_refused(model_dir: Path) -> None:
    """The files are a git-lfs pointer, a web page, a header without JSON, and pickles of both
    kinds."""
    for content in (
        b"version https://git-lfs.github.com/spec/v1",
        b"<!DOCTYPE html><html>",
        b"\6\0\0\0\0\0\0\0\x80\4none",
    ):
        (model_dir / WEIGHTS).write_bytes(content)
        refused(
            lambda: Checkpoint(model_dir), WEIGHTS, "not a safetensors file", "only safetensors"
        )
    for zipped in (True, False):
        torch.save(
            {"lm_head.weight": torch.ones(97, 64)},
            model_dir / WEIGHTS,
            _use_new_zipfile_serialization=zipped,
        )
        refused(
            lambda: Checkpoint(model_dir), WEIGHTS, "not a safetensors file", "only safetensors"
        )


INVALID_HEADERS = {
    "list": [1, 2],
    "no-entry": {"lm_head.weight": 3},
    "no-offsets": {"lm_head.weight": {"dtype": "F32", "shape": [4]}},
    "no-shape": {"lm_head.weight": {"dtype": "F32", "shape": None, "data_offsets": [0, 16]}},
    "wrong-size": {"lm_head.weight": {"dtype": "F32", "shape": [4], "data_offsets": [0, 12]}},
    "negative": {"lm_head.weight": {"dtype": "F32", "shape": [4], "data_offsets": [-16, 0]}},
    "infinite": {
        "lm_head.weight": {"dtype": "F32", "shape": [4], "data_offsets": [0, float("inf")]}
    },
}


@pytest.mark.parametrize("header", INVALID_HEADERS.values(), ids=INVALID_HEADERS)
def test_invalid_header_is_refused(model_dir: Path, header: object) -> None:
    text = json.dumps(header).encode()
    (model_dir / WEIGHTS).write_bytes(len(text).to_bytes(8, "little") + text + bytes(64))
    refused(lambda: Checkpoint(model_dir), WEIGHTS, "damaged", "fetch")


def with_header(path: Path, encoding: str = "utf-8", more: bytes = b"", **changes: Any) -> None:
    """Write the file again with a changed header, and with ``more`` bytes after the data."""
    data = path.read_bytes()
    end = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:end])
    for name, change in changes.items():
        header[name] = header.get(name, {}) | change if isinstance(change, dict) else change
    text = json.dumps(header).encode(encoding)
    path.write_bytes(len(text).to_bytes(8, "little") + text + data[end:] + more)


@pytest.mark.parametrize(
    "damage",
    [
        {"b": {"data_offsets": [0, 400]}},
        {"b": {"data_offsets": [404, 804]}},
        {"b": {"data_offsets": [400.0, 800.0]}},
        {"b": {"shape": [10, 10.0]}},
        {"b": {"shape": [True, 100]}},
        {"more": b"\0"},
        {"encoding": "utf-16"},
        {"encoding": "utf-8-sig"},
        {"__metadata__": 5},
        {"\ud800": {"dtype": "F32", "shape": [0], "data_offsets": [800, 800]}},
    ],
    ids=str,
)
def test_files_that_the_safetensors_library_refuses_are_refused(
    tmp_path: Path, damage: dict[str, Any]
) -> None:
    save_file({"a": torch.ones(10, 10), "b": torch.zeros(10, 10)}, tmp_path / WEIGHTS)
    assert len(read_header(tmp_path / WEIGHTS)) == 2
    with_header(tmp_path / WEIGHTS, **damage)
    with pytest.raises(SafetensorError):
        load_file(tmp_path / WEIGHTS)
    refused(lambda: read_header(tmp_path / WEIGHTS), WEIGHTS, "fetch")


@settings(
    max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    edits=st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 255)), min_size=1, max_size=4)
)
def test_damaged_headers_never_crash(tmp_path: Path, edits: list[tuple[int, int]]) -> None:
    path = tmp_path / WEIGHTS
    save_file({"a": torch.ones(10, 10), "b": torch.ones(3)}, path)
    data = bytearray(path.read_bytes())
    for position, byte in edits:
        data[position % (len(data) - 412)] = byte
    path.write_bytes(data)
    try:
        for tensor in read_header(path).values():
            assert tensor.read().shape == tensor.shape
    except EESDError as error:
        assert WEIGHTS in str(error)


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.float8_e4m3fn, torch.int32])
def test_quantized_weights_are_refused(model_dir: Path, dtype: torch.dtype) -> None:
    edit_tensors(model_dir, model__layers__1__mlp__up_proj__weight=torch.zeros(96, 64).to(dtype))
    refused(
        lambda: Checkpoint(model_dir),
        "model.layers.1.mlp.up_proj.weight",
        "stored as",
        "BF16",
        "unquantized",
    )


def test_wrong_and_missing_tensors_are_refused(model_dir: Path) -> None:
    edit_tensors(model_dir, model__norm__weight=torch.ones(32))
    refused(lambda: Checkpoint(model_dir), "model.norm.weight", "[32]", "[64]", "config.json")
    edit_tensors(model_dir, model__norm__weight=None)
    refused(lambda: Checkpoint(model_dir), "no tensor model.norm.weight", "incomplete")


def test_unused_tensors_are_ignored(model_dir: Path) -> None:
    before = Checkpoint(model_dir).fingerprint()
    edit_tensors(
        model_dir,
        model__layers__0__self_attn__rotary_emb__inv_freq=torch.ones(8),
        position_ids=torch.arange(9),
    )
    assert Checkpoint(model_dir).fingerprint() == before


@pytest.mark.parametrize(
    "dtype",
    [torch.float16, torch.bfloat16, torch.float32, torch.float64],
    ids=lambda dtype: str(dtype),
)
def test_every_float_type_is_read(model_dir: Path, dtype: torch.dtype) -> None:
    value = torch.linspace(-3, 3, 64, dtype=torch.float64).to(dtype)
    edit_tensors(model_dir, model__norm__weight=value)
    decoder: Any = load_decoder(Checkpoint(model_dir))
    assert torch.equal(decoder.model.norm.weight, value.float())
    assert not any(parameter.requires_grad for parameter in decoder.parameters())


def test_fingerprint_is_the_same_for_shards_and_one_file(sharded_dir: Path, tmp_path: Path) -> None:
    assert len(list(sharded_dir.glob("*.safetensors"))) > 2
    AutoModelForCausalLM.from_pretrained(sharded_dir).save_pretrained(tmp_path / "whole")
    assert [path.name for path in (tmp_path / "whole").glob("*.safetensors")] == [WEIGHTS]
    assert Checkpoint(tmp_path / "whole").fingerprint() == Checkpoint(sharded_dir).fingerprint()


def test_fingerprint_depends_on_the_weights_and_their_type(model_dir: Path, tmp_path: Path) -> None:
    before = Checkpoint(model_dir).fingerprint()
    assert Checkpoint(build(FAMILIES["llama-linear"], tmp_path / "same")).fingerprint() == before
    norm = load_file(model_dir / WEIGHTS)["model.norm.weight"]
    norm[-1] += 1
    seen = {before}
    # All bytes are equal zeros.
    for values in (
        norm,
        torch.zeros(64, dtype=torch.float16),
        torch.zeros(64, dtype=torch.bfloat16),
    ):
        edit_tensors(model_dir, model__norm__weight=values)
        seen.add(Checkpoint(model_dir).fingerprint())
    assert len(seen) == 4
