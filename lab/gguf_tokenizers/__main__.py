"""Compare every rule for cutting texts with llama.cpp on thousands of texts. It needs
llama-cpp-python.

The texts are unusual, and the vocabularies are such that the token ids show where a text is cut.
``--write`` writes the expected results of ``tests/text/test_gguf_tokenizer.py``, which are hashes
of llama.cpp's token ids.

    PYTHONPATH=tests python -m lab.gguf_tokenizers [--texts 2000] [--vocabulary M.gguf] [--write]
"""

import argparse
import ctypes
import json
import random
import sys
import unicodedata
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from support.gguf_files import TOKENIZERS, digest, write_metadata
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from eesd.model.gguf_file import read_gguf
from eesd.model.gguf_pre_tokenizers import PRE_TOKENIZERS
from eesd.model.gguf_tokenizer import gguf_tokenizer

SPECIAL = {
    "<unk>": 2,
    "<s>": 3,
    "</s>": 3,
    "<|im_start|>": 3,
    "<|endoftext|>": 1,
    "<|user|>": 4,
    "  <<x>>": 4,
}
"""The type of each special token. llama.cpp treats ``<|endoftext|>`` as a control token, whatever
its type."""
FLAGS: dict[str, list[dict[str, Any]]] = {
    "gpt2": [
        {"pre": "llama-bpe", "add_bos_token": False},
        {"pre": "qwen2", "add_bos_token": True, "add_eos_token": True},
        {"pre": "qwen2", "general.name": "Phi-3 mini"},
    ],
    "llama": [
        {"pre": "default"},
        {"add_space_prefix": False},
        {"add_bos_token": False, "add_eos_token": True},
        {"general.name": "A phi3"},
    ],
    "gemma4": [{"add_bos_token": False}],
}
"""For each ``tokenizer.ggml.model``, the metadata that affects token ids in addition to the
rules."""


def odd_texts(data: dict[str, Any], count: int) -> list[str]:
    """Return the texts of the test and random texts. The random texts have pieces that rules treat
    differently, and characters of many scripts.

    Unicode's version decides which characters are letters, so only characters with a name in
    Python are used.
    """
    chance = random.Random(0)

    def piece() -> str:
        if chance.random() < 0.6:
            return str(chance.choice(data["pieces"]))
        low, high = chance.choice(data["scripts"])
        found = (chr(chance.randint(low, high)) for _ in range(chance.randint(1, 4)))
        return "".join(one for one in found if unicodedata.category(one) not in ("Cn", "Cs"))

    more = (
        "".join(piece() for _ in range(chance.randint(1, 24)))
        for _ in range(count - len(data["texts"]))
    )
    return [*data["texts"], *more]


def learned(texts: Sequence[str], kind: str, size: int) -> dict[str, Any]:
    """Return a vocabulary as metadata. Its merges cross every place where a rule might cut."""
    tokenizer = Tokenizer(models.BPE())
    if kind == "gpt2":
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    else:
        texts = [text.replace(" ", "\u2581") for text in texts]
    alphabet = (
        sorted(pre_tokenizers.ByteLevel.alphabet())
        if kind == "gpt2"
        else [f"<0x{byte:02X}>" for byte in range(256)]
    )
    tokenizer.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=size, show_progress=False))
    made = json.loads(tokenizer.to_str())["model"]
    # Terminates strings in C.
    tokens = [
        token for token in dict.fromkeys((*SPECIAL, *alphabet, *made["vocab"])) if "\0" not in token
    ]
    types = [
        SPECIAL.get(token, 6 if kind != "gpt2" and token in alphabet else 1) for token in tokens
    ]
    found: dict[str, Any] = {
        "model": kind,
        "tokens": tokens,
        "token_type": types,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    if kind != "llama":
        merges = [" ".join(merge) for merge in made["merges"]]
        return found | {"merges": [merge for merge in merges if "\0" not in merge]}
    return found | {
        "scores": [-float(index) for index in range(len(tokens))],
        "unknown_token_id": 0,
    }


@contextmanager
def llama_cpp(path: Path) -> Iterator[Callable[[str], list[int]]]:
    """Give a function that tokenizes a text with llama.cpp and the vocabulary of a file."""
    import llama_cpp as library

    options = library.llama_model_default_params()
    options.vocab_only = True
    silent = library.llama_log_callback(lambda *_: None)
    library.llama_log_set(silent, ctypes.c_void_p(0))
    model = library.llama_model_load_from_file(str(path).encode(), options)
    words = library.llama_model_get_vocab(model)

    def read(text: str) -> list[int]:
        data = text.encode()
        room = (ctypes.c_int32 * (len(data) + 16))()
        return list(
            room[: library.llama_tokenize(words, data, len(data), room, len(room), True, True)]
        )

    yield read
    library.llama_model_free(model)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--texts", type=int, default=2000)
    parser.add_argument(
        "--vocabulary",
        type=Path,
        help="a GGUF file whose vocabulary is used; default: some that are learned here",
    )
    parser.add_argument("--write", action="store_true", help="write what the test expects")
    options = parser.parse_args()
    data = json.loads(TOKENIZERS.read_text("utf-8"))
    texts = data["texts"] if options.write else odd_texts(data, options.texts)
    if options.vocabulary:
        given = {
            name.removeprefix("tokenizer.ggml."): value
            for name, value in read_gguf(options.vocabulary).metadata.items()
        }
        made = {given["model"]: {name: value for name, value in given.items() if "." not in name}}
    else:
        made = {kind: learned(texts, kind, 900 if options.write else 12000) for kind in FLAGS}
    found: dict[tuple[str, str], list[dict[str, Any]]] = defaultdict(list)
    different = 0
    for kind, vocabulary in made.items():
        for flags in ([{"pre": name} for name in PRE_TOKENIZERS] if kind == "gpt2" else []) + FLAGS[
            kind
        ]:
            with TemporaryDirectory() as directory:
                path = write_metadata(Path(directory) / "model.gguf", vocabulary | flags)
                tokenizer, _ = gguf_tokenizer(read_gguf(path))
                with llama_cpp(path) as read:
                    triples = [(text, tokenizer.encode(text).ids, read(text)) for text in texts]
            wrong = [triple for triple in triples if triple[1] != triple[2]]
            different += len(wrong)
            print(
                (
                    f"{kind} {flags}: {len(texts) - len(wrong)} of {len(texts)} texts have "
                    "llama.cpp's token ids"
                ),
                flush=True,
            )
            for text, own, right in wrong[:4]:
                spelled = ([tokenizer.id_to_token(token) for token in ids] for ids in (own, right))
                print(f"    {text!a}", *spelled, sep="\n    ")
            found[kind, " ".join(digest(right) for *_, right in triples)].append(flags)
    if options.write:
        cases = [{"kind": kind, "flags": flags, "ids": ids} for (kind, ids), flags in found.items()]
        parts = [
            f"{json.dumps(name)}: {json.dumps(value)}"
            for name, value in (data | {"vocabularies": made}).items()
            if name != "cases"
        ]
        parts.append('"cases": [' + ",\n".join(json.dumps(case) for case in cases) + "]")
        TOKENIZERS.write_text("{" + ",\n".join(parts) + "}\n", "utf-8")
    return int(different > 0)


if __name__ == "__main__":
    sys.exit(main())
