#!/usr/bin/env bash
# Run on a machine with a GPU and no network: deploy/gpu-kit.sh [arguments of tests/benchmarks/gpu.py]
# Again and again, until it has nothing left to do. It needs Python 3.12 with torch 2.11 or newer, NumPy and pytest; the
# rest comes from the folder that `make gpu-kit` filled (KIT, default .gpu-kit). Results lie in .gpu-results/gpu.json
# (and in $OUT): on another machine, or where that file was removed, it goes on from the one that is taken along.
set -euo pipefail
cd "$(dirname "$0")/.."
kit=${KIT:-.gpu-kit} python=${PYTHON:-python3} results=${RESULTS:-.gpu-results} work=${WORK:-.gpu-work}
mkdir -p "$results" "$work"
site=$(cd "$work" && pwd)/site
if [ ! -e "$site/ready" ]; then
    [ -n "$(ls "$kit"/*.whl 2>/dev/null)" ] || { echo "$kit has no wheels: run \`make gpu-kit\`, take it along" >&2; exit 1; }
    rm -rf "$site"
    # Nothing that the machine has is replaced but by the versions that this project is tested with, in a folder aside.
    "$python" -m pip install --quiet --no-index --no-deps --no-compile --disable-pip-version-check --target "$site" "$kit"/*.whl
    touch "$site/ready"
fi
# Two copies: $work stays on this machine between commands, $results may be replaced by what the caller takes along.
[ -e "$work/gpu.json" ] || [ ! -e "$results/gpu.json" ] || cp "$results/gpu.json" "$work/"
# In memory, where there is room: a model of 16 GB is written once and read often. In a folder of one's own: everyone may
# write beside it. It goes with the last part.
models=$(cd "$work" && pwd)/models shared=/dev/shm/gpu-kit-models.$(id -u)
if [ "$(df --output=avail --block-size=1G /dev/shm 2>/dev/null | tail -1)" -gt 45 ] 2>/dev/null &&
    mkdir -p -m 700 "$shared" && [ -O "$shared" ] && [ ! -L "$shared" ]; then
    models=$shared
fi
# Every part is a process of its own: without compiled modules each would take twice as long to start.
unset PYTHONDONTWRITEBYTECODE
export PYTHONPATH="$PWD:$site${PYTHONPATH:+:$PYTHONPATH}"
COMMIT=$(cat "$kit/commit" 2>/dev/null || echo unknown)
export COMMIT
code=0
"$python" tests/benchmarks/gpu.py --out "$work" --models "${MODELS:-$models}" "$@" || code=$?
cp "$work"/gpu.json "$work"/gpu.md "$work"/gpu.xml "$results"/ 2>/dev/null || true
exit "$code"
