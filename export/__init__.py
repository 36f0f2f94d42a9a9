"""Export models to engine directories, inspect them, and build TensorRT plans."""
