"""Builds for the CPU: packed weights, and graphs of this project's operators."""
