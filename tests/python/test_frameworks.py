"""Frameworks that build torch's class by name train on our engine after ``lockstep.install()``."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

import lockstep
from models import Reversed
from oracle import assert_bit_equal_on_all_ranks, rank_data


def _needs(package: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(importlib.util.find_spec(package) is None, reason=f"{package} is not installed")


def _environment() -> None:
    """What torchrun would set. The group exists already; frameworks must find it and not make another one."""
    os.environ.update(
        RANK=str(dist.get_rank()),
        LOCAL_RANK=str(dist.get_rank()),
        WORLD_SIZE=str(dist.get_world_size()),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT="29400",
    )


def _reductions(model: nn.Module) -> int:
    assert type(model) is lockstep.DistributedDataParallel
    return model.reducer.num_reductions()


def _accelerate() -> int:
    _environment()
    lockstep.install()
    try:
        from accelerate import Accelerator, DistributedDataParallelKwargs
        from accelerate.utils import DDPCommunicationHookType

        accelerator = Accelerator(
            cpu=True,
            gradient_accumulation_steps=2,
            kwargs_handlers=[
                DistributedDataParallelKwargs(gradient_as_bucket_view=True, comm_hook=DDPCommunicationHookType.FP16)
            ],
        )
        torch.manual_seed(0)
        module = Reversed()
        model, optimizer = accelerator.prepare(module, torch.optim.SGD(module.parameters(), lr=0.1))
        for step in range(4):
            with accelerator.accumulate(model):
                accelerator.backward(model(rank_data(3, 6, step=step)).square().mean())
                optimizer.step()
                optimizer.zero_grad()
        assert_bit_equal_on_all_ranks(module.parameters(), "parameter")
        assert accelerator.unwrap_model(model) is module
        return _reductions(model)
    finally:
        lockstep.uninstall()


@_needs("accelerate")
def test_accelerate_trains_with_hook_and_accumulation(broken_ranks):
    assert broken_ranks.run(_accelerate, timeout=110) == [2, 2]


def _lightning(folder: str) -> int:
    _environment()
    lockstep.install()
    try:
        import lightning

        class Task(lightning.LightningModule):
            def __init__(self) -> None:
                super().__init__()
                self.net = Reversed()
                self.reductions = 0

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return self.net(x)

            def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
                return self(batch[0]).square().mean()

            def on_train_end(self) -> None:
                self.reductions = _reductions(self.trainer.strategy.model)  # unwrapped when fit returns

            def configure_optimizers(self) -> torch.optim.Optimizer:
                return torch.optim.SGD(self.parameters(), lr=0.1)

            def train_dataloader(self) -> torch.utils.data.DataLoader:
                data = torch.utils.data.TensorDataset(torch.randn(8, 6, generator=torch.Generator().manual_seed(3)))
                return torch.utils.data.DataLoader(data, batch_size=2)

        torch.manual_seed(dist.get_rank())
        trainer = lightning.Trainer(
            accelerator="cpu",
            devices=dist.get_world_size(),
            strategy="ddp",
            max_epochs=1,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            default_root_dir=folder,
        )
        task = Task()
        trainer.fit(task)
        assert_bit_equal_on_all_ranks(task.parameters(), "parameter")
        return task.reductions
    finally:
        lockstep.uninstall()


@_needs("lightning")
def test_lightnings_ddp_strategy_trains(broken_ranks, tmp_path):
    assert broken_ranks.run(_lightning, str(tmp_path), timeout=110) == [2, 2]


def _checkpoint(folder: str) -> None:
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    model = lockstep.DistributedDataParallel(Reversed())
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    for step in range(2):
        optimizer.zero_grad()
        model(rank_data(3, 6, step=step)).sum().backward()
        optimizer.step()
    parameters, state = get_state_dict(model, optimizer)
    assert all(not name.startswith("module.") for name in parameters)
    dcp.save({"model": parameters, "optimizer": state}, checkpoint_id=folder)

    again = lockstep.DistributedDataParallel(Reversed())
    optimizer = torch.optim.Adam(again.parameters(), lr=0.1)
    parameters, state = get_state_dict(again, optimizer)
    loaded = {"model": parameters, "optimizer": state}
    dcp.load(loaded, checkpoint_id=folder)
    set_state_dict(again, optimizer, model_state_dict=loaded["model"], optim_state_dict=loaded["optimizer"])
    for ours, theirs in zip(again.parameters(), model.parameters(), strict=True):
        assert torch.equal(ours, theirs)
    for entry in optimizer.state.values():
        assert entry["step"] == 2


def test_distributed_checkpoints_are_saved_and_loaded_without_the_module_prefix(ranks, tmp_path):
    ranks.run(_checkpoint, str(tmp_path / "checkpoint"))


SUITE = Path(__file__).with_name("torch_suite.py")


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_tests_that_ship_inside_torch_pass_on_our_engine():
    done = subprocess.run([sys.executable, str(SUITE)], capture_output=True, text=True, timeout=590, check=False)
    passed, failed, _skipped = (int(part.split()[0]) for part in done.stdout.strip().splitlines()[-1].split(", "))
    assert failed == 0 and passed >= 10, done.stdout[-4000:] + done.stderr[-4000:]
