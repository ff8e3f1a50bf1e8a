#!/usr/bin/env bash
# Runs a benchmark on two simulated hosts, one process each: network namespaces joined by a pair of virtual devices whose
# bandwidth tc limits in both directions. As root, with iproute2. What rank 0 prints is shown.
#
#   benchmarks/two_hosts.sh RATE SCRIPT [ARGUMENTS...]        RATE as tc writes it: 1gbit, 100mbit
set -euo pipefail

[ $# -ge 2 ] || { sed -n '2,/^[^#]/{/^#/s/^# \{0,1\}//p}' "$0" >&2; exit 2; }
rate=$1
shift
name=lockstep$$

cleanup() {
  local side
  for side in 0 1; do
    ip netns pids "$name-$side" 2>/dev/null | xargs -r kill 2>/dev/null || true
    ip netns del "$name-$side" 2>/dev/null || true
  done
}
trap cleanup EXIT

for side in 0 1; do ip netns add "$name-$side"; done
ip link add eth77 netns "$name-0" type veth peer name eth77 netns "$name-1"
for side in 0 1; do
  ip -n "$name-$side" addr add "10.77.0.$((side + 1))/24" dev eth77
  ip -n "$name-$side" link set lo up
  ip -n "$name-$side" link set eth77 up
  ip netns exec "$name-$side" tc qdisc add dev eth77 root tbf rate "$rate" burst 1mb latency 50ms
done

# The variables of torchrun, which the script takes itself to be started by.
on_host() {
  ip netns exec "$name-$1" env RANK="$1" LOCAL_RANK=0 WORLD_SIZE=2 LOCAL_WORLD_SIZE=1 MASTER_ADDR=10.77.0.1 \
    MASTER_PORT=29577 TORCHELASTIC_RUN_ID="$name" GLOO_SOCKET_IFNAME=eth77 OMP_NUM_THREADS=1 "${PYTHON:-python3}" "${@:2}"
}
on_host 1 "$@" >/dev/null &
on_host 0 "$@"
wait
