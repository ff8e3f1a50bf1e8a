"""One of two ranks on GPUs goes wrong: the other gets a named error within the group's timeout, and nobody hangs.

With two GPUs they are connected as NCCL chooses, on one by sockets (gpus.join_nccl).

LOCKSTEP_FAULT_ROUNDS=20 pytest tests/python/test_cuda_faults.py    # each fault 20 times
"""

from __future__ import annotations

import os

import pytest

import cuda_faults
import own_processes
from cuda_faults import GROUP_TIMEOUT
from faults import THRESHOLD, Told
from gpus import COMMUNICATORS, NEEDS_GPU

pytestmark = NEEDS_GPU

ROUNDS = range(int(os.environ.get("LOCKSTEP_FAULT_ROUNDS", "1")))
#: In seconds: when the watchdog calls it a hang. Two processes import torch, connect, and wait for the fault to show.
LIMIT = 60.0
#: In seconds from the fault to the error: the threshold, the silence that makes a rank dead, and a few looks.
WITHIN = THRESHOLD + 6.0


def _told(fault: str, communicator: str, reads_loss: bool, lost: tuple[int, ...] = ()) -> dict[int, str]:
    """By rank that lives on: what it was told. Nobody hangs, and all is said within the group's timeout."""
    answers = own_processes.run(
        cuda_faults.train,
        fault,
        1,
        communicator,
        reads_loss,
        ranks=2,
        limit=LIMIT,
        lost=lost,
        join=cuda_faults.join_with_short_timeout,
    )
    texts = {}
    for rank in {0, 1} - set(lost):
        assert rank in answers, f"rank {rank} hangs; the others: {answers}"
        told = answers[rank]
        assert isinstance(told, Told), f"rank {rank}: {told!r}"
        assert told.text, f"rank {rank} was told nothing; the others: {answers}"
        assert told.seconds < GROUP_TIMEOUT, f"rank {rank} was told after {told.seconds:.1f} s: {told.text}"
        texts[rank] = told.text
        if lost:
            assert told.seconds < WITHIN, f"rank {rank} was told after {told.seconds:.1f} s: {told.text}"
    return texts


@pytest.mark.parametrize("round", ROUNDS)
@pytest.mark.parametrize("reads_loss", [True, False], ids=["reads_loss", "runs_ahead"])
@pytest.mark.parametrize("communicator", COMMUNICATORS)
def test_a_rank_killed_in_a_collective_is_named(communicator: str, reads_loss: bool, round: int):
    texts = _told("killed_in_backward", communicator, reads_loss, lost=(1,))
    assert "rank 1 has not been heard of" in texts[0] and "[LS-021]" in texts[0], texts[0]


@pytest.mark.parametrize("round", ROUNDS)
@pytest.mark.parametrize("communicator", COMMUNICATORS)
def test_a_device_side_assert_is_told_to_the_other_rank(communicator: str, round: int):
    # Rank 1 has CUDA's error, but c10d's own watchdog ends its process, sooner or later.
    texts = _told("device_assert", communicator, reads_loss=True, lost=(1,))
    failed = "its device has failed" in texts[0] and "[LS-035]" in texts[0]
    died = "rank 1 has not been heard of" in texts[0] and "[LS-021]" in texts[0]
    assert failed or died, texts[0]


@pytest.mark.parametrize("communicator", COMMUNICATORS)
def test_out_of_memory_while_packing_names_the_bucket(communicator: str):
    texts = _told("out_of_memory", communicator, reads_loss=True)
    assert "OutOfMemoryError" in texts[1] and "while reducing bucket" in texts[1], texts[1]
    assert "rank 1" in texts[0] and "[LS-0" in texts[0], texts[0]


@pytest.mark.parametrize("communicator", COMMUNICATORS)
def test_ranks_with_other_bucket_plans_are_told_so(communicator: str):
    texts = _told("other_bucket_size", communicator, reads_loss=True)
    for text in texts.values():
        assert "different bucket plans" in text and "[LS-019]" in text, text


@pytest.mark.parametrize("communicator", COMMUNICATORS)
def test_two_ranks_on_one_gpu_are_refused(communicator: str):
    answers = own_processes.run(cuda_faults.wraps, communicator, ranks=2, limit=LIMIT, join=cuda_faults.join_on_one_gpu)
    for rank in (0, 1):
        assert "Duplicate GPU" in answers[rank].text, answers[rank]
        assert answers[rank].seconds < GROUP_TIMEOUT
