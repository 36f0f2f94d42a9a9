"""Benchmarks and training recipes for the maintainers. Run them from the root of a checkout as
``python -m lab.NAME``. Wheels lack them."""
