"""``python -m eesd.bench.peers``."""

from eesd.bench.peers.cli import main

main(prog_name="python -m eesd.bench.peers")
