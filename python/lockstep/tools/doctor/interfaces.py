"""Network interfaces, and which of them gloo and NCCL would take."""

from __future__ import annotations

import fcntl
import socket
import struct
from collections.abc import Iterator, Mapping

from lockstep.tools.doctor.finding import Finding, Status

_SIOCGIFADDR = 0x8915  # Linux: the IPv4 address of an interface


def check(environment: Mapping[str, str]) -> Iterator[Finding]:
    """The interfaces of this host, gloo's choice and NCCL's."""
    own = addresses()
    yield Finding("interfaces", "with IPv4", Status.INFO, ", ".join(f"{k} {v}" for k, v in own.items()) or "none")
    yield gloo_choice(own, environment.get("GLOO_SOCKET_IFNAME"), _host_address())
    yield nccl_choice(own, environment.get("NCCL_SOCKET_IFNAME"))


def addresses() -> dict[str, str]:
    """Interface -> IPv4 address, for those that have one."""
    found = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            try:
                answer = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
            except OSError:
                continue  # has none
            found[name] = socket.inet_ntoa(answer[20:24])
    return found


def _host_address() -> str | None:
    """What the host's own name resolves to, if a socket can be bound to it: torch's rule for gloo."""
    try:
        address = socket.gethostbyname(socket.gethostname())
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
            probe.bind((address, 0))
    except OSError:
        return None
    return address


def gloo_choice(own: Mapping[str, str], wanted: str | None, host_address: str | None) -> Finding:
    """The interface of gloo: what GLOO_SOCKET_IFNAME says, else that of the host's name, else the loopback."""
    if wanted:
        missing = [name for name in wanted.split(",") if name not in own]
        if missing:
            detail = f"GLOO_SOCKET_IFNAME names {', '.join(missing)}, which this host lacks: joining a group will fail."
            return Finding("interfaces", "gloo takes", Status.PROBLEM, wanted, detail)
        return Finding("interfaces", "gloo takes", Status.OK, wanted, "By GLOO_SOCKET_IFNAME.")
    by_address = {address: name for name, address in own.items()}
    name = by_address.get(host_address or "", "lo")
    if name == "lo" or (host_address or "").startswith("127."):
        detail = (
            "The host's name leads to the loopback: processes of this host meet, those of others cannot. For several "
            "hosts set GLOO_SOCKET_IFNAME, or mend /etc/hosts."
        )
        others = any(interface != "lo" for interface in own)
        return Finding("interfaces", "gloo takes", Status.WARNING if others else Status.INFO, "lo", detail)
    return Finding("interfaces", "gloo takes", Status.OK, f"{name} {host_address}", "It has the host's name's address.")


def nccl_choice(own: Mapping[str, str], wanted: str | None) -> Finding:
    """NCCL's interfaces for sockets: by NCCL_SOCKET_IFNAME, else ib*, else any but docker* and lo, else what is left.

    Source: NCCL's documentation of NCCL_SOCKET_IFNAME ("^": all but; "=": exact name; else: prefixes).
    """
    if wanted:
        names = [name for name in own if _selected(name, wanted)]
        if not names:
            detail = f"NCCL_SOCKET_IFNAME={wanted} fits no interface with an address: NCCL will fail at its start."
            return Finding("interfaces", "NCCL takes", Status.PROBLEM, "none", detail)
        poor = all(name == "lo" or name.startswith("docker") for name in names)
        detail = "Other hosts cannot reach these." if poor else "By NCCL_SOCKET_IFNAME."
        return Finding("interfaces", "NCCL takes", Status.WARNING if poor else Status.OK, ", ".join(names), detail)
    groups = (
        [name for name in own if name.startswith("ib")],
        [name for name in own if name != "lo" and not name.startswith(("docker", "ib"))],
        [name for name in own if name.startswith("docker")],
        [name for name in own if name == "lo"],
    )
    names = next((group for group in groups if group), [])
    detail = "For bootstrap, and for data between hosts without InfiniBand."
    status = Status.OK if names else Status.PROBLEM
    return Finding("interfaces", "NCCL takes", status, ", ".join(names) or "none", detail)


def _selected(name: str, wanted: str) -> bool:
    exclude, pattern = wanted.startswith("^"), wanted.removeprefix("^")
    exact, pattern = pattern.startswith("="), pattern.removeprefix("=")
    parts = [part for part in pattern.split(",") if part]
    fits = name in parts if exact else any(name.startswith(part) for part in parts)
    return fits != exclude
