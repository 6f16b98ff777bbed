#!/bin/bash
# What an owner of a GPU runs (make bench-l4): bench/bench_gpu.sh 8.9 checks every CUDA kernel on a chip of that compute
# capability, times it, adds the lines to bench/results/cuda/<date>-<chip>.jsonl and makes docs/numbers.md anew.
# Each part is a process: one that hangs or faults costs itself alone. Nothing is timed where a check failed.
set -uo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
export PYTHONUNBUFFERED=1
lines=$("$python" bench/gpu_check.py --target "${1:?the compute capability, as 8.9}") || exit 2
failed=""
part() {
  echo "== ${*:2}"
  timeout "$1" "$python" bench/gpu_check.py "${@:2}" || failed+=" $2${3:+-$3}"
}
part 300 quantize
for mode in w4ch w4two w8 w4grp; do part 600 gemm $mode; done
part 300 gemv
part 300 int4
part 120 rope
part 300 overlap
part 300 module
if [ -n "$failed" ]; then
  echo "checks failed:$failed; nothing was timed" >&2
  exit 1
fi
part 300 error "$lines"
part 900 speed speed4 chain "$lines"
part 300 joined "$lines"
part 600 peers "$lines"
part 120 rope "$lines"
"$python" -m lowbit bench numbers bench/results/*.jsonl bench/results/cuda/*.jsonl --out docs/numbers.md || exit 1
echo "lines: $lines${failed:+; these parts failed:$failed}"
[ -z "$failed" ]
