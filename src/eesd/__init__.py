"""EESD: early-exiting speculative decoding as engines.

``eesd.load(engine_dir)`` opens an exported engine directory and returns an :class:`eesd.LLM` that generates text token for
token as the model alone would, only faster. Imports here are lazy: ``import eesd`` costs nothing and never needs torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from eesd.common.errors import EESDError as EESDError
    from eesd.runtime.decoding.sampling import Sampling as Sampling
    from eesd.runtime.decoding.session import Session as Session
    from eesd.runtime.llm import LLM as LLM
    from eesd.runtime.llm import Completion as Completion
    from eesd.runtime.llm import load as load

__version__ = "0.1.0"

_HOMES = {
    "EESDError": "eesd.common.errors",
    "LLM": "eesd.runtime.llm",
    "Completion": "eesd.runtime.llm",
    "load": "eesd.runtime.llm",
    "Sampling": "eesd.runtime.decoding.sampling",
    "Session": "eesd.runtime.decoding.session",
}

__all__ = ["LLM", "Completion", "EESDError", "Sampling", "Session", "__version__", "load"]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'eesd' has no attribute {name!r}")
