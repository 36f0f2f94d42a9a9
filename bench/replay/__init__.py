"""Replay controllers on recorded traces, without an engine and under any cost model."""
