# shellcheck shell=bash
# Shared by test.sh and train_example.sh, which source it: makes .venv with torch and builds lockstep into it.
#
# Environment:
#   LOCKSTEP_TORCH_VERSION  torch to install (default 2.11.0)
#   LOCKSTEP_VENV           folder of the virtual environment (default .venv); made when missing, reused when there
#   PYTHON                  the Python that makes it (default python3)
#   MAX_JOBS, CMAKE_ARGS    see setup.py
# Everything may run again: what is there already is kept, and the build is incremental.
set -euo pipefail

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cd "$ROOT"
TORCH_VERSION=${LOCKSTEP_TORCH_VERSION:-2.11.0}
VENV=${LOCKSTEP_VENV:-$ROOT/.venv}
LOGS=$ROOT/build/logs
mkdir -p "$LOGS"
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore

# stage NAME COMMAND...: one line with seconds when it works, the end of its log when it does not.
stage() {
  local name=$1 log start=$SECONDS
  shift
  log=$LOGS/${name// /-}.log
  printf '%-22s ' "$name"
  if "$@" >"$log" 2>&1 </dev/null; then
    printf 'ok %5d s\n' $((SECONDS - start))
  else
    printf 'FAILED after %d s; the end of %s:\n' $((SECONDS - start)) "${log#"$ROOT/"}"
    tail -n 60 "$log"
    exit 1
  fi
}

newer_than() { [ "$(printf '%s\n%s\n' "$1" "$2" | sort -V | head -n 1)" = "$1" ]; }

# The tools that pip does not bring. Arguments: further Debian packages as FILE=PACKAGE, wanted when FILE is missing.
system_packages() {
  local python=${PYTHON:-python3} missing=() pair
  command -v g++ >/dev/null || command -v "${CXX:-c++}" >/dev/null || missing+=(g++)
  command -v ccache >/dev/null || missing+=(ccache)
  if ! command -v "$python" >/dev/null; then
    missing+=(python3 python3-venv python3-dev)
  else
    "$python" -c 'import ensurepip' 2>/dev/null || missing+=(python3-venv)
    "$python" -c 'import os, sys, sysconfig; sys.exit(not os.path.exists(sysconfig.get_path("include") + "/Python.h"))' ||
      missing+=(python3-dev)
  fi
  for pair in "$@"; do
    [ -e "${pair%%=*}" ] || missing+=("${pair#*=}")
  done
  [ ${#missing[@]} -gt 0 ] || return 0

  if command -v apt-get >/dev/null && [ "$(id -u)" = 0 ]; then
    echo "installing ${missing[*]}"
    apt-get update -q && DEBIAN_FRONTEND=noninteractive apt-get install -y -q --no-install-recommends "${missing[@]}"
  else
    # Not fatal here: the names and paths are Debian's, and the build says what it really lacks.
    echo "not found, and not installed because this is no Debian or you are not root: ${missing[*]}"
  fi
}

# .venv with torch and the build tools. A stamp makes the second run cost nothing and need no network.
virtual_environment() {
  local python=${PYTHON:-python3} wanted stamp=$VENV/.lockstep-packages
  "$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { echo "lockstep needs Python 3.10 or newer"; return 1; }
  wanted="torch==$TORCH_VERSION numpy setuptools>=64 wheel"
  newer_than 3.25 "$(cmake --version 2>/dev/null | sed -n 's/^cmake version //p')" || wanted+=" cmake>=3.25"
  command -v ninja >/dev/null || wanted+=" ninja"
  [ -x "$VENV/bin/python" ] || "$python" -m venv "$VENV"
  if [ "$(cat "$stamp" 2>/dev/null)" != "$wanted" ]; then
    # shellcheck disable=SC2086  # one word per requirement
    "$VENV/bin/python" -m pip install $wanted
    echo "$wanted" >"$stamp"
  fi
}

# Builds once, into build/release, and installs the package in place. -v: the build's own lines go to the log.
build_package() {
  "$VENV/bin/python" -m pip install -v --no-build-isolation -e ".[$1]"
}

# set_up EXTRAS CMAKE_ARGS [FILE=PACKAGE...]: everything up to an importable lockstep; activates the environment.
set_up() {
  local extras=$1 cmake_args=$2
  shift 2
  stage "system packages" system_packages "$@"
  stage "torch $TORCH_VERSION" virtual_environment
  export PATH=$VENV/bin:$PATH VIRTUAL_ENV=$VENV
  # Several files at once: torch's headers and templates are what takes the time. A tree that is edited is better off
  # without (-DCMAKE_UNITY_BUILD=OFF in CMAKE_ARGS).
  export CMAKE_ARGS="-DCMAKE_UNITY_BUILD=ON -DCMAKE_UNITY_BUILD_BATCH_SIZE=8 $cmake_args ${CMAKE_ARGS:-}"
  stage "build" build_package "$extras"
  # Which engine this is: worth a line even when all is well.
  sed -n 's/^ *-- \(lockstep: building .*\)/  \1/p' "$LOGS/build.log"
}
