"""Helpers that the tests share. They make checkpoints and engines, run commands, and check
losslessness."""
