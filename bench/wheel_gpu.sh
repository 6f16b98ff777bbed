#!/bin/bash
# The released x86_64 wheel and the artifact for `kernels` on a machine with a GPU, as they are installed: no build, no network.
#
#   bench/wheel_gpu.sh [WHEEL] [HUB_FOLDER]      (default: those of `make wheels hub`, under build/)
#
# The wheel goes into an environment over the packages of this Python, which has torch. Each part is a process; the exit status
# is that of the worst. TESTS=1 runs `pytest -m gpu` on the installed wheel as well.
set -uo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
wheel=${1:-$(ls build/wheels/lowbit-*manylinux_2_28_x86_64.whl)}
hub=${2:-build/hub/quant-matmul}
variant=$hub/build/torch-stable-abi210-cu130-x86_64-linux
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-4} PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1
unset PYTHONPATH

failed=""
part() {
  echo "== ${*:2}"
  timeout "$1" "${@:2}" || failed+="; ${*:2} ended with $?"
}

"$python" -m venv --system-site-packages "$place/env" || exit 2
# the packages of an environment around this one come too
"$python" -c 'import site, sys; print("\n".join(p for p in sys.path if p.endswith("-packages")))' \
  >"$(echo "$place"/env/lib/python3*/site-packages)/around.pth"
inside=$place/env/bin/python
"$inside" -m pip install -q --no-deps --no-index --force-reinstall "$wheel" || exit 2
root=$PWD
[ -d "$variant" ] || failed+="; $variant is not there"
cd "$place" || exit 2
part 300 "$inside" -m lowbit doctor
part 300 "$inside" "$root/wheels/smoke.py"
part 300 "$inside" "$root/wheels/smoke_gpu.py" "$root/$variant"
if "$inside" -c 'import kernels' 2>/dev/null; then
  LOWBIT_HUB=$root/$hub part 600 "$inside" -m pytest -q -p no:logging "$root/hub/test_hub.py"
else
  echo "SKIPPED hub/test_hub.py: this Python has no package kernels"
fi
cd "$root" || exit 2
[ -z "${TESTS:-}" ] || part 900 "$inside" -m pytest -q -m gpu
if [ -n "$failed" ]; then
  echo "wheel_gpu: failed: ${failed#; }" >&2
  exit 1
fi
echo "wheel_gpu: all parts passed"
