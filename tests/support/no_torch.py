"""Code that makes packages impossible to import."""


def blocker(*packages: str) -> str:
    """Returns code. After it has run, these packages cannot be imported."""
    return f"""
import sys

class Blocker:
    blocked = {set(packages)!r}

    def find_spec(self, name, path=None, target=None):
        package = name.partition(".")[0]
        if package in self.blocked:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=package)

sys.meta_path.insert(0, Blocker())
"""


HEAVY = ("torch", "transformers")
"""Packages that the CPU path never needs."""
BLOCK = blocker(*HEAVY, "safetensors", "huggingface_hub", "onnx", "ml_dtypes")
"""Code that makes torch and the packages for exporting impossible to import."""
