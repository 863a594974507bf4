#!/usr/bin/env bash
# Run on a machine with a GPU and no network: deploy/gpu-kit.sh [arguments of tests/benchmarks/gpu.py].
# Needs Python 3.12 with torch 2.11 or newer, Transformers, PEFT and pytest; the rest comes from the folder that
# `make gpu-kit` filled (KIT, default .gpu-kit). Called again, it goes on; what is done lies in .gpu-results.
set -euo pipefail
cd "$(dirname "$0")/.."
kit=${KIT:-.gpu-kit} python=${PYTHON:-python3} results=${RESULTS:-.gpu-results}
mkdir -p "$results"
site=$(cd "$results" && pwd)/site
if [ ! -e "$site/ready" ]; then
    rm -rf "$site"
    # Nothing that the machine has is replaced but by the versions that this project is tested with, in a folder aside.
    "$python" -m pip install --quiet --no-index --no-deps --no-compile --disable-pip-version-check --target "$site" "$kit"/*.whl
    touch "$site/ready"
fi
# Every part is a process of its own: without compiled modules each would take twice as long to start.
unset PYTHONDONTWRITEBYTECODE
export PYTHONPATH="$PWD:$site${PYTHONPATH:+:$PYTHONPATH}"
code=0
"$python" tests/benchmarks/gpu.py --out "$results" "$@" || code=$?
# Where the caller takes files from a folder of its own.
[ -z "${OUT:-}" ] || cp "$results"/gpu.json "$results"/gpu.md "$OUT"/
exit "$code"
