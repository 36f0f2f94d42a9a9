"""From a model to an engine directory: ``draft.onnx``, ``verify.onnx``, ``weights.bin``, tokenizer and ``manifest.json``."""
