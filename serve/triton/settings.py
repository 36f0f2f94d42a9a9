"""What a model repository says about the engines: ``eesd.json`` in the directory of the model's version."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from eesd.common.checks import check_integer, check_path
from eesd.common.errors import EESDError
from eesd.common.json_input import read_json_object
from eesd.runtime.batch.scheduler import BatchOptions
from eesd.runtime.llm import Speculation

SETTINGS_FILE = "eesd.json"
DRAFTING = Speculation()
BATCH = BatchOptions()
_REMEDY = "write the repository again"


@dataclass(frozen=True, kw_only=True)
class Settings:
    """How Triton runs an engine directory.

    Attributes:
        engine_dir: The engine directory, as Triton sees it. A relative path begins at the directory of the model's version.
        backend: ``auto``, ``tensorrt``, ``ort`` or ``torch``.
        threads: CPU threads of an engine; None: the processors of the process.
        speculation: How to draft; None decodes plainly.
        batch: Limits of the batch.
        generation_config, exact, activations, kv_cache_dtype, plain_content: As for :func:`eesd.load`.

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

    def __post_init__(self) -> None:
        check_path("engine_dir", self.engine_dir, "the output directory of eesd-export")
        if self.threads is not None:
            check_integer("threads", self.threads, 1, 1 << 16)

    def to_dict(self) -> dict[str, Any]:
        """All fields, as JSON values."""
        return asdict(self)


def read_settings(directory: Path) -> Settings:
    """The settings in the directory of a model's version.

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
    except TypeError as error:  # another field, or none
        raise EESDError(f"{path} has fields that do not fit ({error}); {_REMEDY}.") from None
    except EESDError as error:
        raise EESDError(f"{path} cannot be used: {str(error).removesuffix('.')}; {_REMEDY}.") from None
