"""Train a small convolutional net on handwritten digits with several processes.

Two processes, on CPU, or on two GPUs where there are two::

    torchrun --standalone --nproc-per-node 2 -m lockstep.examples.digits

One process needs no torchrun: ``python -m lockstep.examples.digits``. The program uses scikit-learn, which brings the
data (1,797 real images of 8x8 pixels), and rich, which draws the progress bar.

Progress goes to stderr. The last line of rank 0's stdout is one JSON object, the report. Its ``accuracy`` is measured
on images not trained on. Its ``rank_difference`` is the largest difference of a parameter between two ranks: 0.0 when
data parallelism works. With ``--against-single`` its ``single_difference`` is the largest difference to one process
that trained on the same batches: rounding. With ``--engine torch`` the same program runs on torch's own engine.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import json
import math
import os
import time
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.nn  # before a group exists: see process_group
from rich.console import Console
from rich.progress import Progress
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.functional import cross_entropy, gelu
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parameters_to_vector
from torch.utils.data import TensorDataset

from lockstep.examples import _checkpoint, _options
from lockstep.examples._data import Batch, concatenate, in_groups, load_data, rank_batches

HOOKS = {
    "allreduce": default_hooks.allreduce_hook,
    "fp16": default_hooks.fp16_compress_hook,
    "bf16": default_hooks.bf16_compress_hook,
}


class DigitNet(nn.Module):
    """Two convolutions and one linear layer: 9,930 parameters.

    Built so that ``--against-single`` compares equal trainings. No dropout and no batch normalisation: what they
    compute depends on how a batch is split over processes. No ReLU and no max pooling: at their kinks a rounding error
    picks another branch, and training enlarged that to 1e-2 within sixteen epochs.
    """

    def __init__(self) -> None:
        """Draw the starting weights from torch's global random generator."""
        super().__init__()
        self.conv1 = nn.Conv2d(1, 16, kernel_size=3, padding=1)
        self.conv2 = nn.Conv2d(16, 32, kernel_size=3, padding=1, stride=2)
        self.head = nn.Linear(32 * 4 * 4, 10)

    def forward(self, images: Tensor) -> Tensor:
        """Return logits (n, 10) for images (n, 1, 8, 8)."""
        features = gelu(self.conv2(gelu(self.conv1(images))))
        return self.head(features.flatten(1))


def summed_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the summed cross entropy; smoothed labels keep 1,437 images from being learned by heart."""
    return cross_entropy(logits, labels, reduction="sum", label_smoothing=0.1)


@contextlib.contextmanager
def process_group() -> Iterator[torch.device]:
    """Join the other processes, yield this one's device, and leave the group however the body ends.

    NCCL where each process of this machine has a GPU of its own, else gloo on CPU. Without torchrun, a world of one.

    Leaving joins the group's threads, unless something still holds the group. One that does is easily overlooked:
    ``torch.distributed.nn``, which ``DistributedDataParallel`` imports, keeps the group of that moment in default
    arguments. A thread that outlives ``main`` can abort the process while Python shuts down ("terminate called without
    an active exception"), so this file imports that module before any group exists.
    """
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    local_world_size = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if torch.cuda.device_count() >= local_world_size:
        device, backend = torch.device("cuda", local_rank), "nccl"
        torch.cuda.set_device(device)
        torch.backends.cudnn.deterministic = True  # a resumed run repeats the uninterrupted one
        torch.backends.cudnn.allow_tf32 = False  # 10-bit products would drown --against-single in rounding
    else:
        device, backend = torch.device("cpu"), "gloo"
        torch.set_num_threads(1)  # a net this small gains nothing from more, and waits for them on a busy machine

    timeout = timedelta(minutes=2)  # how long to wait for a rank that died
    if "RANK" in os.environ:
        dist.init_process_group(backend, timeout=timeout)
    else:
        dist.init_process_group(backend, timeout=timeout, store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield device
    finally:
        dist.destroy_process_group()


def make_training(args: argparse.Namespace, device: torch.device) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return a fresh net, which depends on the seed only, and its optimizer."""
    torch.manual_seed(args.seed)
    module = DigitNet().to(device)
    return module, torch.optim.SGD(module.parameters(), lr=args.lr, momentum=0.9)


def data_parallel(module: nn.Module, args: argparse.Namespace, device: torch.device) -> DistributedDataParallel:
    """Wrap ``module`` so that a backward pass leaves the mean over ranks in each parameter's ``.grad``."""
    engine = DistributedDataParallel
    if args.engine == "lockstep":
        import lockstep

        engine = lockstep.DistributedDataParallel
    device_ids = [device.index] if device.type == "cuda" else None
    model = engine(module, device_ids=device_ids, gradient_as_bucket_view=args.views)
    if args.hook != "none":
        model.register_comm_hook(None, HOOKS[args.hook])  # no state: these hooks then use the default group
    return model


def train_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, micro_batches: Sequence[Batch], device: torch.device
) -> Tensor:
    """Make one optimizer step from all micro-batches; return their summed loss (scalar, float64, on ``device``).

    Only the last micro-batch communicates. Losses are divided by the samples of the whole step, so the gradient is
    that of one large batch, also where the last micro-batch of an epoch is smaller than the others.
    """
    samples = sum(len(labels) for _, labels in micro_batches)
    loss_sum = torch.zeros((), dtype=torch.float64, device=device)
    optimizer.zero_grad()
    for number, (images, labels) in enumerate(micro_batches, start=1):
        accumulate_only = isinstance(model, DistributedDataParallel) and number < len(micro_batches)
        with model.no_sync() if accumulate_only else contextlib.nullcontext():
            loss = summed_loss(model(images.to(device)), labels.to(device))
            (loss / samples).backward()
        loss_sum += loss.detach()
    optimizer.step()
    return loss_sum


@torch.no_grad()
def evaluate(module: nn.Module, test_set: TensorDataset, device: torch.device) -> tuple[float, float]:
    """Return mean loss and accuracy; the ranks share the images out, and each image counts exactly once.

    No ``DistributedSampler`` here: to give every rank equally many images it repeats some, which then count twice.
    """
    rank, world_size = dist.get_rank(), dist.get_world_size()
    images, labels = (tensor[rank::world_size].to(device) for tensor in test_set.tensors)
    logits = module(images)
    correct = (logits.argmax(dim=1) == labels).sum()
    totals = torch.stack([summed_loss(logits, labels).double(), correct.double()])
    dist.all_reduce(totals)
    mean_loss, accuracy = (totals / len(test_set)).tolist()
    return mean_loss, accuracy


def rank_difference(module: nn.Module) -> float:
    """Return the largest absolute difference of a parameter between any two ranks."""
    flat = parameters_to_vector(module.parameters()).detach()
    of_all_ranks = [torch.empty_like(flat) for _ in range(dist.get_world_size())]
    dist.all_gather(of_all_ranks, flat)
    stacked = torch.stack(of_all_ranks)
    return (stacked.amax(dim=0) - stacked.amin(dim=0)).max().item()


def train(
    module: nn.Module,
    optimizer: torch.optim.Optimizer,
    first_epoch: int,
    args: argparse.Namespace,
    device: torch.device,
) -> dict[str, Any]:
    """Train on all ranks from ``first_epoch`` up to ``args.epochs``; return the measured part of the report.

    Raises:
        SystemExit: on every rank, if the test loss is infinite or no number.
    """
    rank, world_size = dist.get_rank(), dist.get_world_size()
    train_set, test_set = load_data()
    model = data_parallel(module, args, device)
    loss, samples = None, 0
    test_loss, accuracy = evaluate(module, test_set, device)
    start = time.perf_counter()
    with Progress(console=Console(stderr=True), disable=rank != 0) as progress:
        bar = progress.add_task("training")
        for epoch in range(first_epoch, args.epochs):
            batches = rank_batches(train_set, args, epoch, rank, world_size)
            steps = math.ceil(len(batches) / args.accumulate)
            progress.update(bar, total=steps * (args.epochs - first_epoch))
            loss_sum = torch.zeros((), dtype=torch.float64, device=device)
            for micro_batches in in_groups(batches, args.accumulate):
                loss_sum += train_step(model, optimizer, micro_batches, device)
                progress.advance(bar)

            dist.all_reduce(loss_sum)
            samples_of_epoch = len(batches.sampler) * world_size
            samples += samples_of_epoch
            loss = loss_sum.item() / samples_of_epoch
            test_loss, accuracy = evaluate(module, test_set, device)
            if not math.isfinite(test_loss):  # a mean over ranks: either all of them stop here or none
                raise SystemExit(f"[rank {rank}] test loss is {test_loss} after epoch {epoch + 1}: try a smaller --lr")
            if rank == 0:
                progress.console.print(f"epoch {epoch + 1}: loss {loss:.4f}, test accuracy {accuracy:.4f}")
                if args.checkpoint is not None:
                    _checkpoint.save(args.checkpoint, epoch + 1, run_settings(args), module, optimizer)
    seconds = time.perf_counter() - start
    return {
        "accuracy": accuracy,
        "loss": loss,
        "test_loss": test_loss,
        "rank_difference": rank_difference(module),
        "seconds": round(seconds, 3),
        "samples_per_second": round(samples / seconds, 1),
    }


def train_single(
    start: tuple[dict[str, Any], dict[str, Any]],
    first_epoch: int,
    world_size: int,
    args: argparse.Namespace,
    device: torch.device,
) -> nn.Module:
    """Return the plain net trained in this process alone, from the states of ``start``, on the batches of all ranks."""
    module, optimizer = make_training(args, device)
    module.load_state_dict(start[0])
    optimizer.load_state_dict(start[1])
    train_set, _ = load_data()
    for epoch in range(first_epoch, args.epochs):
        of_ranks = [rank_batches(train_set, args, epoch, rank, world_size) for rank in range(world_size)]
        global_batches = (concatenate(parts) for parts in zip(*of_ranks, strict=True))
        for micro_batches in in_groups(global_batches, args.accumulate):
            train_step(module, optimizer, micro_batches, device)
    return module


def run_settings(args: argparse.Namespace) -> dict[str, Any]:
    """Return what decides a run's numbers; a checkpoint goes on under the same settings only."""
    names = ("seed", "batch_size", "accumulate", "lr", "hook")
    return {"world_size": dist.get_world_size()} | {name: getattr(args, name) for name in names}


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the program; ``arguments`` replaces the command line.

    Raises:
        SystemExit: with status 2 for bad options or an unusable checkpoint, on every rank.
    """
    parser = _options.make_parser()
    args = parser.parse_args(arguments)
    _options.check(parser, args)

    with process_group() as device:
        rank, world_size = dist.get_rank(), dist.get_world_size()
        module, optimizer = make_training(args, device)
        first_epoch = 0
        if args.resume:
            try:
                first_epoch = _checkpoint.restore(args.checkpoint, run_settings(args), args.epochs, module, optimizer)
            except _checkpoint.CheckpointError as error:
                parser.error(f"argument --resume: {error}")
        start = copy.deepcopy((module.state_dict(), optimizer.state_dict()))
        report: dict[str, Any] = {"engine": args.engine} | run_settings(args)
        report |= {"epochs": args.epochs, "first_epoch": first_epoch, "views": args.views}
        report |= {"device": device.type, "backend": dist.get_backend(), "torch": torch.__version__}
        report |= train(module, optimizer, first_epoch, args, device)

    # The other ranks are done. What follows needs no communication, so they do not wait for it.
    if rank == 0:
        if args.against_single:
            single = train_single(start, first_epoch, world_size, args, device)
            difference = parameters_to_vector(module.parameters()) - parameters_to_vector(single.parameters())
            report["single_difference"] = difference.abs().max().item()
        print(json.dumps(report, allow_nan=False), flush=True)


if __name__ == "__main__":
    main()
