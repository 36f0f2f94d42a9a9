"""EESD inside Triton Inference Server, by its Python backend.

``repository`` writes a model repository. ``model`` and its imports run inside Triton and need
Triton's own module.
"""
