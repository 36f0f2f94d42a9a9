"""Find a model by a local path, a Hugging Face id or a short name, and an exit head by a path or an
id."""

from pathlib import Path

from eesd.common.errors import EESDError

ALIASES = {
    "llama-7b": "meta-llama/Llama-2-7b-hf",
    "llama-13b": "meta-llama/Llama-2-13b-hf",
    "llama-70b": "meta-llama/Llama-2-70b-hf",
    "llama-7b-chat": "meta-llama/Llama-2-7b-chat-hf",
    "llama-13b-chat": "meta-llama/Llama-2-13b-chat-hf",
    "llama-70b-chat": "meta-llama/Llama-2-70b-chat-hf",
    "llama3-8b": "meta-llama/Meta-Llama-3-8B-Instruct",
    "llama3-70b": "meta-llama/Meta-Llama-3-70B-Instruct",
    "llama3.1-8b": "meta-llama/Llama-3.1-8B-Instruct",
    "llama3.1-70b": "meta-llama/Llama-3.1-70B-Instruct",
    "llama3.2-1b": "meta-llama/Llama-3.2-1B-Instruct",
    "llama3.2-3b": "meta-llama/Llama-3.2-3B-Instruct",
    "llama3.3-70b": "meta-llama/Llama-3.3-70B-Instruct",
    "codellama-7b": "codellama/CodeLlama-7b-hf",
    "codellama-13b": "codellama/CodeLlama-13b-hf",
    "codellama-34b": "codellama/CodeLlama-34b-hf",
    "mistral-7b": "mistralai/Mistral-7B-Instruct-v0.3",
    "qwen2.5-7b": "Qwen/Qwen2.5-7B-Instruct",
    "qwen2.5-32b": "Qwen/Qwen2.5-32B-Instruct",
    "qwen3-8b": "Qwen/Qwen3-8B",
    "qwen3-32b": "Qwen/Qwen3-32B",
}

_INCLUDED = ["*.json", "*.safetensors", "*.jinja", "merges.txt", "tokenizer.model"]
_EXCLUDED = ["consolidated*", "original/*"]  # copies of the weights in other tools' formats
_HEAD = ["*.json", "*.safetensors"]


def find_model(name: str, weights: bool = True) -> Path:
    """Find a model's directory or GGUF file. Download the missing files of a directory.

    Downloads go through huggingface_hub, so its cache and its environment variables (such as
    ``HF_HUB_OFFLINE``) apply.

    Args:
        name: A local directory or GGUF file, a Hugging Face id, or a key of :data:`ALIASES`.
        weights: Whether to download the weights.

    Raises:
        EESDError: There is no such model, or it cannot be downloaded.
    """
    path = Path(name).expanduser()
    if path.is_dir() or path.is_file():
        return path
    if path.suffix == ".gguf":
        raise EESDError(f"There is no file {name}.")
    repository = ALIASES.get(name, name)
    if repository.count("/") != 1 or name.startswith((".", "/", "~")):
        raise EESDError(
            f"{name} is neither a directory nor a Hugging Face id nor a GGUF file nor a known "
            "short name "
            f"({', '.join(ALIASES)})."
        )
    return _downloaded(
        repository, "model", _INCLUDED, _EXCLUDED if weights else [*_EXCLUDED, "*.safetensors"]
    )


def find_head(name: str) -> Path:
    """Find the directory of an exit head, given a local directory or a Hugging Face id. The JSON
    and safetensors files of an id are downloaded as in :func:`find_model`.

    Raises:
        EESDError: The head cannot be downloaded.
    """
    path = Path(name).expanduser()
    if (
        path.exists()
        or name.count("/") != 1
        or name.startswith((".", "/", "~"))
        or name.endswith("/")
    ):
        return path
    return _downloaded(name, "exit head", _HEAD, [])


def _downloaded(repository: str, what: str, included: list[str], excluded: list[str]) -> Path:
    """Return the directory of a repository's files in the hub's cache."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        HFValidationError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
    )

    try:
        return Path(
            snapshot_download(repository, allow_patterns=included, ignore_patterns=excluded)
        )
    except GatedRepoError:
        raise EESDError(
            f"{repository} is gated; accept its licence on its page, then run `hf auth login`."
        ) from None
    except RepositoryNotFoundError:
        raise EESDError(
            f"The hub has no {what} {repository} (or it is private: run `hf auth login`)."
        ) from None
    except HFValidationError:
        raise EESDError(f"{repository} is neither a directory nor a Hugging Face id.") from None
    except (LocalEntryNotFoundError, HfHubHTTPError, OSError):
        raise EESDError(
            f"{repository} could not be downloaded and is not in the local cache; check the "
            "network, "
            f"or give a local directory of the {what}."
        ) from None
