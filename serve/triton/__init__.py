"""Run EESD inside Triton Inference Server, with its Python backend.

``repository`` writes a model repository. ``model`` and the modules that it imports run inside
Triton, and need the module that Triton provides.
"""
