"""Helpers shared by the tests: checkpoints, engines, commands, and the checks of losslessness."""
