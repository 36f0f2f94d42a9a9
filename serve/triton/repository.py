"""Write model repositories for Triton Inference Server, and read their settings inside Triton."""

import json
import os
import re
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import eesd
from eesd.common.checks import check_integer, check_path, shown
from eesd.common.errors import EESDError
from eesd.common.files import directory_written_whole
from eesd.common.json_input import read_json_object
from eesd.common.manifest import load_manifest
from eesd.runtime.batch.scheduler import BatchOptions
from eesd.runtime.llm import LLM, Speculation, load

SETTINGS_FILE = "eesd.json"
DRAFTING = Speculation()
BATCH = BatchOptions()
_REMEDY = "write the repository again"

# The names come from NVIDIA's frontends, tensorrtllm_backend and vllm_backend. ``messages`` (in
# JSON) is an addition of this project.
INPUTS = (
    ("text_input", "STRING", 1),
    ("messages", "STRING", 1),
    ("input_ids", "INT32", -1),
    ("stream", "BOOL", 1),
    ("max_tokens", "INT32", 1),
    ("min_tokens", "INT32", 1),
    ("stop_words", "STRING", -1),
    ("temperature", "FP32", 1),
    ("top_k", "INT32", 1),
    ("top_p", "FP32", 1),
    ("min_p", "FP32", 1),
    ("repetition_penalty", "FP32", 1),
    ("presence_penalty", "FP32", 1),
    ("frequency_penalty", "FP32", 1),
    ("guided_decoding_guide_type", "STRING", 1),
    ("guided_decoding_guide", "STRING", 1),
    ("return_log_probs", "BOOL", 1),
    ("random_seed", "UINT64", 1),
    ("seed", "UINT64", 1),
    ("ignore_eos", "BOOL", 1),
    ("exclude_input_in_output", "BOOL", 1),
)
OUTPUTS = (
    ("text_output", "STRING", 1),
    ("output_ids", "INT32", -1),
    ("finish_reason", "STRING", 1),
    ("output_log_probs", "FP32", -1),
    ("cum_log_probs", "FP32", 1),
)
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,199}")
_MODEL = '''"""The model that Triton loads. Its code is in the package eesd, which Triton's Python
must have."""

from eesd.serve.triton.model import TritonPythonModel as TritonPythonModel
'''


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The settings with which Triton runs an engine directory. They come from ``eesd.json`` in the
    directory of the model's version.

    Attributes:
        engine_dir: The engine directory, as Triton sees it. A relative path begins at the directory
            of the model's version.
        backend, speculation, generation_config, exact, activations, kv_cache_dtype, plain_content,
            nvtx: See :func:`eesd.load`.
        threads: Number of CPU threads of an engine, or None to use all processors of the process.
        batch: Limits of the batch.

    Raises:
        EESDError: A value has another type, or is out of range.
    """

    engine_dir: str
    backend: str = "auto"
    threads: int | None = None
    speculation: Speculation | None = DRAFTING
    batch: BatchOptions = BATCH
    generation_config: str = "auto"
    exact: bool | None = None
    activations: str | None = None
    kv_cache_dtype: str | None = None
    plain_content: bool = False
    nvtx: bool = False

    def __post_init__(self) -> None:
        check_path("engine_dir", self.engine_dir, "the output directory of eesd-export")
        if self.threads is not None:
            check_integer("threads", self.threads, 1, 1 << 16)

    def load(self, directory: Path) -> LLM:
        """Open the engines. ``directory`` is the directory of the model's version. Raises
        :class:`EESDError` if they cannot be used."""
        options = {
            one.name: getattr(self, one.name)
            for one in fields(self)
            if one.name not in ("engine_dir", "batch")
        }
        return load(directory / self.engine_dir, **options)


def write_triton_repository(
    engine_dir: str | os.PathLike[str],
    output: str | os.PathLike[str],
    *,
    name: str = "eesd",
    **settings: Any,
) -> Path:
    """Write the model ``name`` into a model repository. The repository may have other models. If it
    does not exist, it is made.

    The engine directory is not copied, because Triton reads it where it is. ``1/eesd.json`` holds
    the settings and may be edited.

    Args:
        engine_dir: A directory that ``eesd-export`` wrote.
        output: The repository.
        name: The model's name, which is also the name of its directory in the repository.
        settings: Fields of :class:`Settings`.

    Returns:
        The model's directory.

    Raises:
        EESDError: The engine directory or an argument cannot be used, or the model exists.
    """
    engines = check_path("engine_dir", engine_dir, "the output directory of eesd-export").absolute()
    directory = check_path("output", output, "a directory for the repository") / name
    if not _NAME.fullmatch(name):
        raise EESDError(
            f"{shown(name)} is not a valid model name; use letters, digits, _, . and -."
        )
    load_manifest(engines)
    if directory.exists():
        raise EESDError(f"{directory} exists; delete it, or give another name (--model-name).")
    values = asdict(Settings(engine_dir=str(engines), **settings))
    with directory_written_whole(directory) as new:
        (new / "1").mkdir()
        (new / "config.pbtxt").write_text(_config(name))
        (new / "1" / "model.py").write_text(_MODEL)
        (new / "1" / SETTINGS_FILE).write_text(json.dumps(values, indent=2) + "\n")
    return directory


def read_settings(directory: Path) -> Settings:
    """Read the settings in the directory of a model's version.

    Raises:
        EESDError: The file is missing or damaged, or has a value that cannot be used.
    """
    path = directory / SETTINGS_FILE
    if not path.exists():
        raise EESDError(f"{path} is missing; {_REMEDY}.")
    raw = read_json_object(path, _REMEDY)
    try:
        for name, kind in (("speculation", Speculation), ("batch", BatchOptions)):
            if raw.get(name) is not None:
                raw[name] = kind(**raw[name])
        return Settings(**raw)
    except TypeError as error:  # an unknown field, or no field
        raise EESDError(f"{path} has fields that do not fit ({error}); {_REMEDY}.") from None
    except EESDError as error:
        raise EESDError(
            f"{path} cannot be used: {str(error).removesuffix('.')}; {_REMEDY}."
        ) from None


def _config(name: str) -> str:
    """Return the configuration of a model. Triton does no batching, because the service in the
    model does it. One instance takes all requests."""
    inputs = ",\n".join(f"  {{ {_tensor(*tensor)} optional: true }}" for tensor in INPUTS)
    outputs = ",\n".join(f"  {{ {_tensor(*tensor)} }}" for tensor in OUTPUTS)
    return f"""# Written by EESD {eesd.__version__}
name: "{name}"
backend: "python"
max_batch_size: 0
model_transaction_policy {{ decoupled: true }}
instance_group [ {{ count: 1 kind: KIND_MODEL }} ]
input [
{inputs}
]
output [
{outputs}
]
"""


def _tensor(name: str, kind: str, size: int) -> str:
    return f'name: "{name}" data_type: TYPE_{kind} dims: [ {size} ]'
