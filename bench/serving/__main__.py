"""``python -m eesd.bench.serving``."""

from eesd.bench.serving.cli import main

main(prog_name="python -m eesd.bench.serving")
