"""``python -m lab.peers``."""

from lab.peers.cli import main

main(prog_name="python -m lab.peers")
