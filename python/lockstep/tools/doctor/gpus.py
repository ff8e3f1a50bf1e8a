"""GPUs, their links to the host and to one another, and who else uses them. Asks the driver through nvidia-ml-py."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from lockstep.tools.doctor.finding import Finding, Status

_NOT_CHECKED = "driver, GPUs, PCIe links, NVLink, peer access, other processes on the GPUs"

#: nvmlGpuTopologyLevel -> words, as `nvidia-smi topo -m` names them.
_DISTANCE = {
    0: "same board",
    10: "one PCIe switch (PIX)",
    20: "several PCIe switches (PXB)",
    30: "one PCIe host bridge (PHB)",
    40: "one NUMA node (NODE)",
    50: "across sockets (SYS)",
}


def check(busy: bool = False) -> Iterator[Finding]:
    """What NVML says; what cannot be checked where there is no driver, or no nvidia-ml-py. ``busy``: as ``examine``."""
    try:
        import pynvml
    except ModuleNotFoundError:
        detail = "nvidia-ml-py is not installed: pip install 'torch-lockstep[tools]'."
        yield Finding("GPUs", _NOT_CHECKED, Status.UNCHECKED, "-", detail)
        return
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        detail = "There is no NVIDIA driver, so this machine has no usable GPU. Training on CPU works."
        yield Finding("GPUs", _NOT_CHECKED, Status.UNCHECKED, str(error), detail)
        return
    try:
        yield from examine(pynvml, torch.version.cuda, torch.cuda.is_available(), busy)
    finally:
        pynvml.nvmlShutdown()


def examine(nvml: Any, runtime: str | None, usable: bool, busy: bool = False) -> Iterator[Finding]:
    """The findings for an initialised ``nvml``.

    Args:
        runtime: version of torch's CUDA runtime, such as "13.0"; None: torch is a CPU build.
        usable: whether torch can use a GPU.
        busy: the GPUs have just been at work, so that a slow PCIe link is no saving of power.
    """
    yield driver(nvml.nvmlSystemGetDriverVersion(), nvml.nvmlSystemGetCudaDriverVersion(), runtime, usable)
    handles = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())]
    for index, handle in enumerate(handles):
        yield from _one_gpu(nvml, index, handle, busy)
    for first in range(len(handles)):
        for second in range(first + 1, len(handles)):
            yield _pair(nvml, f"{first} and {second}", handles[first], handles[second])


def driver(version: str, cuda: int, runtime: str | None, usable: bool) -> Finding:
    """Whether the driver is new enough for torch. ``cuda``: 1000 * major + 10 * minor, as NVML gives it."""
    value = f"{version}, for CUDA up to {cuda // 1000}.{cuda % 1000 // 10}"
    if runtime is None:
        detail = "This torch is a CPU build and cannot use the GPUs: install the CUDA build."
        return Finding("GPUs", "driver", Status.WARNING, value, detail)
    if int(runtime.split(".")[0]) > cuda // 1000:  # minor versions are compatible within a major one
        detail = f"The driver is too old for torch's CUDA {runtime}: update it, or install a torch for an older CUDA."
        return Finding("GPUs", "driver", Status.PROBLEM, value, detail)
    if not usable:
        detail = "There are GPUs, but torch cannot use them: CUDA_VISIBLE_DEVICES, or a container without devices."
        return Finding("GPUs", "driver", Status.PROBLEM, value, detail)
    return Finding("GPUs", "driver", Status.OK, value)


def _one_gpu(nvml: Any, index: int, handle: Any, busy: bool) -> Iterator[Finding]:
    memory = nvml.nvmlDeviceGetMemoryInfo(handle)
    name = nvml.nvmlDeviceGetName(handle)
    value = f"{name}, {memory.free / 2**30:.0f} of {memory.total / 2**30:.0f} GiB free"
    yield Finding("GPUs", f"GPU {index}", Status.INFO, value)
    try:
        now = nvml.nvmlDeviceGetCurrPcieLinkGeneration(handle), nvml.nvmlDeviceGetCurrPcieLinkWidth(handle)
        most = nvml.nvmlDeviceGetMaxPcieLinkGeneration(handle), nvml.nvmlDeviceGetMaxPcieLinkWidth(handle)
    except nvml.NVMLError as error:
        yield Finding("GPUs", f"GPU {index} PCIe", Status.UNCHECKED, str(error))
    else:
        yield pcie_link(f"GPU {index} PCIe", now, most, busy)
    others = _processes(nvml, handle)
    if others is None:
        yield Finding("GPUs", f"GPU {index} processes", Status.UNCHECKED, "the driver does not tell")
    elif others:
        detail = "Others compute here: times will not be comparable, and memory may not suffice."
        yield Finding("GPUs", f"GPU {index} processes", Status.WARNING, ", ".join(map(str, others)), detail)
    else:
        yield Finding("GPUs", f"GPU {index} processes", Status.OK, "none")


def pcie_link(name: str, now: tuple[int, int], most: tuple[int, int], busy: bool) -> Finding:
    """``now`` and ``most``: generation and lanes. Each generation has twice the bandwidth of the one before."""
    value = f"generation {now[0]} of {most[0]}, {now[1]} of {most[1]} lanes"
    if now[1] < most[1]:
        detail = "Fewer lanes than the GPU has: another slot, a riser, or a shared switch halves the bandwidth."
        return Finding("GPUs", name, Status.WARNING, value, detail)
    if busy and now[0] < most[0]:  # an idle GPU lowers the generation to save power, never the width
        detail = "An older generation than the GPU has: the slot, a riser, or a setting of the firmware."
        return Finding("GPUs", name, Status.WARNING, value, detail)
    return Finding("GPUs", name, Status.OK, value)


def _processes(nvml: Any, handle: Any) -> list[int] | None:
    try:
        return [process.pid for process in nvml.nvmlDeviceGetComputeRunningProcesses(handle)]
    except nvml.NVMLError:
        return None


def _number(constant: Any) -> int:
    """A constant of nvidia-ml-py, of which some releases make tuples by a comma too many."""
    return constant[0] if isinstance(constant, tuple) else constant


def _pair(nvml: Any, name: str, first: Any, second: Any) -> Finding:
    links = _links_between(nvml, first, second)
    try:
        state = nvml.nvmlDeviceGetP2PStatus(first, second, _number(nvml.NVML_P2P_CAPS_INDEX_READ))
        peers = state == nvml.NVML_P2P_STATUS_OK
    except nvml.NVMLError as error:
        return Finding("GPUs", f"GPUs {name}", Status.UNCHECKED, str(error))
    value = f"{links or _distance(nvml, first, second)}, peer access {'yes' if peers else 'no'}"
    if not peers:
        detail = "They exchange data through host memory: IOMMU, virtualisation, or a GPU without peer access."
        return Finding("GPUs", f"GPUs {name}", Status.WARNING, value, detail)
    return Finding("GPUs", f"GPUs {name}", Status.OK, value)


def _distance(nvml: Any, first: Any, second: Any) -> str:
    try:
        return _DISTANCE.get(nvml.nvmlDeviceGetTopologyCommonAncestor(first, second), "unknown distance")
    except nvml.NVMLError:  # virtual machines hide it
        return "unknown distance"


def _links_between(nvml: Any, first: Any, second: Any) -> str:
    """In words, the active NVLinks of ``first`` that end at ``second`` or at an NVSwitch; empty: there are none."""
    count = hidden = 0
    for link in range(nvml.NVML_NVLINK_MAX_LINKS):
        try:
            if not nvml.nvmlDeviceGetNvLinkState(first, link):
                continue
        except nvml.NVMLError:
            break  # it has no more
        try:
            switch = nvml.nvmlDeviceGetNvLinkRemoteDeviceType(first, link) == nvml.NVML_NVLINK_DEVICE_TYPE_SWITCH
            remote = "" if switch else nvml.nvmlDeviceGetNvLinkRemotePciInfo(first, link).busId
        except nvml.NVMLError:
            hidden += 1
            continue
        count += switch or remote == nvml.nvmlDeviceGetPciInfo(second).busId
    if count == 0 and hidden:
        return f"{hidden} NVLinks whose other ends the driver does not tell"
    return f"{count} NVLinks" if count else ""
