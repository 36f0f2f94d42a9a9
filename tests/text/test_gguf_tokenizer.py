"""Tests that the tokenizer of a GGUF file gives the token ids of llama.cpp. Other tokenizers are
refused, and the error gives the reason.

The expected hashes are hashes of llama.cpp's token ids. ``lab/gguf_tokenizers`` wrote them, and
compares many more texts.
"""

import json
from pathlib import Path
from typing import Any

import pytest
from support import gguf_files
from support.command import assert_refused, export_engine, run
from support.gguf_files import MERGES, TOKENIZERS, VOCABULARY, Spec, digest, write_metadata

from eesd.common.errors import EESDError
from eesd.export.cli import main as export_main
from eesd.model.gguf_file import read_gguf
from eesd.model.gguf_pre_tokenizers import PRE_TOKENIZERS
from eesd.model.gguf_tokenizer import gguf_tokenizer
from eesd.model.tokenizer_files import resolved_tokenizer
from eesd.runtime.text import TextCodec

EXPECTED = json.loads(TOKENIZERS.read_text("utf-8"))
PRE = "tokenizer.ggml.pre"


@pytest.mark.parametrize(
    "case", EXPECTED["cases"], ids=lambda case: f"{case['kind']}-{case['flags'][0]}"
)
def test_token_ids_are_those_of_llama_cpp(tmp_path: Path, case: dict[str, Any]) -> None:
    for flags in case["flags"]:
        path = write_metadata(
            tmp_path / "model.gguf", EXPECTED["vocabularies"][case["kind"]] | flags
        )
        tokenizer, _ = gguf_tokenizer(read_gguf(path))
        found = [tokenizer.encode(text) for text in EXPECTED["texts"]]
        right = [
            digest(one.ids) == expected
            for one, expected in zip(found, case["ids"].split(), strict=True)
        ]
        wrong = [
            text for text, is_right in zip(EXPECTED["texts"], right, strict=True) if not is_right
        ]
        assert not wrong, flags
        for text in (
            EXPECTED["texts"] if case["kind"] == "gpt2" and "general.name" not in flags else ()
        ):
            assert (
                tokenizer.decode(
                    tokenizer.encode(text, add_special_tokens=False).ids, skip_special_tokens=False
                )
                == text
            )


def test_every_rule_is_compared() -> None:
    compared = {
        flags.get("pre")
        for case in EXPECTED["cases"]
        for flags in case["flags"]
        if case["kind"] == "gpt2"
    }
    assert compared == PRE_TOKENIZERS.keys() and len(EXPECTED["cases"]) > 20, (
        "rules with the same ids stand together"
    )


def test_digits_and_empty_lines_of_an_export(tmp_path: Path) -> None:
    """transformers does not have the rule ``smollm``, and silently uses another rule."""
    tokens = [*VOCABULARY[:-1], "ĊĊ"]
    merges = [*MERGES[:-1], "Ċ Ċ"]
    metadata = {PRE: "smollm", "tokenizer.ggml.tokens": tokens, "tokenizer.ggml.merges": merges}
    directory = export_engine(
        gguf_files.write(tmp_path / "model.gguf", Spec(metadata=metadata)), tmp_path / "plans"
    )
    codec = TextCodec(directory)
    assert codec.encode("x\n\n1") == [tokens.index(one) for one in ("x", "ĊĊ", "1")]
    assert codec.decode(codec.encode("x\n\n1")) == "x\n\n1"


def test_special_tokens_are_those_of_the_file(tmp_path: Path) -> None:
    path = write_metadata(
        tmp_path / "model.gguf",
        EXPECTED["vocabularies"]["llama"] | {"tokenizer.chat_template": "{{ bos_token }}x"},
    )
    files = resolved_tokenizer(path)
    expected = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    assert json.loads(files["tokenizer_config.json"]).items() >= expected.items()
    assert files["chat_template.jinja"] == b"{{ bos_token }}x"
    (tmp_path / "tokenizer.json").write_bytes(files["tokenizer.json"])
    codec = TextCodec(tmp_path)
    for text in ("the x", " the", "naïve 日本 🙂", "a  b\n"):
        assert codec.decode(codec.encode(text)) == text


def test_messages_with_tools_get_the_template_for_them(tmp_path: Path) -> None:
    """Converters write named templates besides the default."""
    key = "tokenizer.chat_template"
    templates = {
        key: "plain{{ messages[0].content }}",
        f"{key}s": ["tool_use", "rag"],
        f"{key}.tool_use": "{{ tools[0].function.name }}{{ messages[0].content }}",
        f"{key}.rag": "documents",
    }
    model = gguf_files.write(tmp_path / "model.gguf", Spec(metadata=templates))
    codec = TextCodec(export_engine(model, tmp_path / "plans"))
    messages = [{"role": "user", "content": "the"}]
    tools = [{"type": "function", "function": {"name": "look", "parameters": {}}}]
    assert codec.render(messages) == "plainthe"
    assert codec.render(messages, tools) == "lookthe"


def with_ties(pieces: list[str], kind: int = 1, score: float = -1e9) -> dict[str, Any]:
    """A SentencePiece vocabulary whose pieces have equal scores."""
    tokens = ["<unk>", "<s>", "</s>", "\u2581", "a", "b", "c", *pieces]
    metadata = {
        "model": "llama",
        "tokens": tokens,
        "bos_token_id": 1,
        "add_bos_token": False,
        "scores": [*map(float, range(-7, 0)), *[score] * len(pieces)],
    }
    return metadata | {
        "token_type": [2, 3, 3, 1, 1, 1, 1, *[kind] * len(pieces)],
        "add_space_prefix": False,
    }


@pytest.mark.parametrize(
    ("metadata", "text", "ids"),
    [
        # These pieces are runs of spaces. They have the scores and the order of Llama 2 and
        # Mistral.
        (
            with_ties(["\u2581" * count for count in (2, 4, 8, 3, 5, 6, 7)]),
            "a" + 9 * " ",
            [4, 9, 3],
        ),
        (with_ties(["\u2581" * count for count in (2, 4, 8, 3, 5, 6, 7)]), 13 * " ", [9, 11]),
        (with_ties(["\u2581\u2581", "ab"]), "cab  ", [6, 8, 7]),
        (with_ties(["ab", "bc"], kind=4), "abc", [7, 6]),
        (with_ties(["abcab", "bcabc"]), "abcabc", [4, 5, 6, 4, 5, 6]),
    ],
)
def test_equal_scores_that_cannot_matter_are_read(
    tmp_path: Path, metadata: dict[str, Any], text: str, ids: list[int]
) -> None:
    """The token ids equal the token ids of llama.cpp."""
    tokenizer, _ = gguf_tokenizer(read_gguf(write_metadata(tmp_path / "model.gguf", metadata)))
    assert tokenizer.encode(text).ids == ids


@pytest.mark.parametrize(
    "metadata",
    [
        with_ties(["bc", "ab"]),
        with_ties(["ab", "bc"]),
        with_ties(["ab", "ca"], score=0.0),
        with_ties(["\u2581" * count for count in (2, 3)]),
        with_ties(["cc", "ab", "abc"]) | {"scores": [0.0] * 7 + [-9.0, -9.0, -8.0]},
    ],
)
def test_equal_scores_that_llama_cpp_reads_from_the_left_are_refused(
    tmp_path: Path, metadata: dict[str, Any]
) -> None:
    """If two pieces have equal scores, the tokenizers library always merges the same piece first,
    wherever the pieces are in the text."""
    with pytest.raises(EESDError, match=r"scores that do not say which .* convert the model"):
        gguf_tokenizer(read_gguf(write_metadata(tmp_path / "model.gguf", metadata)))


@pytest.mark.parametrize(
    ("kind", "damage", "words"),
    [
        ("gpt2", {"pre": "unheard-of"}, ("'unheard-of'", "known rule", "gguf-new-metadata")),
        ("gpt2", {"pre": "gemma4"}, ("'gemma4'",)),
        ("gpt2", {"pre": 5}, ("pre is 5", "string")),
        ("gpt2", {"pre": None}, ("pre is None", "gguf-new-metadata")),
        ("gpt2", {"model": "bert"}, ("'bert'", "gpt2, llama and gemma4")),
        ("gpt2", {"merges": ["a d"]}, ("'a d'", "tokens to a token")),
        ("gpt2", {"merges": ["ab"]}, ("'ab'", "tokens to a token")),
        ("gpt2", {"merges": 3}, ("merges", "list of str")),
        ("gpt2", {"tokens": ["a", "b", "a"]}, ("'a'", "twice")),
        ("gpt2", {"token_type": [1]}, ("1 types",)),
        ("gpt2", {"bos_token_id": 10**6}, ("bos_token_id is 1000000", "from 0")),
        ("llama", {"scores": [0.5]}, ("1 scores",)),
        ("llama", {"unknown_token_id": 10**6}, ("unknown_token_id",)),
        ("gpt2", {"merges": None}, ("'tokenizer.ggml.merges'",)),
        ("llama", {"scores": None}, ("'tokenizer.ggml.scores'",)),
        ("gpt2", {"pre": "llama-bpe", "bos_token_id": None}, ("bos token", "not name")),
        ("llama", {"tokenizer.chat_template": 5}, ("chat_template", "not text")),
        ("llama", {"tokenizer.chat_template.tool_use": 5}, ("chat_template.tool_use", "not text")),
    ],
)
def test_unknown_and_damaged_tokenizers_are_refused(
    tmp_path: Path, kind: str, damage: dict[str, Any], words: tuple[str, ...]
) -> None:
    metadata: dict[str, Any] = {
        "model": kind,
        "pre": "qwen2",
        "bos_token_id": 0,
        "tokens": ["a", "b", "c", "ab"],
        "merges": ["a b"],
        "scores": [0.5, 0.25, 0.0, 1.0],
    }
    path = write_metadata(tmp_path / "model.gguf", metadata)
    assert "tokenizer.json" in resolved_tokenizer(path)
    write_metadata(
        path, {name: value for name, value in (metadata | damage).items() if value is not None}
    )
    with pytest.raises(EESDError) as caught:
        resolved_tokenizer(path)
    message = str(caught.value)
    assert (
        "model.gguf" in message and "\n" not in message and all(word in message for word in words)
    ), message


def test_an_export_with_an_unknown_rule_is_refused_before_the_work(tmp_path: Path) -> None:
    model = gguf_files.write(tmp_path / "model.gguf", Spec(metadata={PRE: "unheard-of"}))
    result = run(export_main, "--model", model, "--exit-layer", 1, "-o", tmp_path / "plans")
    assert_refused(result, "'unheard-of'", "known rule")
    assert not (tmp_path / "plans").exists()
