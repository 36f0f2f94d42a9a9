"""``--model``: the first start exports into a cache and runs, later ones run what is there; and ``eesd-cache``."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import click
import pytest
from support.command import assert_one_line, assert_refused, contents, export_engine, listing, notice, run, succeed
from support.killing import kill_command
from support.no_torch import BLOCK
from test_serve_process import started  # noqa: F401

from eesd.common.turns import turn
from eesd.export import cache as caches
from eesd.export import make
from eesd.export.cache_cli import main as cache_main
from eesd.export.cli import main as export_main
from eesd.runtime.cli import main as run_main
from eesd.runtime.engine_options import EXPORT_OPTIONS
from eesd.serve.cli import main as serve_main

ASK = ("-p", "hello", "-n", 12, "--no-stats")
EXITS = ("--exit-layer", 1)
