"""``python -m eesd.bench.tools.peers``."""

from eesd.bench.tools.peers.cli import main

main(prog_name="python -m eesd.bench.tools.peers")
