#!/usr/bin/env bash
# Runs every test: makes .venv, installs torch, builds lockstep with its tests, checks the sources (layers, ruff,
# clang-format), then GoogleTest through CTest, the core under sanitizers, and pytest.
#
#   scripts/test.sh [arguments of pytest, such as -k hooks or -m 'not slow']
#
# One line per stage; a stage that fails shows the end of its log. What can be set by environment: scripts/_setup.sh.
# shellcheck source=scripts/_setup.sh
. "$(dirname "${BASH_SOURCE[0]}")/_setup.sh"

format_check() {
  find csrc tests \( -name '*.h' -o -name '*.cpp' -o -name '*.cu' \) -print0 |
    xargs -0 clang-format --dry-run --Werror
}

# GCC's ThreadSanitizer needs the old layout of addresses, which newer kernels only give without randomisation.
fixed_addresses() {
  if setarch "$(uname -m)" -R true 2>/dev/null; then setarch "$(uname -m)" -R "$@"; else "$@"; fi
}

# The core needs no torch, so it can be built and run under sanitizers in seconds.
sanitized() {
  cmake --preset "$1" -DPython_EXECUTABLE="$VENV/bin/python" &&
    fixed_addresses cmake --build --preset "$1" --parallel 2 &&
    fixed_addresses ctest --preset "$1"
}

# Kernels that no GPU will run here need no more than one architecture.
command -v nvidia-smi >/dev/null || export TORCH_CUDA_ARCH_LIST=${TORCH_CUDA_ARCH_LIST:-9.0}
set_up test,examples -DLOCKSTEP_TESTS=ON \
  /usr/include/gtest/gtest.h=libgtest-dev /usr/include/gmock/gmock.h=libgmock-dev

stage "layers" python scripts/check_layers.py
stage "ruff" ruff check .
if command -v clang-format >/dev/null; then
  stage "clang-format" format_check
fi
stage "core asan+ubsan" sanitized asan
stage "core tsan" sanitized tsan
stage "ctest" ctest --test-dir build/release --output-on-failure --no-tests=error --parallel 2
awk '/\[  PASSED  \]/ { passed += $4 } END { print passed + 0 " C++ tests passed" }' build/release/Testing/Temporary/LastTest.log

# pytest last and in the open: its closing line is the verdict. lockstep_testing is found by processes that tests start.
export PYTHONPATH=$ROOT/build/release/testing${PYTHONPATH:+:$PYTHONPATH}
# Two at a time: most tests wait for ranks that do not come, or for processes that start.
python -m pytest --no-header -n 2 --dist loadgroup "$@"
