"""ik_llama.cpp, from a directory with its source and its build, which the environment variable
``IK_LLAMA_CPP`` names.

Decodes plainly, plainly from weights that it repacks when it loads them (``rtr``), or with drafts
by n-grams of the text.
"""

import ctypes
import os
import subprocess
from pathlib import Path
from typing import Any

PACKAGE = "ik_llama.cpp"
FILE = "model.gguf"
SOURCE = Path(__file__).with_name("ik_llama_cpp.cpp")


def home() -> Path:
    """Its directory."""
    if not (found := os.environ.get("IK_LLAMA_CPP")):
        raise RuntimeError(
            "the environment variable IK_LLAMA_CPP must name a directory with its source and "
            "its build"
        )
    return Path(found).resolve()


def version(_: str) -> str:
    """The commit of its source."""
    done = subprocess.run(
        ["git", "-C", str(home()), "rev-parse", "--short", "HEAD"],
        capture_output=True,
        text=True,
        check=False,
    )
    return done.stdout.strip() or "of unknown version"


def convert(model: str, output: str, _: str) -> None:
    """Link to the file, and compile what calls its library, with its headers."""
    directory = Path(output)
    root = home()
    directory.mkdir(parents=True, exist_ok=True)
    (directory / FILE).symlink_to(model)
    libraries = [root / "build" / "src", root / "build" / "ggml" / "src"]
    command = [
        "c++",
        "-std=c++17",
        "-O2",
        "-shared",
        "-fPIC",
        "-Wl,--disable-new-dtags",
        "-o",
        str(directory / "peer.so"),
        str(SOURCE),
    ]
    command += [str(root / "common" / name) for name in ("ngram-cache.cpp", "log.cpp")]
    command += [
        f"-I{root / part}"
        for part in ("include", "src", "common", "ggml/include", "ggml/src", "vendor")
    ]
    command += [option for path in libraries for option in (f"-L{path}", f"-Wl,-rpath,{path}")]
    done = subprocess.run(
        [*command, "-lllama", "-lggml", "-pthread"], capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise RuntimeError(f"c++ fails: {done.stderr}")


class Contestant:
    def __init__(self, path: str, options: dict[str, Any]) -> None:
        directory = Path(path)
        self.lib = ctypes.CDLL(str(directory / "peer.so"))
        self.lib.peer_open.restype = ctypes.c_void_p
        self.lib.peer_pass.restype = ctypes.c_double
        self.lookup = options["mode"] == "lookup"
        file = str(directory / FILE).encode()
        repack = options["mode"] == "rtr"
        found = self.lib.peer_open(file, options["slots"], options["threads"], repack)
        if not found:
            raise RuntimeError(f"ik_llama.cpp cannot load {directory / FILE}")
        self.model = ctypes.c_void_p(found)

    def generate(self, prompt: list[int], count: int) -> tuple[list[int], list[float]]:
        tokens = (ctypes.c_int32 * count)()
        seconds = (ctypes.c_double * count)()
        if not self.lib.peer_generate(
            self.model, _ids(prompt), len(prompt), count, self.lookup, tokens, seconds
        ):
            raise RuntimeError("llama_decode failed")
        return [*tokens], [*seconds]

    def prefill(self, tokens: list[int], start: int) -> float:
        """Fill the cache from a position on, with the logits of the last token. Gives the
        seconds."""
        return self._pass(tokens, start, every=False)

    def passes(self, rows: int, behind: int, count: int) -> list[float]:
        """Seconds of ``count`` passes over ``rows`` tokens, which give the logits of each token.
        The cache stays as it was."""
        return [self._pass([7] * rows, behind, every=True) for _ in range(count)]

    def slot_bytes(self) -> int:
        """Bytes of keys and values of a token."""
        return int(self.lib.peer_slot_bytes(self.model))

    def logits(self, tokens: list[int]) -> None:
        """None: they are nearly those of llama.cpp."""

    def _pass(self, tokens: list[int], start: int, every: bool) -> float:
        seconds = float(self.lib.peer_pass(self.model, _ids(tokens), len(tokens), start, every))
        if seconds < 0:
            raise RuntimeError("llama_decode failed")
        return seconds


load = Contestant


def _ids(tokens: list[int]) -> Any:
    return (ctypes.c_int32 * len(tokens))(*tokens)
