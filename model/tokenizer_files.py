"""Write the tokenizer of a model to files that can be read without transformers. The tokenizer is
the one that transformers would load.

transformers does not always use ``tokenizer.json`` unchanged. ``LlamaTokenizer`` and
``Qwen2Tokenizer`` rebuild the steps around the vocabulary, some classes add special tokens, and
some files override other files. This module has the rules of version 5 for the classes of the
supported families and for a ``tekken.json``. Their tokenizers therefore need only the tokenizers
library. transformers itself loads all other directories, such as those with another class, an
unknown field or no ``tokenizer.json``. All readers of the written files get the same token ids. The
tokenizer of a GGUF file is made from its metadata.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from logging import CRITICAL
from pathlib import Path
from typing import Any

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)

from eesd.common.errors import EESDError, reason, refused
from eesd.common.json_input import read_json_object
from eesd.common.manifest import SPECIAL_TOKENS
from eesd.model.gguf_file import GgufFile, read_gguf
from eesd.model.gguf_tokenizer import gguf_tokenizer
from eesd.model.tekken import TEKKEN_FILE, tekken_tokenizer

_SOURCES = ("tokenizer.json", "tokenizer.model", "vocab.json", TEKKEN_FILE)
"""Files of tokenizers. A model without any of these files has no tokenizer."""
_REMEDY = "correct its files, config.json among them, or move them away to use token ids alone"
_AS_IT_STANDS = "TokenizersBackend"
"""The class that uses ``tokenizer.json`` unchanged. Its other name is
``PreTrainedTokenizerFast``."""
CLASS_OF_TYPE = (
    dict.fromkeys(("llama", "smollm3", "hunyuan_v1_dense", "lfm2", "seed_oss", "exaone4"))
    | dict.fromkeys(("apertus", "arcee", "cwm", "gemma4", "gemma4_text", "gpt_oss", "vaultgemma"))
    | dict.fromkeys(("mistral", "mixtral", "phi3", "granite", "olmo2", "olmo3"), _AS_IT_STANDS)
    | dict.fromkeys(("ernie4_5", "glm", "glm4", "granitemoehybrid"), _AS_IT_STANDS)
    | dict.fromkeys(("ministral", "ministral3", "mistral3"), _AS_IT_STANDS)
    | dict.fromkeys(("internlm3", "iquestcoder", "nemotron", "stablelm"), _AS_IT_STANDS)
    | dict.fromkeys(("granitemoe", "granitemoeshared"), _AS_IT_STANDS)
    | dict.fromkeys(("deepseek_v2", "deepseek_v3", "dots1", "exaone_moe", "hunyuan_v1_moe"))
    | dict.fromkeys(("lfm2_moe", "qwen2_vl_text", "qwen2_5_vl_text", "qwen3_vl_text"))
    | dict.fromkeys(("qwen3_vl_moe_text", "solar_open", "youtu", "falcon_h1"))
    | dict.fromkeys(("ernie4_5_moe", "flex_olmo", "glm4_moe", "glm4_moe_lite"), _AS_IT_STANDS)
    | dict.fromkeys(("minicpm3", "minimax_m2", "phimoe"), _AS_IT_STANDS)
    | dict.fromkeys(("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe"), "Qwen2Tokenizer")
    | dict.fromkeys(("qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "qwen3_next"), "Qwen2Tokenizer")
    | dict.fromkeys(("qwen3_5", "qwen3_5_moe"), "Qwen3_5Tokenizer")
    | dict.fromkeys(("qwen3_5_text", "qwen3_5_moe_text"), "Qwen3_5Tokenizer")
    | dict.fromkeys(("gemma", "gemma2", "gemma3", "gemma3_text"), "GemmaTokenizer")
    | dict.fromkeys(("jais2", "phi", "starcoder2"), "GPT2Tokenizer")
    | dict.fromkeys(("cohere", "cohere2"), "CohereTokenizer")
    | dict.fromkeys(("olmo", "olmoe"), "GPTNeoXTokenizer")
)
"""For a ``model_type``, the class that transformers registers, or None if it registers no class."""
OVERRULED = ("qwen2", "qwen3_5", "qwen3_5_moe", "qwen3_5_moe_text")
"""Model types whose registered class replaces the class named in their files."""
_INERT = {
    *("add_bos_token", "add_eos_token", "tokenizer_class", "processor_class", "backend"),
    *("clean_up_tokenization_spaces", "spaces_between_special_tokens", "sp_model_kwargs", "errors"),
    *("model_max_length", "max_length", "stride", "truncation_side", "truncation_strategy"),
    *("padding_side", "pad_to_multiple_of", "pad_token_type_id", "use_default_system_prompt"),
    *("is_local", "local_files_only", "name_or_path", "tokenizer_file", "special_tokens_map_file"),
    "model_input_names",
}
"""Fields of ``tokenizer_config.json`` that change neither ids nor templates. With a
``tokenizer.json``, transformers drops ``add_bos_token`` and ``add_eos_token``."""
_READ = {
    *("add_prefix_space", "legacy", "split_special_tokens", "chat_template"),
    *("added_tokens_decoder", "additional_special_tokens", "extra_special_tokens"),
}
_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")
_QWEN2_PIECES = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN3_5_PIECES = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}"
    r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_Token = str | AddedToken
_Vocabulary = dict[str, int]
_Merges = list[tuple[str, str]]


class _ForTransformers(Exception):
    """The rules of this module do not cover the files."""


@dataclass(frozen=True)
class _Loaded:
    """A tokenizer, its named special tokens, and its chat templates by name."""

    backend: Tokenizer
    special_tokens: dict[str, str]
    split_special_tokens: bool
    templates: dict[str, str]


def resolved_tokenizer(model: Path) -> dict[str, bytes]:
    """Make the files of a tokenizer and its chat template. They are as ``AutoTokenizer`` of
    transformers would load them, or come from a GGUF file.

    No code of the model runs, and nothing is downloaded. A tokenizer that transformers cannot load
    is refused, because its unchanged files might give other token ids than those that the training
    used.

    Args:
        model: Directory of the model, or a GGUF file (whose metadata have the tokenizer).

    Returns:
        The contents of ``tokenizer.json`` and ``tokenizer_config.json`` by name. If the model has a
        template, they include ``chat_template.jinja``. The dictionary is empty if the model has no
        tokenizer.

    Raises:
        EESDError: The tokenizer cannot be loaded, or does not belong to the tokenizers library. It
            may need transformers, which is not installed, or a GGUF file may have an unknown kind
            of tokenizer.
    """
    if model.is_file():
        file = read_gguf(model)
        if "tokenizer.ggml.tokens" not in file.metadata:
            return {}
        loaded = _Loaded(*gguf_tokenizer(file), False, _templates_of_gguf(file))
    elif not any((model / name).exists() for name in _SOURCES):
        return {}
    else:
        loaded = _of_directory(model)
    loaded.backend.no_truncation()  # transformers truncates and pads only on request
    loaded.backend.no_padding()
    config: dict[str, Any] = {
        name: loaded.special_tokens[name]
        for name in SPECIAL_TOKENS
        if name in loaded.special_tokens
    }
    if loaded.split_special_tokens:
        config["split_special_tokens"] = True
    templates = {
        name: loaded.templates[name] for name in ("default", "tool_use") if name in loaded.templates
    }
    if "tool_use" not in templates:
        return _files(loaded.backend, config, templates.get("default"))
    # Messages with tools have a separate template.
    config["chat_template"] = [
        {"name": name, "template": source} for name, source in templates.items()
    ]
    return _files(loaded.backend, config, None)


def _of_directory(model: Path) -> _Loaded:
    others = (*model.glob("*token*"), *model.glob("vocab.json"))
    if not others and _object(model, "config.json").get("model_type") in ("mistral", "mixtral"):
        return _of_tekken(model)
    try:
        return _by_rules(model)
    except _ForTransformers:
        return _by_transformers(model)


def _of_tekken(model: Path) -> _Loaded:
    """Load a tokenizer in Mistral's format, if the directory has no other."""
    path = model / TEKKEN_FILE
    source = read_json_object(path, _REMEDY)
    if "special_tokens" not in source:
        raise EESDError(
            f"{path} does not list its special tokens, as the first files of this format; add the "
            f"model's tokenizer.json to {model}."
        )
    with refused(lambda error: f"{path} cannot be used ({reason(error)}); {_REMEDY}."):
        return _Loaded(tekken_tokenizer(source), {}, False, _templates(model, None))


def _templates_of_gguf(file: GgufFile) -> dict[str, str]:
    """Return the default template and the template for messages with tools."""
    keys = {"default": "tokenizer.chat_template", "tool_use": "tokenizer.chat_template.tool_use"}
    found = {name: file.metadata[key] for name, key in keys.items() if key in file.metadata}
    other = next((keys[name] for name, text in found.items() if not isinstance(text, str)), None)
    if other is not None:
        raise EESDError(f"{file.path} has a {other} that is not text; fetch the file again.")
    return found


def _files(backend: Tokenizer, config: dict[str, Any], template: str | None) -> dict[str, bytes]:
    # The class that uses tokenizer.json unchanged.
    config = {"tokenizer_class": "PreTrainedTokenizerFast"} | config
    files = {
        "tokenizer.json": backend.to_str(),
        "tokenizer_config.json": json.dumps(config, indent=2, ensure_ascii=False) + "\n",
    }
    if template is not None:
        files["chat_template.jinja"] = template
    return {name: text.encode() for name, text in files.items()}


def _by_transformers(model: Path) -> _Loaded:
    """Load a tokenizer with transformers. The import of transformers takes seconds, and its
    messages are suppressed."""
    try:
        from transformers import AutoTokenizer
        from transformers.utils import logging
    except ModuleNotFoundError:
        name = _object(model, "tokenizer_config.json").get("tokenizer_class")
        raise EESDError(
            f"The tokenizer of {model} (class {name or 'unnamed'}) is loaded by transformers; "
            "install it with: pip install transformers."
        ) from None
    verbosity = logging.get_verbosity()
    logging.set_verbosity(CRITICAL)
    options: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
    try:
        loaded = AutoTokenizer.from_pretrained(model, **options)
        if not isinstance(getattr(loaded, "backend_tokenizer", None), Tokenizer):
            raise TypeError(f"{type(loaded).__name__} is not a tokenizer of the tokenizers library")
        templates = loaded.chat_template or {}
        templates = templates if isinstance(templates, dict) else {"default": templates}
        if not all(isinstance(template, str) for template in templates.values()):
            raise TypeError("the chat template is not text")
    except Exception as error:  # unexpected files can raise anything
        why = " ".join((str(error) or type(error).__name__).split())[:200].rstrip(".")
        raise EESDError(
            f"transformers cannot load the tokenizer in {model} ({why}); {_REMEDY}."
        ) from None
    finally:
        logging.set_verbosity(verbosity)
    return _Loaded(
        Tokenizer.from_str(loaded.backend_tokenizer.to_str()),
        loaded.special_tokens_map,
        getattr(loaded, "split_special_tokens", False),
        templates,
    )


def _by_rules(model: Path) -> _Loaded:
    """Load a tokenizer as transformers does, but without transformers."""
    config = _object(model, "tokenizer_config.json")
    kind = _class(model, config)
    source = _object(model, "tokenizer.json")
    added = _added_tokens(config, source)
    given, extra = _special_tokens(model, config, added)
    special = _TOKENS.get(kind, {}) | given
    backend = _backend(model, source, kind, config | special)
    if backend.padding is not None:
        special.setdefault("pad_token", backend.padding["pad_token"])
    order = dict.fromkeys((*SPECIAL_TOKENS, *special))
    named = [token for name in order if (token := special.get(name)) is not None]
    _add_tokens(backend, added, named, extra)
    if kind == "Qwen2Tokenizer":
        every = dict.fromkeys(map(str, (*named, *extra)))
        backend.add_tokens([AddedToken(token, special=True) for token in every])
    if backend.post_processor is None:
        backend.post_processor = processors.TemplateProcessing(
            single="$A:0", pair="$A:0 $B:1", special_tokens=[]
        )
    return _Loaded(
        backend,
        {name: str(token) for name, token in special.items() if token is not None},
        config.get("split_special_tokens", False),
        _templates(model, config.get("chat_template")),
    )


def _object(model: Path, name: str) -> dict[str, Any]:
    """Return the object in a JSON file. It is empty if there is no file."""
    path = model / name
    return read_json_object(path, _REMEDY) if path.exists() else {}


def _class(model: Path, config: dict[str, Any]) -> str:
    """Return the class that transformers uses for a directory."""
    described = _object(model, "config.json")
    model_type: Any = described.get("model_type")
    given: Any = config.get("tokenizer_class")
    _require(
        (model / "tokenizer.json").exists()
        and isinstance(model_type, str)
        and model_type in CLASS_OF_TYPE
        and "model_name" not in described
        and (given is None or (isinstance(given, str) and given != ""))
        and (given is not None or described.get("tokenizer_class") is None)
    )
    registered = CLASS_OF_TYPE[model_type] or ""
    if registered == _AS_IT_STANDS or model_type in OVERRULED:
        return registered
    name = str(given or registered or _AS_IT_STANDS).removesuffix("Fast")
    if name == "PreTrainedTokenizer":
        return _AS_IT_STANDS
    # Files with Llama 3's kind of vocabulary often name this class by mistake, and transformers
    # corrects it.
    text = (model / "tokenizer.json").read_text("utf-8-sig") if name == "LlamaTokenizer" else ""
    if '"ByteLevel"' in text:
        return _AS_IT_STANDS
    _require(name in _BACKENDS or name == _AS_IT_STANDS)
    return name


def _require(known: bool) -> None:
    if not known:
        raise _ForTransformers


def _added_tokens(config: dict[str, Any], source: dict[str, Any]) -> dict[int, AddedToken]:
    """Return the added tokens by id. The tokens in ``tokenizer_config.json`` override the tokens in
    ``tokenizer.json``."""
    if "added_tokens_decoder" not in config:
        tokens: Any = source.get("added_tokens")
        _require(isinstance(tokens, list) and all(isinstance(token, dict) for token in tokens))
        _require(all(isinstance(token.get("id"), int) for token in tokens))
        return {token["id"]: _added_token(token) for token in tokens}
    tokens = config["added_tokens_decoder"]
    _require(isinstance(tokens, dict) and all(map(str.isdecimal, tokens)))
    return {int(index): _added_token(token) for index, token in tokens.items()}


def _added_token(fields: Any, **more: bool) -> AddedToken:
    _require(isinstance(fields, dict) and isinstance(fields.get("content"), str))
    flags = {name: fields[name] for name in _FLAGS if name in fields} | more
    _require(fields["content"] != "" and all(isinstance(flag, bool) for flag in flags.values()))
    return AddedToken(fields["content"], **flags)


def _token(value: Any) -> _Token | None:
    if isinstance(value, dict) and value.get("__type") == "AddedToken":
        return _added_token(value)
    _require(value is None or isinstance(value, str | AddedToken))
    _require(value != "")
    token: _Token | None = value
    return token


def _special_tokens(
    model: Path, config: dict[str, Any], added: dict[int, AddedToken]
) -> tuple[dict[str, _Token | None], list[_Token]]:
    """Return the named special tokens in the files and all other special tokens."""
    names = {name for name in config if name.endswith("_token")}
    _require(config.keys() <= _INERT | _READ | names)
    _require(isinstance(config.get("split_special_tokens", False), bool))
    fields = {name: value for name, value in config.items() if name not in _INERT}
    if not fields.get("extra_special_tokens") and "additional_special_tokens" in fields:
        fields["extra_special_tokens"] = fields.pop("additional_special_tokens")
    if isinstance(fields.get("extra_special_tokens"), dict):
        others = fields.pop("extra_special_tokens")
        _require(all(name.endswith("_token") and name not in SPECIAL_TOKENS for name in others))
        fields |= others
    if "added_tokens_decoder" not in config:
        fields |= _special_tokens_map(model)
    extra = fields.get("extra_special_tokens", fields.get("additional_special_tokens")) or []
    _require(isinstance(extra, list) and None not in extra)
    by_content = {token.content: token for token in added.values()}
    special: dict[str, _Token | None] = {}
    for name in (name for name in fields if name.endswith("_token")):
        token = _token(fields[name])
        if name in SPECIAL_TOKENS:
            special[name] = token if token is None else by_content.get(str(token), token)
        else:
            _require(isinstance(token, str))
            special[name] = token
    return special, [token for token in map(_token, extra) if token is not None]


def _special_tokens_map(model: Path) -> dict[str, Any]:
    """Return the fields of ``special_tokens_map.json``. They override the fields of
    ``tokenizer_config.json``."""
    fields = _object(model, "special_tokens_map.json")
    _require(fields.keys() <= {*SPECIAL_TOKENS, "additional_special_tokens"})
    _require(not (model / "added_tokens.json").exists())
    return {
        name: _added_token(value, special=True) if isinstance(value, dict) else value
        for name, value in fields.items()
    }


def _add_tokens(
    backend: Tokenizer,
    added: dict[int, AddedToken],
    named: list[_Token],
    extra: list[_Token],
) -> None:
    """Add tokens in the order of transformers, which determines their ids and flags."""
    tokens: list[_Token] = [token for _, token in sorted(added.items())]
    known = {token.content for token in backend.get_added_tokens_decoder().values()}
    known |= set(map(str, tokens))
    for token in (*named, *extra):
        if str(token) not in known and token not in tokens:
            tokens.append(token)
    names = set(map(str, named))
    for index, token in enumerate(tokens):
        if isinstance(token, str):
            tokens[index] = AddedToken(token, special=True)
        elif str(token) in names:
            token.special = True
    backend.add_tokens(tokens)


def _templates(model: Path, given: Any) -> dict[str, str]:
    """Return the chat templates by name. The templates in ``tokenizer_config.json`` are ``given``.
    Separate template files replace them."""
    files = {"default": model / "chat_template.jinja"}
    files |= {
        path.name.removesuffix(".jinja"): path
        for path in (model / "additional_chat_templates").glob("*.jinja")
    }
    with refused(lambda error: f"A chat template of {model} is not UTF-8 text; {_REMEDY}."):
        # read_text of json_input would drop a byte order mark, which transformers keeps.
        found = {name: path.read_text("utf-8") for name, path in files.items() if path.exists()}
    if found or given is None:
        return found
    if isinstance(given, list):
        _require(all(isinstance(one, dict) and {"name", "template"} <= one.keys() for one in given))
        given = {str(one["name"]): one["template"] for one in given}
    templates: dict[str, str] = given if isinstance(given, dict) else {"default": given}
    _require(all(isinstance(template, str) for template in templates.values()))
    return templates


def _backend(model: Path, source: dict[str, Any], kind: str, config: dict[str, Any]) -> Tokenizer:
    """Return the tokenizer before tokens are added."""
    path = model / "tokenizer.json"
    sentence = f"The tokenizer in {model} cannot be loaded"
    if kind == _AS_IT_STANDS:
        with refused(lambda error: f"{sentence} ({reason(error)}); {_REMEDY}."):
            return Tokenizer.from_file(str(path))
    given: Any = source.get("model")
    _require(isinstance(given, dict) and given.get("type") == "BPE")
    vocabulary = given.get("vocab")
    merges = given.get("merges")
    _require(isinstance(vocabulary, dict) and isinstance(merges, list))
    _require(isinstance(config.get("add_prefix_space", False), bool | None))
    pairs = [merge.split(" ") if isinstance(merge, str) else merge for merge in merges]
    _require(all(isinstance(pair, list) and len(pair) == 2 for pair in pairs))
    small = given | {"vocab": {}, "merges": []}
    with refused(lambda error: f"{sentence} ({reason(error)}); {_REMEDY}."):
        rest = Tokenizer.from_str(json.dumps(source | {"model": small, "added_tokens": []}))
        backend = _BACKENDS[kind](vocabulary, list(map(tuple, pairs)), config)
        backend.post_processor = rest.post_processor
        if rest.padding is not None:
            backend.enable_padding(**rest.padding)
    return backend


def _llama(vocabulary: _Vocabulary, merges: _Merges, config: dict[str, Any]) -> Tokenizer:
    backend = Tokenizer(models.BPE(vocabulary, merges, fuse_unk=True, byte_fallback=True))
    prefixed = config.get("add_prefix_space") is not False
    scheme = "always" if config.get("legacy", False) else "first"
    backend.pre_tokenizer = pre_tokenizers.Metaspace(
        prepend_scheme=scheme if prefixed else "never", split=False
    )
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if prefixed:
        steps.append(decoders.Strip(content=" ", left=1))
    backend.decoder = decoders.Sequence(steps)
    return backend


def _qwen2(
    vocabulary: _Vocabulary,
    merges: _Merges,
    config: dict[str, Any],
    pieces: str = _QWEN2_PIECES,
) -> Tokenizer:
    backend = _byte_level_bpe(vocabulary, merges)
    backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pieces), behavior="isolated"),
            pre_tokenizers.ByteLevel(
                add_prefix_space=bool(config.get("add_prefix_space")), use_regex=False
            ),
        ]
    )
    return backend


def _gpt2(vocabulary: _Vocabulary, merges: _Merges, config: dict[str, Any]) -> Tokenizer:
    backend = _byte_level_bpe(vocabulary, merges)
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(
        add_prefix_space=config.get("add_prefix_space", False)
    )
    return backend


def _byte_level_bpe(vocabulary: _Vocabulary, merges: _Merges) -> Tokenizer:
    backend = Tokenizer(
        models.BPE(vocabulary, merges, continuing_subword_prefix="", end_of_word_suffix="")
    )
    backend.decoder = decoders.ByteLevel()
    return backend


def _gemma(vocabulary: _Vocabulary, merges: _Merges, config: dict[str, Any]) -> Tokenizer:
    unknown = str(config["unk_token"])
    backend = Tokenizer(
        models.BPE(vocabulary, merges, fuse_unk=True, unk_token=unknown, byte_fallback=True)
    )
    backend.normalizer = normalizers.Replace(" ", "▁")
    backend.pre_tokenizer = pre_tokenizers.Split(" ", behavior="merged_with_previous")
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    return backend


_BACKENDS: dict[str, Callable[[_Vocabulary, _Merges, dict[str, Any]], Tokenizer]] = {
    "LlamaTokenizer": _llama,
    "Qwen2Tokenizer": _qwen2,
    "Qwen3_5Tokenizer": partial(_qwen2, pieces=_QWEN3_5_PIECES),
    "GPT2Tokenizer": _gpt2,
    "GemmaTokenizer": _gemma,
}
"""Classes that take only vocabulary, merges and post-processor from ``tokenizer.json``."""
_END = "<|endoftext|>"
_OF_QWEN: dict[str, _Token | None] = {
    "unk_token": _END,
    "bos_token": None,
    "eos_token": _END,
    "pad_token": _END,
}
_TOKENS: dict[str, dict[str, _Token | None]] = {
    "LlamaTokenizer": {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"},
    "Qwen2Tokenizer": _OF_QWEN,
    "Qwen3_5Tokenizer": _OF_QWEN,
    "GPT2Tokenizer": {"unk_token": _END, "bos_token": _END, "eos_token": _END, "pad_token": None},
    "GemmaTokenizer": {
        "unk_token": "<unk>",
        "bos_token": "<bos>",
        "eos_token": "<eos>",
        "pad_token": "<pad>",
        "mask_token": "<mask>",
    },
}
"""Default special tokens of these classes."""
