#!/usr/bin/env bash
# Builds lockstep for Hopper and runs on this machine's GPUs what needs them: the C++ tests with their CUDA part, the
# kernels under compute-sanitizer, and the benchmarks. Needs a CUDA toolkit, torch in python3, CMake, ninja and
# GoogleTest; installs nothing.
#
#   scripts/gpu_check.sh OUT_FOLDER
#
# OUT_FOLDER receives gpu_check.log (everything), gpu_check.json (one row per stage), and the benchmarks' JSON. Exits with
# the number of stages that failed. By environment: PYTHON, LOCKSTEP_BUILD_DIR (default build/gpu), TORCH_CUDA_ARCH_LIST
# (default 9.0), LOCKSTEP_GPU_STAGES (a subset of: build tests bench step_tax memcheck racecheck, which is the default,
# and hook_tax step_tax_sockets), LOCKSTEP_STEP_SECONDS (for each benchmark of whole steps, default 240).
# shellcheck disable=SC2317  # the stages are called by name
set -uo pipefail

[ $# = 1 ] || { sed -n '2,/^[^#]/{/^#/s/^# \{0,1\}//p}' "$0" >&2; exit 2; }
mkdir -p "$1"
OUT=$(cd "$1" && pwd)
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 2
BUILD=${LOCKSTEP_BUILD_DIR:-$PWD/build/gpu}
PYTHON=${PYTHON:-python3}
STAGES=${LOCKSTEP_GPU_STAGES:-build tests bench step_tax memcheck racecheck}
LOG=$OUT/gpu_check.log
GPUS=$(nvidia-smi --list-gpus 2>/dev/null | wc -l)
SECONDS_OF_STEPS=${LOCKSTEP_STEP_SECONDS:-240}
export BUILD OUT PYTHON GPUS SECONDS_OF_STEPS  # for the stages, which run in shells of their own
export TORCH_CUDA_ARCH_LIST=${TORCH_CUDA_ARCH_LIST:-9.0} NCCL_NVLS_ENABLE=${NCCL_NVLS_ENABLE:-0}
: >"$LOG"
rows=()
failures=0

# stage NAME SECONDS COMMAND...: runs it with a time limit; one line here, everything in the log.
stage() {
  local name=$1 limit=$2 start=$SECONDS status before
  shift 2
  [[ " $STAGES " == *" ${name%% *} "* ]] || return 0
  printf '\n==== %s\n' "$name" >>"$LOG"
  before=$(wc -l <"$LOG")
  timeout -k 10 "$limit" bash -c '"$@"' "$name" "$@" >>"$LOG" 2>&1 </dev/null
  status=$?
  rows+=("{\"stage\": \"$name\", \"status\": $status, \"seconds\": $((SECONDS - start))}")
  if [ $status = 0 ]; then
    printf '%-24s ok %5d s\n' "$name" $((SECONDS - start))
  else
    printf '%-24s FAILED (status %d) after %d s; the end of its log:\n' "$name" $status $((SECONDS - start))
    tail -n +$((before + 1)) "$LOG" | tail -n 40
    failures=$((failures + 1))
  fi
  return "$status"
}

skip() {
  printf '%-24s skipped: %s\n' "$1" "$2"
  rows+=("{\"stage\": \"$1\", \"status\": \"skipped: $2\"}")
}

# Also lays the package out in $BUILD/site, for benchmarks written in Python.
build() {
  local python=ON
  "$PYTHON" -c 'import os, sys, sysconfig; sys.exit(not os.path.exists(sysconfig.get_path("include") + "/Python.h"))' ||
    { python=OFF; echo "no Python.h here: the Python module is left out"; }
  cmake -S . -B "$BUILD" -G Ninja -DCMAKE_BUILD_TYPE=Release -DLOCKSTEP_CUDA=on -DLOCKSTEP_TESTS=ON \
    -DLOCKSTEP_PYTHON="$python" -DPython_EXECUTABLE="$(command -v "$PYTHON")" && cmake --build "$BUILD" || return
  [ "$python" = ON ] || return 0
  mkdir -p "$BUILD/site" && cp -r python/lockstep "$BUILD/site/" || return
  local component
  for component in cpp python; do
    cmake --install "$BUILD" --prefix "$BUILD/site/lockstep" --component "$component" || return
  done
  PYTHONPATH=$BUILD/site "$PYTHON" -c 'from lockstep import _C; print("lockstep with NCCL", _C.nccl_version())'
}

bench() { "$BUILD/lockstep_pack_bench" >"$OUT/pack_bench.json" && cat "$OUT/pack_bench.json"; }

# Without torch's cache each tensor has an allocation of its own, so that a step over its end is seen. What fills the
# memory or starts other ranks is left out.
sanitized() {
  PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool "$1" --error-exitcode 1 \
    "$BUILD/lockstep_cuda_tests" --gtest_filter='*/PackCuda.*:*HookKernelsCuda.*:-*UpTo1600*:*OneLarge*'
}

# steps SCRIPT NAME OPTION...: one of the benchmarks of whole steps on all GPUs; results in $OUT/NAME.json and NAME.png,
# a short table at the end, whether a contender failed or not.
steps() {
  local script=$1 name=$2 status
  shift 2
  PYTHONPATH=$BUILD/site "$PYTHON" -m torch.distributed.run --standalone --nproc-per-node "$GPUS" \
    "benchmarks/$script.py" --budget-seconds "$SECONDS_OF_STEPS" \
    --json "$OUT/$name.json" --picture "$OUT/$name.png" "$@"
  status=$?
  PYTHONPATH=$BUILD/site "$PYTHON" "benchmarks/$script.py" --markdown "$OUT/$name.json"
  return "$status"
}

export -f build bench steps sanitized

{
  nvidia-smi --query-gpu=name,driver_version,compute_cap,memory.total --format=csv,noheader
  nvcc --version | tail -n 2
  "$PYTHON" -c 'import torch; print("torch", torch.__version__, "sees", torch.cuda.device_count(), "GPUs")'
} 2>&1 | tee -a "$LOG"

if stage build 500 build || [ -x "$BUILD/lockstep_cuda_tests" ]; then
  stage tests 400 ctest --test-dir "$BUILD" --output-on-failure --no-tests=error --parallel 4
  stage bench 120 bench
  if [ "$GPUS" -gt 1 ]; then
    stage step_tax $((SECONDS_OF_STEPS + 90)) steps step_tax step_tax
    stage hook_tax $((SECONDS_OF_STEPS + 90)) steps hook_tax hook_tax
  else
    skip step_tax "needs two GPUs"
  fi
  # Ranks that share a GPU talk over sockets, too.
  stage step_tax_sockets $((SECONDS_OF_STEPS + 90)) env NCCL_P2P_DISABLE=1 NCCL_SHM_DISABLE=1 \
    GPUS=$((GPUS > 1 ? GPUS : 2)) bash -c 'steps step_tax step_tax_sockets --wire "sockets of one host"'
  if command -v compute-sanitizer >/dev/null; then
    stage memcheck 200 sanitized memcheck
    stage racecheck 200 sanitized racecheck
  else
    skip sanitizers "no compute-sanitizer here"
  fi
fi

printf '{"failures": %d, "stages": [%s]}\n' "$failures" "$(IFS=,; echo "${rows[*]}")" >"$OUT/gpu_check.json"
exit "$failures"
