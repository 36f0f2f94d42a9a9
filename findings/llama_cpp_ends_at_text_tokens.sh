#!/usr/bin/env bash
# llama.cpp (xllamacpp 2026.10.11549) and gguf 0.19.0: a token of type normal can end a text.
#
# Behaviour: a GGUF file gives each token a type (tokenizer.ggml.token_type). llama.cpp also has a
# list of names, such as </s>, and turns every token with such a name into a control token that
# ends the generation, whatever the file's type says. Qwen2.5 has </s> (HTML's end of a strike) as
# a normal token, Gemma 2 and 3 as a user-defined one: a model that writes <s>old</s> stops in
# the middle, and the text of the token is not shown.
#
# Output seen: tokens 0 <x> (control, the file's EOS), 4 </s> (normal)
#   ends: [0, 4]
set -euo pipefail
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
python3 -m venv "$place/venv"
"$place/venv/bin/pip" install --quiet gguf==0.19.0 xllamacpp==2026.10.11549
cd "$place"
"$place/venv/bin/python" - 2>/dev/null <<'PYTHON'
import ctypes

import gguf
import xllamacpp.xllamacpp as binding

tokens = ["<x>", "a", "b", "ab", "</s>"]
writer = gguf.GGUFWriter("vocabulary.gguf", "llama")
writer.add_string("tokenizer.ggml.model", "gpt2")
writer.add_string("tokenizer.ggml.pre", "qwen2")
writer.add_array("tokenizer.ggml.tokens", tokens)
writer.add_array("tokenizer.ggml.token_type", [3, 1, 1, 1, 1])
writer.add_array("tokenizer.ggml.merges", ["a b"])
writer.add_uint32("tokenizer.ggml.eos_token_id", 0)
writer.write_header_to_file()
writer.write_kv_data_to_file()
writer.close()


class Parameters(ctypes.Structure):
    """llama_model_params of this version: 80 bytes, of which byte 72 is vocab_only."""

    _fields_ = [("bytes", ctypes.c_ubyte * 80)]


library = ctypes.CDLL(binding.__file__)
library.llama_model_default_params.restype = Parameters
library.llama_model_load_from_file.argtypes = [ctypes.c_char_p, Parameters]
library.llama_model_load_from_file.restype = ctypes.c_void_p
library.llama_model_get_vocab.argtypes = [ctypes.c_void_p]
library.llama_model_get_vocab.restype = ctypes.c_void_p
library.llama_vocab_is_eog.argtypes = [ctypes.c_void_p, ctypes.c_int32]
library.llama_vocab_is_eog.restype = ctypes.c_bool
parameters = library.llama_model_default_params()
parameters.bytes[72] = 1
model = library.llama_model_load_from_file(b"vocabulary.gguf", parameters)
vocabulary = library.llama_model_get_vocab(model)
ends = [token for token in range(len(tokens)) if library.llama_vocab_is_eog(vocabulary, token)]
print("ends:", ends)
assert ends == [0, 4], "the behaviour changed"
PYTHON
