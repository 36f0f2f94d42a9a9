#!/bin/sh
# Compile the graphs of an engine directory to TensorRT plans:
#   ./build_engines.sh plans/ [--target tensorrt|tensorrt-rtx] [--precision float16|bfloat16] [--batch B] [--force]
# All options are those of eesd-build (eesd-build --help).
set -eu
if ! command -v eesd-build > /dev/null; then
    echo "eesd-build is not installed; install it with: pip install 'eesd[tensorrt-rtx]' (or 'eesd[tensorrt]')." >&2
    exit 2
fi
exec eesd-build "$@"
