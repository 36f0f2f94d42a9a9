"""Tests that the tokenizer of an engine directory gives the token ids of transformers, however
transformers interprets the model's files."""

import json
import os
import random
import sys
from base64 import b64encode
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from support import tiny_models
from support.command import assert_refused, run
from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)
from transformers import AutoTokenizer
from transformers.models.auto import tokenization_auto as registered

from eesd.common.errors import EESDError
from eesd.export.cli import main as export_main
from eesd.model import tokenizer_files
from eesd.model.families import FAMILIES
from eesd.model.text_part import WHOLES
from eesd.model.tokenizer_files import resolved_tokenizer
from eesd.runtime.text import TextCodec

CLASSES = [
    *(
        None,
        "LlamaTokenizer",
        "LlamaTokenizerFast",
        "CodeLlamaTokenizer",
        "Qwen2Tokenizer",
        "Qwen2TokenizerFast",
    ),
    *("GPT2Tokenizer", "PreTrainedTokenizerFast", "TokenizersBackend"),
]
OPTIONS: list[dict[str, Any]] = [
    {},
    {"add_bos_token": True},
    {"add_bos_token": False},
    {"add_bos_token": True, "add_eos_token": True},
    {"legacy": True},
    {"legacy": False},
    {"add_prefix_space": False},
    {"split_special_tokens": True},
    {"pad_token": "<pad>"},
]
TEXTS = [
    *("", " ", "  two", "the quick fox", " the", "x ", "a\nb\n\nc", "\t tab", "the\u00a0x"),
    *("12345 67", "It's we'll", "naïve 日本語 🙂"),
    *(
        "e\u0301 ﬁ",
        "the </s> end",
        "<s>the",
        "</s>  x",
        "The<|im_start|>x<|end|> y",
        "<unk>",
        "▁x",
        "<0x41>",
        "<pad>x",
    ),
]
TEMPLATE = (
    "{% for m in messages %}{{ bos_token }}[{{ m.role }}] {{ m.content }}{{ eos_token }}{{ "
    "pad_token }}{% endfor %}"
)
MESSAGES = [{"role": "user", "content": "the x"}]


def byte_level(begin: bool) -> Tokenizer:
    """Returns a tokenizer like those of Llama 3 and Qwen."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<s>", "</s>", "<|im_start|>", "<|end|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=330, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    with pytest.MonkeyPatch.context() as patch:  # a busy machine may refuse a thread pool
        patch.setenv("TOKENIZERS_PARALLELISM", "false")
        tokenizer.train_from_iterator(
            ["the quick fox", "naïve 日本語", "It's we'll 123"] * 3, trainer
        )
    if begin:
        tokenizer.post_processor = processors.TemplateProcessing(
            "<s> $A", special_tokens=[("<s>", 0)]
        )
    return tokenizer


def sentencepiece(begin: bool) -> Tokenizer:
    """Returns a tokenizer like that of Llama 2."""
    letters = [*"▁abcdefghijklmnopqrstuvwxyzTé日.:", "▁t", "th", "▁th", "he", "▁the"]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *letters]
    merges = [("▁", "t"), ("t", "h"), ("▁t", "h"), ("h", "e"), ("▁th", "e")]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(
        models.BPE(vocabulary, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    )
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    steps = [
        decoders.Replace("▁", " "),
        decoders.ByteFallback(),
        decoders.Fuse(),
        decoders.Strip(" ", 1, 0),
    ]
    tokenizer.decoder = decoders.Sequence(steps)
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    if begin:
        tokenizer.post_processor = processors.TemplateProcessing(
            "<s> $A", special_tokens=[("<s>", 1)]
        )
    return tokenizer


BACKENDS = {
    "byte level": byte_level(False),
    "byte level, <s>": byte_level(True),
    "sentencepiece": sentencepiece(False),
    "sentencepiece, <s>": sentencepiece(True),
}


def write_model(
    directory: Path, backend: Tokenizer, config: Any, model_type: str | None = "llama"
) -> Path:
    directory.mkdir(exist_ok=True)
    backend.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    if model_type is not None:
        (directory / "config.json").write_text(json.dumps({"model_type": model_type}))
    return directory


def resolved(model: Path, output: Path) -> TextCodec:
    output.mkdir(exist_ok=True)
    for name, content in resolved_tokenizer(model).items():
        (output / name).write_bytes(content)
    return TextCodec(output)


def attempt(action: Any) -> Any:
    """Returns the result of an action, or None if it refuses. Some tokenizers refuse text that
    their vocabulary cannot express."""
    try:
        return action()
    except Exception:
        return None


def assert_same(reference: Any, codec: TextCodec) -> None:
    """Check that the two tokenizers give the same ids for texts and messages, and the same text for
    ids. It is also correct if both refuse the input."""
    for text in TEXTS:
        expected = attempt(lambda text=text: reference(text)["input_ids"])
        assert attempt(lambda text=text: codec.encode(text)) == expected, text
        if expected is not None:
            assert codec.decode(expected) == reference.decode(expected, skip_special_tokens=True), (
                text
            )
    prompt = attempt(
        lambda: reference.apply_chat_template(MESSAGES, add_generation_prompt=True)["input_ids"]
    )
    assert attempt(lambda: codec.encode(MESSAGES)) == prompt


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", CLASSES)
def test_token_ids_are_those_of_transformers(
    tmp_path: Path, name: str | None, backend: str
) -> None:
    for model_type in ("llama", "mistral", "qwen2", "qwen3", None):
        for options in OPTIONS if model_type in ("llama", "qwen2") else OPTIONS[:2]:
            config = {"bos_token": "<s>", "eos_token": "</s>", "chat_template": TEMPLATE, **options}
            config |= {"tokenizer_class": name} if name else {}
            model = write_model(tmp_path / "model", BACKENDS[backend], config, model_type)
            assert_same(
                AutoTokenizer.from_pretrained(model, local_files_only=True),
                resolved(model, tmp_path / "engine"),
            )
            (model / "config.json").unlink(missing_ok=True)


def with_gaps(backend: Tokenizer) -> Tokenizer:
    """The tokenizer has more added tokens with flags, and one of them is not special. It also has
    truncation and padding."""
    found = Tokenizer.from_str(backend.to_str())
    found.add_tokens([AddedToken("<|odd|>", lstrip=True), AddedToken("<|code|>", normalized=False)])
    found.add_special_tokens([AddedToken("<|eot|>", rstrip=True, single_word=True)])
    found.enable_truncation(4)
    found.enable_padding(pad_token="<|filler|>")
    return found


def random_config(chance: random.Random) -> dict[str, Any]:
    """Returns a ``tokenizer_config.json`` with a few fields. Most of these fields have values that
    occur in published files."""
    names = ["<s>", "</s>", "<unk>", "<|end|>", "<|new|>", "<|odd|>", "<|code|>", "the"]

    def token() -> Any:
        name = chance.choice(names)
        full = {"__type": "AddedToken", "content": name, "lstrip": chance.random() < 0.3}
        return chance.choice([name, name, name, None, full])

    def decoder() -> dict[str, Any]:
        return {
            str(chance.randrange(400)): {
                "content": name,
                **{flag: chance.random() < 0.3 for flag in tokenizer_files._FLAGS},
            }
            for name in chance.sample(names, 5)
        }

    choices: dict[str, Any] = {
        **{f"{name}_token": token for name in ("bos", "eos", "unk", "pad", "image", "mask")},
        "added_tokens_decoder": decoder,
        "additional_special_tokens": lambda: chance.sample(names, 2),
        "extra_special_tokens": lambda: chance.choice(
            [[], {}, {"boi_token": "<|boi|>"}, ["<|x|>"]]
        ),
        "add_bos_token": lambda: chance.random() < 0.5,
        "add_prefix_space": lambda: chance.choice([True, False, None]),
        "legacy": lambda: chance.choice([True, False, None]),
        "split_special_tokens": lambda: chance.random() < 0.5,
        "chat_template": lambda: chance.choice(
            [
                *(TEMPLATE, None, {"default": "x"}),
                [{"name": "default", "template": "x"}, {"name": "tool_use", "template": "y"}],
            ]
        ),
        "clean_up_tokenization_spaces": lambda: True,
        "model_max_length": lambda: 1000000000000000019884624838656,
        "of_another_time": lambda: 1,
    }
    weights = [1 if name == "of_another_time" else 8 for name in choices]
    used = chance.choices([*choices], weights, k=chance.randrange(9))
    return {name: choices[name]() for name in dict.fromkeys(used)}


def write_other_files(model: Path, chance: random.Random) -> None:
    """Files that override other files."""
    if chance.random() < 0.3:
        mapped = {"eos_token": "<|end|>", "pad_token": {"content": "<|p|>", "lstrip": True}}
        mapped |= {"additional_special_tokens": ["<|map|>"]} if chance.random() < 0.5 else {}
        (model / "special_tokens_map.json").write_text(json.dumps(mapped))
    if chance.random() < 0.2:
        (model / "chat_template.jinja").write_bytes(b"\xef\xbb\xbfa\r\nb")
    if chance.random() < 0.2:
        (model / "additional_chat_templates").mkdir()
        (model / "additional_chat_templates" / "tool_use.jinja").write_text("tools")


def test_the_rules_write_the_files_of_transformers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The test makes random directories of every family. Either transformers loads the directory,
    or all files have the same bytes."""
    backends = [*BACKENDS.values(), *map(with_gaps, BACKENDS.values())]
    found = Counter[str]()
    unknown = Mock(side_effect=tokenizer_files._ForTransformers)
    for case in range(int(os.environ.get("TOKENIZER_CASES", "300"))):
        chance = random.Random(case)
        config = random_config(chance)
        name = chance.choice([*CLASSES, "GemmaTokenizerFast"])
        config |= {"tokenizer_class": name} if name else {}
        kind = chance.choice([*tokenizer_files.CLASS_OF_TYPE])
        model = write_model(tmp_path / str(case), chance.choice(backends), config, kind)
        write_other_files(model, chance)
        ruled = attempt(partial(tokenizer_files._by_rules, model))
        found[tokenizer_files._class(model, config) if ruled else "transformers"] += 1
        files = attempt(partial(resolved_tokenizer, model))
        with monkeypatch.context() as patch:
            patch.setattr(tokenizer_files, "_by_rules", unknown)
            assert attempt(partial(resolved_tokenizer, model)) == files, (case, kind, config)
    assert found.keys() == {*tokenizer_files._BACKENDS, "TokenizersBackend", "transformers"}
    assert found["transformers"] < 0.4 * found.total(), found


def test_the_classes_of_model_types_are_those_of_transformers() -> None:
    assert {
        kind: registered.TOKENIZER_MAPPING_NAMES.get(kind) for kind in {*FAMILIES, *WHOLES}
    } == tokenizer_files.CLASS_OF_TYPE
    assert {
        *tokenizer_files.OVERRULED,
        *("phi3", "ernie4_5", "internlm3", "iquestcoder", "nemotron"),
        *("ernie4_5_moe", "minicpm3", "minimax_m2", "phimoe"),
    } == registered.MODELS_WITH_INCORRECT_HUB_TOKENIZER_CLASS & {*FAMILIES, *WHOLES}


def test_without_transformers_its_tokenizers_are_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = write_model(
        tmp_path / "model", BACKENDS["sentencepiece"], {"tokenizer_class": "CodeLlamaTokenizer"}
    )
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(EESDError, match=r"class CodeLlamaTokenizer.*pip install transformers"):
        resolved_tokenizer(model)
    write_model(model, BACKENDS["sentencepiece"], {"tokenizer_class": "LlamaTokenizer"})
    assert "tokenizer.json" in resolved_tokenizer(model)


def test_transformers_reads_the_same_from_the_engine_directory(tmp_path: Path) -> None:
    config = {
        "tokenizer_class": "LlamaTokenizer",
        "chat_template": TEMPLATE,
        "split_special_tokens": False,
    }
    model = write_model(tmp_path / "model", BACKENDS["sentencepiece"], config)
    codec = resolved(model, tmp_path / "engine")
    assert_same(AutoTokenizer.from_pretrained(tmp_path / "engine"), codec)
    # The class adds these tokens; the configuration has none.
    assert codec.render(MESSAGES) == "<s>[user] the x</s>"


def test_files_that_overrule_others(tmp_path: Path) -> None:
    """There are templates in separate files, special tokens in a map, and truncation and padding
    that apply only on request."""
    backend = byte_level(True)
    backend.enable_truncation(4)
    backend.enable_padding(length=50)
    model = write_model(
        tmp_path / "model",
        backend,
        {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": "old"},
    )
    (model / "special_tokens_map.json").write_text(
        json.dumps({"bos_token": {"content": "<s>"}, "eos_token": "</s>"})
    )
    (model / "chat_template.jinja").write_text(TEMPLATE)
    (model / "additional_chat_templates").mkdir()
    (model / "additional_chat_templates" / "tool_use.jinja").write_text("tools")
    codec = resolved(model, tmp_path / "engine")
    assert_same(AutoTokenizer.from_pretrained(model, local_files_only=True), codec)
    assert len(codec.encode("the quick fox jumps")) > 4
    assert codec.render(MESSAGES).startswith("<s>[user]")
    assert codec.render(MESSAGES, []) == "tools"


def tekken(model: Path, **changes: Any) -> Path:
    """A model directory with a ``tekken.json`` as its tokenizer."""
    model.mkdir()
    parts = [bytes([byte]) for byte in range(256)]
    parts += [b"th", b"the", b" the", b"he", b" t", "日".encode(), b"dropped"]
    names = ["<unk>", "<s>", "</s>", "[INST]", "[/INST]"]
    fields = {
        "config": {
            "pattern": r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\s+",
            "default_vocab_size": len(parts) - 1 + 8,
            "default_num_special_tokens": 8,
        },
        "vocab": [
            {"rank": rank, "token_bytes": b64encode(part).decode(), "token_str": None}
            for rank, part in enumerate(parts)
        ],
        "special_tokens": [{"rank": at, "token_str": name} for at, name in enumerate(names)],
    }
    (model / "tekken.json").write_text(json.dumps(fields | changes))
    (model / "config.json").write_text('{"model_type": "mistral"}')
    return model


def test_the_tokenizer_of_mistrals_own_format(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tekken(tmp_path / "model")
    (model / "chat_template.jinja").write_text(TEMPLATE)
    reference = AutoTokenizer.from_pretrained(model)
    monkeypatch.setitem(sys.modules, "transformers", None)
    codec = resolved(model, tmp_path / "output")
    assert_same(reference, codec)
    assert codec.encode("[INST] the he日") == reference.encode("[INST] the he日")
    assert len(codec.tokenizer.get_vocab()) == len(reference.get_vocab()) == 8 + 262


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"special_tokens": None}, ("cannot be used", "tekken.json")),
        ({"vocab": [{"rank": 0}]}, ("cannot be used",)),
        ({"config": {"pattern": "("}}, ("cannot be used",)),
    ],
)
def test_a_damaged_tokenizer_of_mistrals_own_format_is_refused(
    tmp_path: Path, changes: dict[str, Any], words: tuple[str, ...]
) -> None:
    with pytest.raises(EESDError) as caught:
        resolved_tokenizer(tekken(tmp_path / "model", **changes))
    assert all(word in str(caught.value) for word in words)


def test_a_tekken_file_without_special_tokens_is_refused(tmp_path: Path) -> None:
    """The file does not have the names of the special tokens."""
    file = tekken(tmp_path / "model") / "tekken.json"
    fields = json.loads(file.read_text())
    del fields["special_tokens"]
    file.write_text(json.dumps(fields))
    with pytest.raises(EESDError, match=r"tekken\.json does not list .* add the .*tokenizer\.json"):
        resolved_tokenizer(file.parent)


def test_a_model_without_tokenizer_has_no_files(tmp_path: Path) -> None:
    assert resolved_tokenizer(tmp_path) == {}


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("tokenizer.json", "{}"),
        ("tokenizer.json", "["),
        ("tokenizer_config.json", "[]"),
        ("tokenizer_config.json", "{"),
        ("tokenizer_config.json", '{"bos_token": 5}'),
        ("tokenizer_config.json", '{"chat_template": 5}'),
        ("tokenizer_config.json", '{"chat_template": {"default": 5}}'),
        ("tokenizer_config.json", '{"chat_template": [{"name": "default"}]}'),
        (
            "tokenizer_config.json",
            '{"auto_map": {"AutoTokenizer": ["own.Slow", "own.Fast"]}, "tokenizer_class": "Own"}',
        ),
        ("chat_template.jinja", b"\xff"),
    ],
)
def test_a_tokenizer_that_cannot_be_loaded_is_refused(
    tmp_path: Path, name: str, content: str | bytes
) -> None:
    model = write_model(
        tmp_path / "model", BACKENDS["byte level"], {"tokenizer_class": "TokenizersBackend"}
    )
    (model / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(EESDError, match="correct its files"):
        resolved_tokenizer(model)


def test_an_export_with_such_a_tokenizer_leaves_nothing_behind(tmp_path: Path) -> None:
    model = tiny_models.build(tmp_path / "model", 97, layers=3, damping=0.3, seed=0)
    (model / "tokenizer.json").write_text("{")
    result = run(export_main, "--model", model, "--exit-layer", 1, "-o", tmp_path / "plans")
    assert_refused(result, "tokenizer.json", "correct its files")
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
