"""EESD inside Triton Inference Server, by its Python backend.

``repository`` writes a model repository. ``model`` and what it imports run inside Triton, whose own
module they need.
"""
