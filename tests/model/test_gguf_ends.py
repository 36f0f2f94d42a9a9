"""A text of a GGUF file ends where llama.cpp ends it, and tokens that the file calls text remain
text.

The table holds the special tokens of published families, and the tokens at which llama.cpp ends a
text: ``llama_vocab_is_eog`` of xllamacpp 2026.10.11549 for files with these vocabularies.
"""

import json
from pathlib import Path
from typing import Any

import pytest
from support import gguf_files
from support.command import export_engine, succeed
from support.gguf_files import SPECIAL, VOCABULARY, Spec, write_metadata

import eesd
from eesd.common.manifest import load_manifest
from eesd.export.inspect import main as inspect_main
from eesd.model.fields import Fields
from eesd.model.gguf_file import read_gguf
from eesd.model.gguf_special import end_tokens
from eesd.model.gguf_tokenizer import gguf_tokenizer
from eesd.runtime.text import TextCodec, TextStream
from eesd.serve.grammar.fill_in import ends_between

TABLE = json.loads((Path(__file__).parent.parent / "data" / "gguf_ends.json").read_text("utf-8"))
KINDS = {"normal": 1, "control": 3, "user": 4}
MORE = {"\u2581<EOT>", "<|end_of_turn|>"}
"""Ends in this table that llama.cpp does not find by name."""
TEMPLATE = "tokenizer.chat_template"


def vocabulary(family: dict[str, Any], **more: Any) -> dict[str, Any]:
    """The metadata of a small file with a family's special tokens."""
    types = {token: kind for name, kind in KINDS.items() for token in family.get(name, ())}
    types = {"<unk>": 2, "a": 1, "aa": 1} | types
    tokens = list(types)
    given = {"eos_token_id": family["eos"]} | family.get("given", {})
    return {
        "model": family["model"],
        "tokens": tokens,
        "token_type": list(types.values()),
        "bos_token_id": 1,
        **{key: tokens.index(token) for key, token in given.items()},
        **more,
    }


def ends_of(path: Path, metadata: dict[str, Any]) -> set[str]:
    file = read_gguf(write_metadata(path / "model.gguf", metadata))
    return {metadata["tokens"][token] for token in end_tokens(Fields(file.metadata))}


@pytest.mark.parametrize("family", TABLE, ids=lambda family: family["name"])
def test_texts_end_where_llama_cpp_ends_them(tmp_path: Path, family: dict[str, Any]) -> None:
    control = family["control"]
    given = {family["eos"], *family.get("given", {}).values()}
    right = {token for token in family["llama_cpp"] if token in control or token in given}
    assert ends_of(tmp_path, vocabulary(family)) == right | MORE.intersection(control)


def test_the_end_of_a_turn_that_the_template_writes_counts_whatever_its_type(
    tmp_path: Path,
) -> None:
    """As in files of Gemma 2 from before the converter wrote this type."""
    [family] = [one for one in TABLE if one["name"] == "Gemma 2, first files"]
    template = "{% for m in messages %}<start_of_turn>{{ m.content }}<end_of_turn>\n{% endfor %}"
    assert "<end_of_turn>" not in ends_of(tmp_path, vocabulary(family))
    metadata = vocabulary(family, scores=[0.0] * 20, **{TEMPLATE: template})
    assert ends_of(tmp_path, metadata) == {"<eos>", "<end_of_turn>"}
    tokenizer, _ = gguf_tokenizer(read_gguf(tmp_path / "model.gguf"))
    ids = tokenizer.encode("</s><end_of_turn>", add_special_tokens=False).ids
    assert tokenizer.decode(ids) == "</s>"


@pytest.mark.parametrize("kind", [1, 4])
@pytest.mark.parametrize("name", ["</s>", "<|im_end|>", "<fim_prefix>", "[EOS]"])
def test_a_token_that_the_file_calls_text_is_text(tmp_path: Path, kind: int, name: str) -> None:
    tokens = ["<|x|>", *VOCABULARY[len(SPECIAL) :], name]
    types = [3, *[1] * (len(tokens) - 2), kind]
    metadata = {"tokens": tokens, "token_type": types, "model": "gpt2", "pre": "qwen2"}
    metadata |= {"merges": gguf_files.MERGES, "eos_token_id": 0, "bos_token_id": 0}
    path = write_metadata(tmp_path / "model.gguf", metadata)
    assert end_tokens(Fields(read_gguf(path).metadata)) == [0]
    tokenizer, _ = gguf_tokenizer(read_gguf(path))
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    codec = TextCodec(tmp_path)
    ids = codec.encode(f"the {name} <|x|>!")
    last = tokens.index(name)
    assert last in ids and codec.decode(ids) == f"the {name} !"
    stream = TextStream(codec, [], ())
    assert "".join(map(stream.push, ids)) == f"the {name} !"


def test_an_export_shows_all_ends_and_its_texts_stop_there(tmp_path: Path) -> None:
    """Here at a token that no metadata name: the likeliest first one, named ``<|fim_pad|>``."""
    path = gguf_files.write(tmp_path / "first.gguf", Spec())
    plain = eesd.load(export_engine(path, tmp_path / "first")).generate([40, 77], max_new_tokens=6)
    end = next(token for token in plain.tokens if token >= len(SPECIAL))
    tokens = list(VOCABULARY)
    types = [3] * len(SPECIAL) + [1] * len(VOCABULARY)
    tokens[end] = "<|fim_pad|>"
    types[end] = 3
    metadata = {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": types}
    metadata |= {"tokenizer.ggml.merges": ["t h"]}
    engine = export_engine(
        gguf_files.write(tmp_path / "model.gguf", Spec(metadata=metadata)), tmp_path / "plans"
    )
    assert load_manifest(engine).eos_token_ids == (1, 2, end)
    assert f"1, 2, {end}" in succeed(inspect_main, engine).stdout
    found = eesd.load(engine).generate([40, 77], max_new_tokens=6)
    assert found.tokens == plain.tokens[: plain.tokens.index(end) + 1]
    assert found.finish_reason == "stop"


def test_marks_of_code_end_a_text_between_two_others(tmp_path: Path) -> None:
    [family] = [one for one in TABLE if one["name"] == "Qwen2.5-Coder"]
    metadata = vocabulary(family, pre="qwen2", merges=["a a"])
    tokenizer, _ = gguf_tokenizer(read_gguf(write_metadata(tmp_path / "model.gguf", metadata)))
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    marks = [f"<|fim_{part}|>" for part in ("prefix", "middle", "suffix", "pad")]
    right = {"<|endoftext|>", *marks, "<|repo_name|>", "<|file_sep|>"}
    found = ends_between(TextCodec(tmp_path))
    assert {metadata["tokens"][token] for token in found} == right
