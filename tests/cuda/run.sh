#!/usr/bin/env bash
# All that a GPU can tell about saecli, in about five minutes on an H100:
#
#     tests/cuda/run.sh [FOLDER] [--device cpu]
#
# Needs saecli's dependencies, not saecli installed, and no network. Writes cuda.md, a table, and cuda.json into FOLDER
# (else $OUT, else cuda-day), and ends with status 1 if a part failed; the table then has its error. With --device cpu
# it does the same in small sizes.
set -euo pipefail
root=$(cd "$(dirname "$0")/../.." && pwd)
folder=${OUT:-cuda-day}
if [ $# -gt 0 ] && [ "${1#-}" = "$1" ]; then
    folder=$1
    shift
fi
export PYTHONPATH="$root:$root/tests:$root/tests/benchmarks:$root/tests/cuda${PYTHONPATH:+:$PYTHONPATH}"
export OMP_WAIT_POLICY=passive
exec "${PYTHON:-python3}" "$root/tests/cuda/day.py" --out "$folder" "$@"
