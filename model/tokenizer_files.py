"""The tokenizer of a model as transformers loads it, in files that need no transformers.

transformers does not always use ``tokenizer.json`` as it stands: ``LlamaTokenizer`` and
``Qwen2Tokenizer`` rebuild the steps around the vocabulary, classes bring special tokens of their
own, and some files overrule others. So transformers loads the tokenizer here, once, and what it
made is written down. All readers of these files get the same token ids. That of a GGUF file is made
from its metadata.
"""

import json
from logging import CRITICAL
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from eesd.common.errors import EESDError
from eesd.common.manifest import SPECIAL_TOKENS
from eesd.model.gguf_file import GgufFile, read_gguf
from eesd.model.gguf_tokenizer import gguf_tokenizer

_SOURCES = ("tokenizer.json", "tokenizer.model", "vocab.json")
"""A model with none of these files has no tokenizer."""


def resolved_tokenizer(model: Path) -> dict[str, bytes]:
    """Make the files of a tokenizer and its chat template: as ``AutoTokenizer`` of transformers
    loads them, or of a GGUF file.

    No code of the model runs, and nothing is downloaded. A tokenizer that transformers cannot load
    is refused and not used as it stands: its token ids might differ from the ids of the training.

    Args:
        model: Directory of the model, or a GGUF file, which has its tokenizer in its metadata.

    Returns:
        Contents of ``tokenizer.json``, ``tokenizer_config.json`` and ``chat_template.jinja``, as
        far as the model has them, by name. Nothing if it has no tokenizer.

    Raises:
        EESDError: transformers cannot load the tokenizer, or it is not one of the tokenizers
            library, or a GGUF file's is of an unknown kind.
    """
    if model.is_file():
        return _of_gguf(read_gguf(model))
    if not any((model / name).exists() for name in _SOURCES):
        return {}
    loaded = _load(model)
    backend = Tokenizer.from_str(loaded.backend_tokenizer.to_str())
    backend.no_truncation()  # transformers neither truncates nor pads unless it is asked to
    backend.no_padding()
    tokens = {name: loaded.special_tokens_map.get(name) for name in SPECIAL_TOKENS}
    config: dict[str, Any] = {
        name: str(token) for name, token in tokens.items() if token is not None
    }
    if getattr(loaded, "split_special_tokens", False):
        config["split_special_tokens"] = True
    template = loaded.chat_template
    # There is another template for messages with tools.
    if isinstance(template, dict) and "tool_use" in template:
        used = {name: template[name] for name in ("default", "tool_use") if name in template}
        config["chat_template"] = [
            {"name": name, "template": source} for name, source in used.items()
        ]
        template = None
    elif isinstance(template, dict):
        template = template.get("default")
    return _files(backend, config, template)


def _of_gguf(file: GgufFile) -> dict[str, bytes]:
    template = file.metadata.get("tokenizer.chat_template")
    if not isinstance(template, str | None):
        raise EESDError(
            f"{file.path} has a tokenizer.chat_template that is not text; fetch the file again."
        )
    return (
        _files(*gguf_tokenizer(file), template) if "tokenizer.ggml.tokens" in file.metadata else {}
    )


def _files(backend: Tokenizer, config: dict[str, Any], template: str | None) -> dict[str, bytes]:
    # The class that uses tokenizer.json as it stands.
    config = {"tokenizer_class": "PreTrainedTokenizerFast"} | config
    files = {
        "tokenizer.json": backend.to_str(),
        "tokenizer_config.json": json.dumps(config, indent=2, ensure_ascii=False) + "\n",
    }
    if template is not None:
        files["chat_template.jinja"] = template
    return {name: text.encode() for name, text in files.items()}


def _load(model: Path) -> Any:
    """Load a tokenizer with transformers, which takes seconds to import, and says much on the
    way."""
    from transformers import AutoTokenizer
    from transformers.utils import logging

    verbosity = logging.get_verbosity()
    logging.set_verbosity(CRITICAL)
    options: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
    try:
        loaded = AutoTokenizer.from_pretrained(model, **options)
        if not isinstance(getattr(loaded, "backend_tokenizer", None), Tokenizer):
            raise TypeError(f"{type(loaded).__name__} is not a tokenizer of the tokenizers library")
        template = loaded.chat_template
        if not isinstance(
            template.get("default", "") if isinstance(template, dict) else template or "", str
        ):
            raise TypeError("the chat template is not text")
    except Exception as error:  # it may fail in any way on files that it does not expect
        reason = " ".join((str(error) or type(error).__name__).split())[:200].rstrip(".")
        remedy = (
            "correct its files, config.json among them, or move them away to use token ids alone"
        )
        raise EESDError(
            f"transformers cannot load the tokenizer in {model} ({reason}); {remedy}."
        ) from None
    finally:
        logging.set_verbosity(verbosity)
    return loaded
