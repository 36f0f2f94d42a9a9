"""Benchmarks: measure engines (``measure``), replay controllers on recorded traces (``replay``),
write reports (``report``).

``report`` imports ``replay`` and ``measure``, and ``replay`` imports ``measure``.
"""
