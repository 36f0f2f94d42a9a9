"""Benchmarks: measure engines (``measure``), replay controllers on recorded traces (``replay``),
write reports (``report``).

``report`` imports ``replay`` and ``measure``; ``replay`` imports ``measure``.
"""
