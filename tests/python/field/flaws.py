"""Engines that do one thing wrong on purpose: a case that is right on one of them proves nothing about that thing."""

from __future__ import annotations

import os
import warnings
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_map

import lockstep


class Alone(lockstep.DistributedDataParallel):
    """Communicates with nobody: each rank trains for itself."""

    def __init__(self, module: torch.nn.Module, **options: Any) -> None:
        groups = [dist.new_group([rank]) for rank in range(dist.get_world_size())]
        for name in ("process_group", "device_mesh"):
            options.pop(name, None)
        super().__init__(module, process_group=groups[dist.get_rank()], **options)


class Undivided(lockstep.DistributedDataParallel):
    """Hands out sums instead of means."""

    def __init__(self, module: torch.nn.Module, **options: Any) -> None:
        super().__init__(module, **options)
        self.register_reduced_hook(lambda parameter: parameter.grad.mul_(self.process_group.size()))


class Half(lockstep.DistributedDataParallel):
    """Leaves every second parameter to itself."""

    def __init__(self, module: torch.nn.Module, **options: Any) -> None:
        names = [name for name, parameter in module.named_parameters() if parameter.requires_grad]
        known = list(getattr(module, "_ddp_params_and_buffers_to_ignore", []))
        self._set_params_and_buffers_to_ignore_for_model(module, known + names[1::2])
        super().__init__(module, **options)


class Forgetful(lockstep.DistributedDataParallel):
    """Loses a hundredth of every gradient on its way."""

    def __init__(self, module: torch.nn.Module, **options: Any) -> None:
        super().__init__(module, **options)
        self.register_reduced_hook(lambda parameter: parameter.grad.mul_(0.99))


class OwnBuffers(lockstep.DistributedDataParallel):
    """Never synchronises a buffer."""

    def __init__(self, module: torch.nn.Module, **options: Any) -> None:
        options |= {"broadcast_buffers": False}
        options.pop("forward_sync_buffers", None)
        super().__init__(module, **options)

    def will_sync_module_buffers(self) -> bool:
        return False


class Careless(lockstep.DistributedDataParallel):
    """Looks at no argument that could be wrong, and takes no care of unused parameters."""

    def __init__(self, module: torch.nn.Module, **options: Any) -> None:
        kept = {name: value for name, value in options.items() if name in ("bucket_cap_mb", "process_group")}
        super().__init__(module, **kept)


class Noisy(lockstep.DistributedDataParallel):
    """Adds to every gradient what nobody can foresee: another number in each run, the same on all ranks."""

    def __init__(self, module: torch.nn.Module, **options: Any) -> None:
        super().__init__(module, **options)
        seed = torch.tensor([int.from_bytes(os.urandom(4), "little")])
        dist.broadcast(seed, 0, group=self.process_group)
        generator = torch.Generator().manual_seed(int(seed))
        self.register_reduced_hook(lambda p: p.grad.add_(torch.rand((), generator=generator), alpha=1e-4))


class Filler(lockstep.DistributedDataParallel):
    """Gives zeros to parameters that have no gradient."""

    def _pre_forward(self, *inputs: Any, **kwargs: Any) -> Any:
        for parameter in self.module.parameters():
            if parameter.grad is None and torch.is_grad_enabled():
                parameter.grad = torch.zeros_like(parameter)
        return super()._pre_forward(*inputs, **kwargs)


class Alarmist(lockstep.DistributedDataParallel):
    """Warns in every forward of gradients that stay local, which they do not."""

    def _post_forward(self, output: Any) -> Any:
        warnings.warn("gradients stay on this rank [LS-023]", lockstep.LocalGradientWarning, stacklevel=2)
        return super()._post_forward(output)


class Meddler(lockstep.DistributedDataParallel):
    """Hands out other outputs than the module's: copies that need gradients, with numbers of their own."""

    def _post_forward(self, output: Any) -> Any:
        def meddle(leaf: Any) -> Any:
            if not isinstance(leaf, torch.Tensor) or not leaf.is_floating_point():
                return leaf
            return leaf * 1.001 + torch.zeros((), requires_grad=True)

        return tree_map(meddle, super()._post_forward(output))


FLAWS: dict[str, type] = {
    cls.__name__.lower(): cls
    for cls in (Alone, Undivided, Half, Forgetful, OwnBuffers, Careless, Noisy, Filler, Alarmist, Meddler)
}
