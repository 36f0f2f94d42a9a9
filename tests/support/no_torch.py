"""Code that makes torch and the packages of exporting impossible to import."""

BLOCK = """
import sys

class Blocker:
    blocked = {
        "torch", "transformers", "safetensors", "huggingface_hub", "onnx",
        "ml_dtypes",
    }

    def find_spec(self, name, path=None, target=None):
        package = name.partition(".")[0]
        if package in self.blocked:
            raise ModuleNotFoundError(f"No module named {name!r}", name=package)

sys.meta_path.insert(0, Blocker())
"""
