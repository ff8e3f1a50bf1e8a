"""Environment variables that change how the ranks communicate, and what each does here."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from lockstep.tools.doctor.finding import Finding, Status

_SLOW_ON_PURPOSE = "Made for finding faults; unset it for training."

#: Name -> (values that deserve a warning, None: any; what it does).
_KNOWN: dict[str, tuple[frozenset[str] | None, str]] = {
    "NCCL_IB_DISABLE": (
        frozenset({"1"}),
        "No InfiniBand or RoCE: hosts talk through TCP sockets, often ten times slower. Unset it unless the fabric is "
        "broken. Within one host it changes nothing.",
    ),
    "NCCL_P2P_DISABLE": (
        frozenset({"1"}),
        "No NVLink and no PCIe peer access: GPUs of one host exchange data through host memory. Unset it unless peer "
        "access hangs here.",
    ),
    "NCCL_P2P_LEVEL": (None, "Sets up to which distance GPUs use peer access; NCCL chooses well by itself."),
    "NCCL_SHM_DISABLE": (
        frozenset({"1"}),
        "GPUs without peer access talk through sockets instead of shared memory. Enlarge /dev/shm instead.",
    ),
    "NCCL_ALGO": (
        None,
        "Pins the algorithm for every size and collective. NCCL measures and chooses; a pinned one is usually slower, "
        "and fails for collectives that it cannot do. Unset it outside of experiments.",
    ),
    "NCCL_PROTO": (
        None,
        "Pins the protocol for every size. LL128 where the hardware does not keep 128-byte stores whole corrupts data. "
        "Unset it outside of experiments.",
    ),
    "NCCL_NET_GDR_LEVEL": (None, "Sets when the network card reads GPU memory directly; wrong values cost bandwidth."),
    "NCCL_MAX_NCHANNELS": (None, "Caps how many channels NCCL uses, and with them the bandwidth."),
    "NCCL_LAUNCH_MODE": (None, "Changes how NCCL starts its kernels; the default is right for one process a GPU."),
    "NCCL_SOCKET_IFNAME": (frozenset(), "Chooses the interfaces for bootstrap and sockets: see interfaces."),
    "GLOO_SOCKET_IFNAME": (frozenset(), "Chooses gloo's interface: see interfaces."),
    "NCCL_DEBUG": (frozenset({"TRACE"}), "NCCL prints what it does: useful once, much text for each process."),
    "TORCH_NCCL_BLOCKING_WAIT": (
        frozenset({"1"}),
        f"The host waits for each collective, so nothing overlaps. {_SLOW_ON_PURPOSE}",
    ),
    "CUDA_LAUNCH_BLOCKING": (
        frozenset({"1"}),
        f"The host waits for each kernel, so nothing overlaps. {_SLOW_ON_PURPOSE}",
    ),
    "TORCH_DISTRIBUTED_DEBUG": (frozenset({"DETAIL"}), f"Each collective is checked by others. {_SLOW_ON_PURPOSE}"),
    "CUDA_VISIBLE_DEVICES": (frozenset(), "Only these GPUs exist for this process."),
    "CUDA_DEVICE_MAX_CONNECTIONS": (
        frozenset({"1"}),
        "One hardware queue: the reduction and backward wait for one another. Only some tensor-parallel programs want "
        "it.",
    ),
    "OMP_NUM_THREADS": (frozenset(), "Threads of each process for work on the CPU; torchrun sets 1 if it is unset."),
    "LOCKSTEP_STALL_THRESHOLD": (frozenset(), "Seconds after which a rank that waits reports who is missing."),
}
_PREFIXES = ("NCCL_", "TORCH_NCCL_", "GLOO_", "LOCKSTEP_")


def check(environment: Mapping[str, str]) -> Iterator[Finding]:
    """One finding for each variable that is set."""
    names = sorted(name for name in environment if name in _KNOWN or name.startswith(_PREFIXES))
    for name in names:
        value = environment[name]
        warned, detail = _KNOWN.get(name, (frozenset(), "Not known to this tool; see its library's documentation."))
        status = Status.WARNING if warned is None or value.strip().upper() in warned else Status.INFO
        yield Finding("variables", name, status, value, detail)
    if not any(name.startswith("NCCL_") for name in names):
        yield Finding("variables", "NCCL_*", Status.OK, "none set", "NCCL chooses everything by itself.")
