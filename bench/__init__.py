"""Benchmarks: measure engines (``measure``), replay controllers on recorded traces (``replay``),
write reports (``report``).

``report`` imports ``replay`` and ``measure``, ``replay`` imports ``measure``, and never the other
way. ``tools`` are for the maintainers, and not in wheels.
"""
