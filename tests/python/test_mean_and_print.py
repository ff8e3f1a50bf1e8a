"""The weighted mean over ranks, and what rank 0 prints."""

from __future__ import annotations

import io
import logging
import math

import pytest
import torch
import torch.distributed as dist

import lockstep
from lockstep import _print


def _mean_by_rank(values: list, weights: list):
    return lockstep.mean(values[dist.get_rank()], weights[dist.get_rank()])


def test_the_mean_counts_each_sample_once_and_not_each_rank(ranks):
    # Rank 0: 3 samples of mean 1. Rank 1: 1 sample of 2. All four: (3 * 1 + 2) / 4. A mean of means would be 1.5.
    assert ranks.run(_mean_by_rank, [1.0, 2.0], [3, 1]) == [1.25, 1.25]


def test_a_rank_without_samples_does_not_count_even_with_nan(ranks):
    assert ranks.run(_mean_by_rank, [math.nan, 2.0], [0, 5]) == [2.0, 2.0]


def test_tensors_and_mappings_keep_shape_and_type(ranks):
    values = [{"loss": 1.0, "hits": torch.tensor([[1, 2]])}, {"loss": 4.0, "hits": torch.tensor([[4, 8]])}]
    for result in ranks.run(_mean_by_rank, values, [2, torch.tensor(1)]):
        assert result["loss"] == 2.0 and isinstance(result["loss"], float)
        torch.testing.assert_close(result["hits"], torch.tensor([[2.0, 4.0]], dtype=torch.float64))


def _half_mean() -> torch.Tensor:
    return lockstep.mean(torch.full((2,), 2049.0 if dist.get_rank() else 1.0, dtype=torch.float16), 1)


def test_half_precision_is_summed_in_double_and_rounded_once(ranks):
    # fp16 cannot hold 2049: it is 2048 on rank 1. (2048 + 1) / 2 = 1024.5, which fp16 rounds to the even 1024.
    assert [result.tolist() for result in ranks.run(_half_mean)] == [[1024.0, 1024.0]] * 2


def _mean_of(value, weight=1.0):
    return lockstep.mean(value, weight)


def test_all_weights_zero_is_an_error_on_every_rank(ranks):
    for error in ranks.outcomes(_mean_of, 1.0, 0):
        assert isinstance(error, ValueError) and "no mean" in str(error) and "LS-143" in str(error)


def test_without_a_group_it_is_the_mean_over_one_rank():
    assert lockstep.mean(3.0, 7) == 3.0
    weighted = torch.tensor([1.0, 2.0], requires_grad=True)
    assert lockstep.mean(weighted).tolist() == [1.0, 2.0]


@pytest.mark.parametrize(
    ("value", "weight", "error"),
    [("text", 1, TypeError), (1.0, -1, ValueError), (1.0, math.nan, ValueError), (1.0, torch.ones(2), ValueError)],
)
def test_bad_input_is_named(value, weight, error):
    with pytest.raises(error, match="LS-143"):
        lockstep.mean(value, weight)


def _printed() -> str:
    out = io.StringIO()
    lockstep.print0("loss", torch.tensor(0.5), torch.tensor([1, 2]), file=out)
    return out.getvalue()


def test_only_rank_0_prints(ranks):
    assert ranks.run(_printed) == ["loss 0.5 tensor([1, 2])\n", ""]


def test_log0_formats_tensors_and_respects_the_level(caplog):
    logger = logging.getLogger("lockstep.test")
    with caplog.at_level(logging.INFO, logger.name):
        lockstep.log0(logger, logging.INFO, "step %d: %.2f", 3, torch.tensor(0.25))
        lockstep.log0(logger, logging.DEBUG, "hidden")
    assert [record.getMessage() for record in caplog.records] == ["step 3: 0.25"]


class SlowDevice:
    """Stands for a GPU: a copy is complete when the test says so."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.arrived = self.waited = False
        monkeypatch.setattr(_print, "start_copy", lambda tensor: (tensor.clone(), self))

    def query(self) -> bool:
        return self.arrived

    def synchronize(self) -> None:
        self.arrived = self.waited = True


def test_lines_wait_for_their_tensors_but_the_host_does_not(monkeypatch):
    device, out = SlowDevice(monkeypatch), io.StringIO()
    loss = torch.tensor(1.0)

    lockstep.print0("loss", loss, file=out)
    loss.fill_(9)  # the next step overwrites it
    lockstep.print0("no tensor", file=out)

    assert out.getvalue() == "" and not device.waited
    device.arrived = True
    lockstep.print0("next", file=out)
    assert out.getvalue() == "loss 1.0\nno tensor\nnext\n" and not device.waited


def test_flush_waits_for_the_device(monkeypatch):
    device, out = SlowDevice(monkeypatch), io.StringIO()
    lockstep.print0(torch.tensor(2), file=out)
    lockstep.flush0()
    assert out.getvalue() == "2\n" and device.waited
