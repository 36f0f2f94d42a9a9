#!/bin/sh
# Build TensorRT plans from the graphs of an engine directory:
#   ./build_engines.sh plans/ [--target tensorrt|tensorrt-rtx] [--precision float16|bfloat16] [--batch B] [--force]
# It takes the options of eesd-build; see eesd-build --help.
set -eu
if ! command -v eesd-build > /dev/null; then
    echo "eesd-build is not installed; install it in a checkout with: pip install '.[tensorrt-rtx]' (or '.[tensorrt]')." >&2
    exit 2
fi
exec eesd-build "$@"
