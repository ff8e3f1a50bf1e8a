#!/usr/bin/env bash
# Builds and tests against several torch versions, one after the other, each in an environment of its own that is
# removed afterwards (about 5 GB while it is there). Prints a table for the README.
#
#   scripts/test_versions.sh [VERSION...]        (default: 2.11.0 2.12.1 2.13.0 2.14.1 2.15.0)
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."
versions=("$@")
[ ${#versions[@]} -gt 0 ] || versions=(2.11.0 2.12.1 2.13.0 2.14.1 2.15.0)
logs=build/versions
mkdir -p "$logs"

echo "| torch | C++ tests | Python tests |"
echo "| --- | --- | --- |"
status=0
for version in "${versions[@]}"; do
  environment=$PWD/build/venv-$version
  rm -rf build/release # one torch's objects are no use to another
  if LOCKSTEP_TORCH_VERSION=$version LOCKSTEP_VENV=$environment scripts/test.sh >"$logs/$version.log" 2>&1; then :; else
    status=1
  fi
  # The closing lines of the C++ tests and of pytest; a run that never got there shows a dash.
  ctest=$(sed -n 's/^\([0-9]*\) C++ tests \(passed\)$/\1 \2/p' "$logs/$version.log" | tail -n 1)
  pytest=$(sed -n 's/^=* *\([0-9].* in [0-9.]*s[^=]*\)=*$/\1/p' "$logs/$version.log" | tail -n 1)
  echo "| $version | ${ctest:--} | ${pytest:--} |"
  rm -rf "$environment"
done
exit $status
