"""EESD is early-exiting speculative decoding with exported engines.

``eesd.load(engine_dir)`` opens an exported engine directory and returns an :class:`eesd.LLM`. It
generates the tokens that the model alone would generate, only faster. Imports are lazy, so ``import
eesd`` costs nothing and never needs torch.
"""

# Type checkers treat this name as typing.TYPE_CHECKING, whose import would take most of the time of
# ``import eesd``.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from eesd.common.errors import EESDError as EESDError
    from eesd.runtime.batch.scheduler import BatchOptions as BatchOptions
    from eesd.runtime.batch.service import Service as Service
    from eesd.runtime.constraint import make_constraint as make_constraint
    from eesd.runtime.decoding.sampling import Sampling as Sampling
    from eesd.runtime.decoding.stats import RoundResult as RoundResult
    from eesd.runtime.decoding.stats import Stats as Stats
    from eesd.runtime.llm import LLM as LLM
    from eesd.runtime.llm import Completion as Completion
    from eesd.runtime.llm import Piece as Piece
    from eesd.runtime.llm import Speculation as Speculation
    from eesd.runtime.llm import load as load
    from eesd.runtime.request import QueueFullError as QueueFullError
    from eesd.runtime.request import Request as Request
    from eesd.runtime.request import TokenLogprob as TokenLogprob
    from eesd.runtime.request import Update as Update
    from eesd.runtime.session import Session as Session

__version__ = "0.1.0"

_NAMES = {
    "eesd.common.errors": ["EESDError"],
    "eesd.runtime.request": ["QueueFullError", "Request", "TokenLogprob", "Update"],
    "eesd.runtime.batch.scheduler": ["BatchOptions"],
    "eesd.runtime.batch.service": ["Service"],
    "eesd.runtime.constraint": ["make_constraint"],
    "eesd.runtime.decoding.sampling": ["Sampling"],
    "eesd.runtime.session": ["Session"],
    "eesd.runtime.decoding.stats": ["RoundResult", "Stats"],
    "eesd.runtime.llm": ["LLM", "Completion", "Piece", "Speculation", "load"],
}
_HOMES = {name: home for home, names in _NAMES.items() for name in names}

__all__ = [  # a list of constants, which type checkers understand
    "LLM",
    "BatchOptions",
    "Completion",
    "EESDError",
    "Piece",
    "QueueFullError",
    "Request",
    "RoundResult",
    "Sampling",
    "Service",
    "Session",
    "Speculation",
    "Stats",
    "TokenLogprob",
    "Update",
    "__version__",
    "load",
    "make_constraint",
]


def __getattr__(name: str) -> object:
    if name in _HOMES:
        from importlib import import_module

        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'eesd' has no attribute {name!r}")
