"""``lockstep doctor``: each check on machines made up for it, and the whole on this one."""

from __future__ import annotations

import json
import operator
import sys
import types
from types import SimpleNamespace

import pytest
from click.testing import CliRunner

from lockstep.__main__ import main
from lockstep.tools.cli import commands
from lockstep.tools.doctor import Status, gpus, interfaces, limits, pair, variables, versions


def by_name(findings) -> dict:
    return {finding.name: finding for finding in findings}


@pytest.mark.parametrize("name", ["NCCL_IB_DISABLE", "NCCL_P2P_DISABLE", "NCCL_ALGO", "NCCL_PROTO"])
def test_variables_that_cost_speed_or_correctness_are_warned_of(name):
    (finding,) = variables.check({name: "1", "HOME": "/"})
    assert finding.name == name and finding.status is Status.WARNING and "nset it" in finding.detail


def test_harmless_values_and_unknown_variables_are_only_listed():
    found = by_name(variables.check({"NCCL_IB_DISABLE": "0", "NCCL_SOMETHING_NEW": "3"}))
    assert {name: finding.status for name, finding in found.items()} == {
        "NCCL_IB_DISABLE": Status.INFO,
        "NCCL_SOMETHING_NEW": Status.INFO,
    }
    assert by_name(variables.check({}))["NCCL_*"].status is Status.OK


OWN = {"lo": "127.0.0.1", "docker0": "172.17.0.1", "eth0": "10.0.0.5", "eth1": "10.0.1.5"}


@pytest.mark.parametrize(
    ("own", "wanted", "status", "value"),
    [
        (OWN, None, Status.OK, "eth0, eth1"),
        (OWN | {"ib0": "10.1.0.5"}, None, Status.OK, "ib0"),
        (OWN, "eth", Status.OK, "eth0, eth1"),
        (OWN, "=eth1", Status.OK, "eth1"),
        (OWN, "^docker,lo", Status.OK, "eth0, eth1"),
        (OWN, "docker", Status.WARNING, "docker0"),
        (OWN, "ens", Status.PROBLEM, "none"),
        ({"lo": "127.0.0.1"}, None, Status.OK, "lo"),
    ],
)
def test_nccl_interfaces_follow_its_rules(own, wanted, status, value):
    finding = interfaces.nccl_choice(own, wanted)
    assert (finding.status, finding.value) == (status, value)


@pytest.mark.parametrize(
    ("wanted", "host_address", "status", "value"),
    [
        (None, "10.0.0.5", Status.OK, "eth0 10.0.0.5"),
        (None, "127.0.1.1", Status.WARNING, "lo"),
        (None, None, Status.WARNING, "lo"),
        ("eth1", "10.0.0.5", Status.OK, "eth1"),
        ("eth7", "10.0.0.5", Status.PROBLEM, "eth7"),
    ],
)
def test_gloos_interface_follows_its_rules(wanted, host_address, status, value):
    finding = interfaces.gloo_choice(OWN, wanted, host_address)
    assert (finding.status, finding.value) == (status, value)


def test_the_loopback_of_this_machine_is_found():
    assert interfaces.addresses()["lo"] == "127.0.0.1"


def test_small_limits_are_warned_of(monkeypatch):
    assert limits.open_files(1024).status is Status.WARNING
    assert limits.open_files(65536).status is Status.OK
    small = SimpleNamespace(f_frsize=4096, f_blocks=16384, f_bavail=16384)  # 64 MiB: Docker's
    monkeypatch.setattr(limits.os, "statvfs", lambda path: small)
    finding = limits.shared_memory()
    assert finding.status is Status.WARNING and "--shm-size" in finding.detail
    assert finding.value == "64 MiB, 64 MiB free"


def test_versions_that_do_not_fit_are_named(monkeypatch):
    assert versions._cuda("13.0", None).status is Status.WARNING
    assert versions._cuda("13.0", "12.8").status is Status.PROBLEM
    assert versions._cuda("13.1", "13.0").status is Status.OK
    monkeypatch.setattr(versions, "_loaded_nccl", lambda: "2.19.3")
    assert versions._nccl("2.28.9").status is Status.WARNING


@pytest.mark.parametrize(
    ("cuda", "runtime", "usable", "status", "word"),
    [
        (13000, "13.0", True, Status.OK, ""),
        (13000, "13.2", True, Status.OK, ""),
        (12040, "13.0", False, Status.PROBLEM, "too old"),
        (13000, "13.0", False, Status.PROBLEM, "CUDA_VISIBLE_DEVICES"),
        (13000, None, False, Status.WARNING, "CPU build"),
    ],
)
def test_the_driver_must_fit_the_runtime(cuda, runtime, usable, status, word):
    finding = gpus.driver("580.1", cuda, runtime, usable)
    assert finding.status is status and word in finding.detail


class Nvml(types.ModuleType):
    """Two GPUs on a board of the test's choice."""

    NVML_P2P_CAPS_INDEX_READ = (0,)  # as nvidia-ml-py has it
    NVML_P2P_STATUS_OK = 0
    NVML_NVLINK_MAX_LINKS, NVML_NVLINK_DEVICE_TYPE_SWITCH = 18, 2

    class NVMLError(Exception): ...

    def __init__(self, links: int, peers: bool, lanes: int, processes: list[int]) -> None:
        super().__init__("pynvml")
        gib = 2**30
        self.nvmlSystemGetDriverVersion = lambda: "580.1"
        self.nvmlSystemGetCudaDriverVersion = lambda: 13000
        self.nvmlDeviceGetCount = lambda: 2
        self.nvmlDeviceGetHandleByIndex = lambda index: index
        self.nvmlDeviceGetMemoryInfo = lambda _: SimpleNamespace(free=100 * gib, total=141 * gib)
        self.nvmlDeviceGetName = lambda _: "H200"
        self.nvmlDeviceGetCurrPcieLinkGeneration = lambda _: 1
        self.nvmlDeviceGetMaxPcieLinkGeneration = lambda _: 5
        self.nvmlDeviceGetCurrPcieLinkWidth = lambda _: lanes
        self.nvmlDeviceGetMaxPcieLinkWidth = lambda _: 16
        self.nvmlDeviceGetComputeRunningProcesses = lambda _: [SimpleNamespace(pid=pid) for pid in processes]
        self.nvmlDeviceGetP2PStatus = lambda *arguments: (0 if peers else 5) + operator.index(arguments[2])
        self.nvmlDeviceGetTopologyCommonAncestor = lambda *_: 50
        self.nvmlDeviceGetNvLinkState = lambda _, link: link < links
        self.nvmlDeviceGetNvLinkRemoteDeviceType = lambda *_: 2
        self.nvmlDeviceGetNvLinkRemotePciInfo = lambda *_: SimpleNamespace(busId="switch")
        self.nvmlDeviceGetPciInfo = lambda _: SimpleNamespace(busId="gpu")


def test_a_good_board_is_good():
    found = by_name(gpus.examine(Nvml(links=18, peers=True, lanes=16, processes=[]), "13.0", True))
    assert {finding.status for finding in found.values()} == {Status.OK, Status.INFO}
    assert found["GPUs 0 and 1"].value == "18 NVLinks, peer access yes"
    assert found["GPU 0"].value == "H200, 100 of 141 GiB free"
    assert found["GPU 1 PCIe"].value == "generation 1 of 5, 16 of 16 lanes"  # idle: no reason to warn


def test_a_poor_board_is_named():
    found = by_name(gpus.examine(Nvml(links=0, peers=False, lanes=8, processes=[77]), "13.0", True))
    warned = {name for name, finding in found.items() if finding.status is Status.WARNING}
    assert warned == {"GPU 0 PCIe", "GPU 1 PCIe", "GPU 0 processes", "GPU 1 processes", "GPUs 0 and 1"}
    assert found["GPUs 0 and 1"].value == "across sockets (SYS), peer access no"
    assert found["GPU 0 processes"].value == "77"


def test_a_link_below_what_the_gpu_can_is_warned_of_once_it_is_at_work():
    found = by_name(gpus.examine(Nvml(links=18, peers=True, lanes=16, processes=[]), "13.0", True, busy=True))
    assert found["GPU 0 PCIe"].status is Status.WARNING and "older generation" in found["GPU 0 PCIe"].detail
    assert gpus.pcie_link("GPU 0 PCIe", (5, 16), (5, 16), busy=True).status is Status.OK


def test_what_a_virtual_machine_hides_is_not_taken_for_absent():
    nvml = Nvml(links=18, peers=True, lanes=16, processes=[])

    def hidden(*_: object) -> None:
        raise nvml.NVMLError("Not Supported")

    nvml.nvmlDeviceGetNvLinkRemoteDeviceType = nvml.nvmlDeviceGetTopologyCommonAncestor = hidden
    found = by_name(gpus.examine(nvml, "13.0", True))
    assert found["GPUs 0 and 1"].value == "18 NVLinks whose other ends the driver does not tell, peer access yes"
    nvml.nvmlDeviceGetNvLinkState = hidden
    assert by_name(gpus.examine(nvml, "13.0", True))["GPUs 0 and 1"].value == "unknown distance, peer access yes"


def test_without_a_driver_it_says_what_cannot_be_checked(monkeypatch):
    nvml = Nvml(0, False, 16, [])

    def fail() -> None:
        raise nvml.NVMLError("Driver Not Loaded")

    nvml.nvmlInit = fail
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    (finding,) = gpus.check()
    assert finding.status is Status.UNCHECKED and "peer access" in finding.name and "no NVIDIA driver" in finding.detail
    monkeypatch.setitem(sys.modules, "pynvml", None)
    (finding,) = gpus.check()
    assert finding.status is Status.UNCHECKED and "torch-lockstep[tools]" in finding.detail


def test_the_transport_is_read_from_nccls_log():
    log = "h:1:2 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[1] via P2P/CUMEM\n"
    log += "h:1:2 [0] NCCL INFO Channel 01/0 : 1[1] -> 0[0] via SHM/direct/direct\n"
    assert pair.transport(log) == "P2P/CUMEM, SHM/direct/direct"
    assert pair.transport("nothing") == "unknown"


@pytest.mark.slow
def test_on_this_machine_two_processes_meet_and_the_json_says_so():
    result = CliRunner().invoke(commands, ["doctor", "--json", "--timeout", "100"])
    report = json.loads(result.stdout)
    assert result.exit_code == (0 if report["healthy"] else 1)
    met = by_name(SimpleNamespace(**finding) for finding in report["findings"])["two processes, gloo"]
    assert met.status == "ok" and met.value.startswith("right; 4 MiB in ") and "TCP sockets" in met.value


def test_two_processes_that_do_not_answer_are_a_problem_and_end():
    finding = pair.run("gloo", timeout=0.2)  # less than importing torch takes
    assert finding.status is Status.PROBLEM and finding.value == "no answer within 0.2 s"


def test_a_problem_makes_the_exit_code_1(monkeypatch):
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "absent")
    result = CliRunner().invoke(commands, ["doctor", "--skip-all-reduce"])
    assert result.exit_code == 1 and "NCCL_SOCKET_IFNAME" in result.stdout
    monkeypatch.delenv("NCCL_SOCKET_IFNAME")
    monkeypatch.setenv("NCCL_ALGO", "Ring")
    assert CliRunner().invoke(commands, ["doctor", "--skip-all-reduce", "--strict"]).exit_code == 1


@pytest.mark.parametrize("library", ["click", "rich"])
def test_without_its_libraries_the_command_names_the_extra(monkeypatch, capsys, library):
    monkeypatch.setitem(sys.modules, library, None)
    assert main() == 2
    error = capsys.readouterr().err
    assert library in error and "torch-lockstep[tools]" in error and "LS-146" in error
