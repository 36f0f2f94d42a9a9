"""``--link-weights``: weights that stay in the checkpoint's own files, which the engine directory holds as hard links.

Hard links, because they alone are taken by all: ONNX Runtime follows no symbolic link that leaves the directory, nobody takes
``..`` or an absolute path. What the graphs refer to is then safe from the checkpoint being moved, deleted or fetched again, but
not from being written into, which the manifest's :class:`~eesd.export.manifest.LinkInfo` finds.
"""

import errno
import os
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch

from eesd.common.errors import EESDError
from eesd.common.manifest import LinkInfo
from eesd.export.weights import TensorSource
from eesd.model.checkpoint import StoredTensor


def linkable(sources: Mapping[str, TensorSource], dtype: str) -> dict[str, StoredTensor]:
    """The weights that can be used where they lie: of the engine's type, and at a multiple of its width (torch maps no other).

    Raises :class:`EESDError` when none of the checkpoint's own can.
    """
    wanted: torch.dtype = getattr(torch, dtype)
    stored = {name: source for name, source in sources.items() if isinstance(source, StoredTensor)}
    found = {name: tensor for name, tensor in stored.items() if tensor.dtype == wanted and tensor.offset % wanted.itemsize == 0}
    if not found:
        other = next(iter(stored.values())).dtype
        raise EESDError(
            f"--link-weights uses the checkpoint's weights as they are, and none of them lies there as {dtype} "
            f"(the first is {str(other).removeprefix('torch.')}): leave the option out, or give the checkpoint's own --dtype."
        )
    return found


def link_files(directory: Path, tensors: Iterable[StoredTensor]) -> dict[str, LinkInfo]:
    """Link the files of some tensors into a directory, under their own names."""
    paths = sorted({tensor.path for tensor in tensors})
    for path in paths:
        link(path, directory / path.name, "give an --output beside the checkpoint, or leave --link-weights out")
    return {path.name: LinkInfo.of(path) for path in paths}


def link(path: Path, name: Path, advice: str) -> None:
    """A hard link to a file, or to what a symbolic link (such as those of the hub's cache) leads to; ``advice`` is for who
    cannot have it."""
    try:
        os.link(path.resolve(), name)
    except OSError as error:
        if error.errno not in (errno.EXDEV, errno.EPERM, errno.EMLINK, errno.ENOTSUP):
            raise
        raise EESDError(
            f"{path} cannot be linked into {name.parent.parent} ({error.strerror}): hard links need one file system that has "
            f"them and files of one's own; {advice}."
        ) from None
