#!/usr/bin/env bash
# Trains the example: makes .venv, installs torch, builds lockstep, and lets two processes train a small convolutional
# net on scikit-learn's handwritten digits with lockstep.DistributedDataParallel. Takes a few minutes the first time.
#
#   scripts/train_example.sh [options of lockstep.examples.digits, such as --epochs 3 or --engine torch]
#
# The last line of the output is the result as JSON. What can be set by environment: scripts/_setup.sh.
# shellcheck source=scripts/_setup.sh
. "$(dirname "${BASH_SOURCE[0]}")/_setup.sh"

set_up examples -DLOCKSTEP_TESTS=OFF

# Two processes share the machine; one thread each is what torchrun would choose, with a warning.
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
exec torchrun --standalone --nproc-per-node 2 -m lockstep.examples.digits "$@"
