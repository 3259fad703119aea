"""What the doctor says of a machine: software, devices, memory, power, clocks."""

from __future__ import annotations

import math
import platform
import stat
import time
import tomllib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from doctor_world import GIB, Answers, FileHost
from hypothesis import given
from hypothesis import strategies as st

from cascadia_p2p import __version__
from cascadia_p2p.doctor.bandwidth import measure_bandwidth, sample_rates
from cascadia_p2p.doctor.devices import (
    InstalledOpenVino,
    check_experts,
    check_gpu,
    check_openvino,
    check_overrides,
    driver_version,
    require_device,
)
from cascadia_p2p.doctor.finding import Finding, Level, worst
from cascadia_p2p.doctor.host import Host, version_of, whole_number
from cascadia_p2p.doctor.memory import (
    Bandwidth,
    check_bandwidth,
    check_memory,
    check_need,
    judge_memory,
    largest,
)
from cascadia_p2p.doctor.power import check_clock, check_power
from cascadia_p2p.doctor.processor import check_processor, judge_processor
from cascadia_p2p.doctor.software import (
    Requirement,
    check_installation,
    check_packages,
    check_python,
    check_software,
    installed_versions,
    read_requirements,
    requirements,
)
from cascadia_p2p.engine.memory import MemoryNeed, available_memory
from cascadia_p2p.engine.openvino.environment import PLUGIN_ENVIRONMENT
from cascadia_p2p.errors import UsageError
from cascadia_p2p.types import Promise

ROOT = Path(__file__).parents[2]
SHOWN = 61 * GIB
GPU = {
    "FULL_DEVICE_NAME": "Intel(R) Arc(TM) B390 GPU (iGPU)",
    "GPU_DRIVER_VERSION": "26.09.37435",
    "OPTIMIZATION_CAPABILITIES": "FP32 BIN FP16 INT8 GPU_HW_MATMUL GPU_USM_MEMORY",
    "GPU_DEVICE_TOTAL_MEM_SIZE": str(53 * GIB),
    "GPU_DEVICE_MAX_ALLOC_MEM_SIZE": "4294959104",
}


def levels(*findings: Finding) -> list[str]:
    return [finding.level.value for finding in findings]


# --- findings -----------------------------------------------------------------------------------------


@given(st.lists(st.sampled_from(Level)))
def test_the_worst_level_decides(found: list[Level]) -> None:
    expected = Level.FAIL if Level.FAIL in found else Level.WARN if Level.WARN in found else Level.OK
    assert worst(Finding("x", level, "") for level in found) is expected


@pytest.mark.parametrize(
    ("text", "numbers"),
    [
        ("2026.4.1-22982-e213", (2026, 4, 1, 22982)),
        ("26.09.37435.1-1~24.04", (26, 9, 37435, 1, 1)),
        ("6.17.0-5-generic", (6, 17, 0, 5)),
        ("0.61.0rc1", (0, 61, 0)),
        ("", ()),
        ("unknown", ()),
    ],
)
def test_versions_are_read_as_numbers(text: str, numbers: tuple[int, ...]) -> None:
    assert version_of(text) == numbers


# --- software -----------------------------------------------------------------------------------------


def test_what_is_needed_is_what_the_project_declares() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    declared = {line.partition(";")[0].strip(): ";" not in line for line in project["dependencies"]}
    found = {f"{each.name}>={each.least}": each.everywhere for each in requirements()}
    assert found == declared


def test_requirements_are_read_as_packages_spell_them() -> None:
    lines = ["numpy>=2.0", "tbb>=2022; platform_machine == 'x86_64'", "pytest>=8.3; extra == 'dev'", "rich"]
    lines += ["pydantic [email] >= 2.10, <3"]
    assert read_requirements(lines) == [
        Requirement("numpy", "2.0", True),
        Requirement("tbb", "2022", False),
        Requirement("rich", "", True),
        Requirement("pydantic", "2.10", True),
    ]


def test_this_environment_is_found_right() -> None:
    findings = list(check_software(Host()))
    assert [each.check for each in findings] == ["python", "packages", "installation"]
    assert levels(*findings[:2]) == ["ok", "ok"]
    assert __version__ in findings[0].message
    assert platform.python_version() in findings[0].message


def test_old_or_narrow_pythons_and_packages_fail() -> None:
    assert levels(check_python((3, 10, 4), True), check_python((3, 13, 0), False)) == ["fail", "fail"]
    needed = requirements()
    good = installed_versions(needed)
    assert check_packages(needed, good).level is Level.OK
    assert check_packages(needed, {**good, "tbb": None}).level is Level.OK
    assert check_packages([], {}).level is Level.WARN
    found = check_packages(needed, {**good, "numpy": "1.26.4", "pyzmq": None})
    assert (found.level, found.message) == (Level.FAIL, "numpy is 1.26.4, needed is 2.0; pyzmq is missing")
    assert "pip install" in found.advice


def test_dll_09_another_installation_on_path_is_told(tmp_path: Path) -> None:
    command = tmp_path / "cascadia-p2p"
    for version, level in ((__version__, Level.OK), ("0.0.9", Level.WARN)):
        command.write_text(f"#!/bin/sh\necho cascadia-p2p {version}\n")
        command.chmod(command.stat().st_mode | stat.S_IXUSR)
        found = check_installation(Host(), str(command))
        assert found.level is level
    assert found.message == f"this is version {__version__}, but {command} is version 0.0.9"
    assert check_installation(Host(), str(tmp_path / "gone")).message.endswith("does not run")
    assert check_installation(Host(), None).level is Level.OK


# --- devices ------------------------------------------------------------------------------------------


def test_the_installed_openvino_is_asked() -> None:
    openvino = InstalledOpenVino()
    assert "CPU" in openvino.devices()
    assert openvino.ask("CPU", "FULL_DEVICE_NAME")
    assert openvino.ask("CPU", "NO_SUCH_PROPERTY") == ""
    assert check_openvino(openvino, "CPU").level is Level.OK


@pytest.mark.parametrize(
    ("version", "device", "level", "words"),
    [
        ("2026.4.1-22982", "GPU", Level.OK, ""),
        ("2026.5.0-1", "GPU.0", Level.OK, ""),
        ("2026.4.0-1", "GPU", Level.WARN, "2026.4.1"),
        ("2026.3.1-1", "GPU", Level.WARN, "wrong INT4 results"),
        ("2026.3.1-1", "CPU", Level.OK, ""),
        ("2026.2.1-1", "GPU", Level.FAIL, "mixes up shapes"),
        ("2025.4.0-1", "CPU", Level.FAIL, "2026.3 and newer"),
    ],
)
def test_stk_19_versions_are_judged_by_what_is_known_of_them(
    version: str, device: str, level: Level, words: str
) -> None:
    found = check_openvino(Answers(version, ("CPU", "GPU.0")), device)
    assert found.level is level
    assert words in found.message
    assert bool(found.advice) == (level is not Level.OK)


def test_a_device_that_is_not_there_fails() -> None:
    found = check_openvino(Answers(), "GPU")
    assert (found.level, found.message) == (Level.FAIL, "OpenVINO 2026.4.1 sees CPU, not GPU")


def test_a_visible_gpu_is_described(tmp_path: Path) -> None:
    found = check_gpu(FileHost(tmp_path), Answers(devices=("CPU", "GPU"), **GPU), "GPU", SHOWN)
    assert found.level is Level.OK
    assert found.message == (
        "Intel(R) Arc(TM) B390 GPU (iGPU), driver 26.09.37435, may take 53.0 of this PC's 61.0 GiB, "
        "4.3 GB in one piece"
    )


def test_a_gpu_at_its_shipped_limit_is_told_how_to_lift_it(tmp_path: Path) -> None:
    half = GPU | {"GPU_DEVICE_TOTAL_MEM_SIZE": str(SHOWN // 2)}
    answers = Answers(devices=("CPU", "GPU"), **half)
    found = check_gpu(FileHost(tmp_path), answers, "GPU", SHOWN)
    assert found.level is Level.WARN
    assert f"ttm.pages_limit={53 * 262144} " in found.advice
    assert check_gpu(FileHost(tmp_path), answers, "CPU", SHOWN).level is Level.OK


def test_a_gpu_without_matrix_engines_is_no_use(tmp_path: Path) -> None:
    plain = GPU | {"OPTIMIZATION_CAPABILITIES": "FP32 FP16"}
    answers = Answers(devices=("CPU", "GPU"), **plain)
    assert check_gpu(FileHost(tmp_path), answers, "GPU", SHOWN).level is Level.FAIL
    found = check_gpu(FileHost(tmp_path), answers, "CPU", SHOWN)
    assert (found.level, "XMX" in found.message) == (Level.WARN, True)


def with_gpu(host: FileHost, *, node: bool = True, driver: bool = True, icd: bool = True) -> FileHost:
    """An Intel GPU as PCI, kernel and OpenCL show it."""
    pci = "/sys/bus/pci/devices/0000:00:02.0"
    host.put(f"{pci}/vendor", "0x8086\n").put(f"{pci}/class", "0x030000\n").put(f"{pci}/device", "0xb080\n")
    if driver:
        host.put("/sys/class/drm/renderD128/dev", "226:128")
    if node:
        host.put("/dev/dri/renderD128")
    if icd:
        host.put("/etc/OpenCL/vendors/intel.icd", "/usr/lib/x86_64-linux-gnu/intel-opencl/libigdrcl.so\n")
        host.put(
            "/var/lib/dpkg/status",
            "Package: zlib1g\nVersion: 1:1.3\n\nPackage: intel-opencl-icd\nVersion: 26.09.37435-1\n",
        )
    return host


def gpu_finding(host: FileHost, device: str = "GPU") -> Finding:
    return check_gpu(host, Answers(), device, SHOWN)


def test_a_pc_without_intel_gpu_is_fine_for_the_cpu(tmp_path: Path) -> None:
    host = FileHost(tmp_path)
    host.put("/sys/bus/pci/devices/0000:01:00.0/vendor", "0x10de").put(
        "/sys/bus/pci/devices/0000:01:00.0/class", "0x030000"
    )
    assert gpu_finding(host, "CPU").level is Level.OK
    assert gpu_finding(host, "GPU").level is Level.FAIL


@pytest.mark.parametrize(
    ("make", "reason", "advice"),
    [
        (
            lambda path: with_gpu(FileHost(path), node=False),
            "this is a container",
            "--device /dev/dri",
        ),
        (
            lambda path: with_gpu(FileHost(path, release="6.8.0-40-generic"), node=False, driver=False),
            "the kernel is 6.8.0-40-generic",
            "Linux 6.17",
        ),
        (
            lambda path: with_gpu(FileHost(path), node=False, driver=False),
            "the kernel has no driver for it",
            "xe",
        ),
        (
            lambda path: with_gpu(FileHost(path, forbidden=("renderD128",))),
            "this user may not use /dev/dri/renderD128",
            "usermod -aG render",
        ),
        (
            lambda path: with_gpu(FileHost(path, missing={"libOpenCL.so.1": "no such file"})),
            "libOpenCL.so.1 can not be loaded (no such file)",
            "ocl-icd-libopencl1",
        ),
        (
            lambda path: with_gpu(FileHost(path), icd=False),
            "no Intel driver is registered in /etc/OpenCL/vendors",
            "intel-opencl-icd",
        ),
        (
            lambda path: with_gpu(
                FileHost(path, missing={"/usr/lib/x86_64-linux-gnu/intel-opencl/libigdrcl.so": "gone"})
            ),
            "libigdrcl.so can not be loaded (gone)",
            "install intel-opencl-icd again",
        ),
        (
            lambda path: with_gpu(FileHost(path)).put(
                "/var/lib/dpkg/status", "Package: intel-opencl-icd\nVersion: 23.43.27642.40-1ubuntu3\n"
            ),
            "intel-opencl-icd 23.43.27642.40-1ubuntu3 is older than Lunar Lake",
            "25.48 or newer",
        ),
        (
            lambda path: with_gpu(FileHost(path)).put(
                "/var/lib/dpkg/status", "Package: intel-opencl-icd\nVersion: 25.18.33578-1\n"
            ),
            "may be too old for this GPU",
            "26.09",
        ),
        (lambda path: with_gpu(FileHost(path)), "nothing that is known to hide it is wrong", "clinfo"),
    ],
    ids=["container", "kernel", "no driver", "group", "loader", "icd", "library", "old", "older", "clean"],
)
def test_why_a_gpu_is_not_seen(
    make: Callable[[Path], FileHost], reason: str, advice: str, tmp_path: Path
) -> None:
    host = make(tmp_path)
    found = gpu_finding(host)
    assert found.level is Level.FAIL
    assert found.message.startswith(
        "an Intel GPU (0000:00:02.0, id b080) is here, but OpenVINO does not see it: "
    )
    assert reason in found.message
    assert advice in found.advice
    assert gpu_finding(host, "CPU").level is Level.WARN


def test_all_reasons_are_given_at_once(tmp_path: Path) -> None:
    host = with_gpu(FileHost(tmp_path, forbidden=("renderD128",), missing={"libOpenCL.so.1": "x"}), icd=False)
    found = gpu_finding(host)
    assert found.message.count(";") == 2
    assert found.advice.count("sudo ") == 3


def test_the_drivers_version_is_that_of_its_package(tmp_path: Path) -> None:
    assert driver_version(FileHost(tmp_path)) == ""
    assert driver_version(with_gpu(FileHost(tmp_path))) == "26.09.37435-1"


def test_a_node_is_refused_a_device_with_what_the_checks_find(tmp_path: Path) -> None:
    bare = FileHost(tmp_path / "bare")
    with pytest.raises(UsageError, match=r"--device GPU: .* sees CPU, not GPU; no Intel GPU .*--device CPU"):
        require_device(bare, Answers(), "GPU", SHOWN)
    with pytest.raises(UsageError, match=r"--device NPU: .* sees CPU, not NPU: choose one of these"):
        require_device(bare, Answers(), "NPU", SHOWN)
    hidden = FileHost(tmp_path / "hidden", forbidden=("renderD128",))
    with pytest.raises(UsageError, match=r"may not use /dev/dri/renderD128: sudo usermod -aG render"):
        require_device(with_gpu(hidden), Answers(), "GPU", SHOWN)
    require_device(bare, Answers(devices=("CPU", "GPU"), **GPU), "GPU", SHOWN)
    require_device(bare, Answers(), "CPU", SHOWN)


def test_experts_are_tried_on_the_device() -> None:
    assert check_experts("CPU").level is Level.OK
    found = check_experts("GPU.9")
    assert found.level is Level.FAIL
    assert "--device GPU.9: OpenVINO finds no such device" in found.message


def test_windows_and_macs_are_told_what_holds_there(tmp_path: Path) -> None:
    windows = FileHost(tmp_path, "win32")
    assert "OpenCL.dll is missing" in gpu_finding(windows).message
    windows.put("Windows/System32/OpenCL.dll")
    assert "newest graphics driver" in gpu_finding(windows).advice
    assert gpu_finding(FileHost(tmp_path, "darwin"), "CPU").level is Level.OK


def test_variables_that_change_openvino_are_named() -> None:
    assert not list(check_overrides({"HOME": "/root"}))
    assert not list(check_overrides(dict(PLUGIN_ENVIRONMENT))), "the engine sets these itself"
    assert list(check_overrides(dict.fromkeys(PLUGIN_ENVIRONMENT, "32")))
    (found,) = check_overrides({"OV_GPU_MOE_DISABLE_FUSION": "1", "HOME": "/root"})
    assert (found.level, dict(found.facts)) == (Level.WARN, {"OV_GPU_MOE_DISABLE_FUSION": "1"})


# --- memory -------------------------------------------------------------------------------------------


def test_rpc_08_free_memory_is_what_the_system_says_and_counted_once() -> None:
    found = check_memory(Host())
    assert found.facts["total"] == psutil.virtual_memory().total
    assert found.facts["available"] == pytest.approx(available_memory(), rel=0.2)
    assert "a GPU's share included" in found.message


@pytest.mark.parametrize(
    ("available", "swapped", "level", "words"),
    [
        (60 * GIB, 0, Level.OK, "60.0 GiB of 61.0 GiB free"),
        (31 * GIB, 0, Level.OK, ""),
        (30 * GIB, 0, Level.WARN, ""),
        (0, 0, Level.WARN, "0 MiB of 61.0 GiB"),
        (60 * GIB, 4 * GIB, Level.WARN, "4.0 GiB are paged out"),
    ],
)
def test_exo_24_edges_of_free_memory(
    available: int, swapped: int, level: Level, words: str, tmp_path: Path
) -> None:
    found = judge_memory(FileHost(tmp_path), SHOWN, available, swapped)
    assert found.level is level
    assert words in found.message


@pytest.mark.parametrize(
    "files",
    [("memory.max", "memory.current"), ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes")],
)
def test_a_containers_limit_counts(files: tuple[str, str], tmp_path: Path) -> None:
    host = FileHost(tmp_path)
    for name, size in zip(files, (8 * GIB, 3 * GIB), strict=True):
        host.put(f"/sys/fs/cgroup/{name}", f"{size}\n")
    found = judge_memory(host, SHOWN, 60 * GIB, 0)
    assert found.level is Level.WARN
    assert "this container may take only 5.0 GiB more (limit 8.0 GiB)" in found.message
    for none in ("max", str(2**63 - 4096)):
        host.put(f"/sys/fs/cgroup/{files[0]}", none)
        assert judge_memory(host, SHOWN, 60 * GIB, 0).level is Level.OK


def test_the_largest_promise_is_told_and_what_does_not_fit_fails() -> None:
    def need(promise: Promise) -> MemoryNeed:
        return MemoryNeed(GIB, promise.slots * promise.context * 2**14, 0, 0)

    wanted = Promise(4, 1024, 64)
    (found,) = check_need(3, need, wanted, 2 * GIB)
    assert found.level is Level.OK
    assert found.facts["most_slots"] == 64
    assert need(replace(wanted, slots=64)).total <= 2 * GIB < need(replace(wanted, slots=65)).total
    (lacking,) = check_need(3, need, wanted, GIB + 2**25)
    assert lacking.level is Level.FAIL
    assert "it would fit with --slots 2" in lacking.message


@given(st.integers(1, 5000), st.integers(1, 5000))
def test_the_largest_number_is_found(enough: int, most: int) -> None:
    limit = max(enough, most)
    assert largest(enough, lambda n: n <= limit, 4096) == (min(limit, 4096) if enough <= 4096 else enough)


# --- bandwidth ----------------------------------------------------------------------------------------


class Clock:
    """A clock that work moves on."""

    def __init__(self, seconds: list[float]) -> None:
        self.now = 0.0
        self.calls = 0
        self._seconds = seconds

    def work(self) -> None:
        self.now += self._seconds[min(self.calls, len(self._seconds) - 1)]
        self.calls += 1

    def __call__(self) -> float:
        return self.now


def test_pri_12_the_first_slow_call_does_not_count() -> None:
    clock = Clock([5.0, 0.125])
    rates = sample_rates(clock.work, 125, 1.0, clock)
    assert rates == [1000.0] * 8
    assert clock.calls == 9


def test_pri_12_a_disturbance_leaves_the_median_alone() -> None:
    clock = Clock([1.0, 0.1, 0.1, 3.0, 0.1])
    rates = sorted(sample_rates(clock.work, 100, 0.5, clock))
    assert len(rates) == 5
    assert rates[2] == pytest.approx(1000.0)
    assert rates[0] == pytest.approx(100 / 3)


def test_this_machines_memory_is_measured_in_the_time_given() -> None:
    start = time.perf_counter()
    found = measure_bandwidth(1, seconds=0.05, size=64 * 2**20)
    assert time.perf_counter() - start < 30
    assert found.samples >= 5
    assert 0 < found.lowest <= found.rate <= found.highest
    assert 1e8 < found.rate < 2e12


@pytest.mark.parametrize(
    ("rate", "low", "high", "level"),
    [(100e9, 90e9, 105e9, Level.OK), (5e9, 5e9, 5e9, Level.WARN), (50e9, 20e9, 60e9, Level.WARN)],
)
def test_bandwidth_is_judged(rate: float, low: float, high: float, level: Level) -> None:
    found = check_bandwidth(4, lambda threads: Bandwidth(rate, low, high, 9, threads))
    assert found.level is level
    assert f"{rate / 1e9:.1f} GB/s read by 4 threads" in found.message


# --- processor, power, clock --------------------------------------------------------------------------


def test_the_processor_is_described() -> None:
    found = check_processor(Host(), 1)
    assert found.facts["cores"] == psutil.cpu_count(logical=False)
    assert judge_processor("old", 4, 4, "x86_64", {"avx2": False}).level is Level.WARN
    assert judge_processor("arm", 8, 8, "arm64", {}).level is Level.OK
    assert judge_processor("new", 8, 8, "amd64", {"avx2": True, "avxvnni": True}).message.endswith("AVXVNNI")
    many = judge_processor("new", 8, 16, "x86_64", {"avx2": True})
    assert (many.level, "--threads 8" in many.advice) == (Level.WARN, True)


@pytest.mark.parametrize(
    ("files", "problem"),
    [
        ({}, ""),
        ({"scaling_governor": "powersave", "scaling_driver": "intel_pstate"}, ""),
        ({"scaling_governor": "performance", "scaling_driver": "acpi-cpufreq"}, ""),
        ({"scaling_governor": "powersave", "scaling_driver": "acpi-cpufreq"}, "governor is powersave"),
        ({"energy_performance_preference": "power"}, "prefer saving power"),
    ],
)
def test_power_plans_of_linux(files: dict[str, str], problem: str, tmp_path: Path) -> None:
    host = FileHost(tmp_path)
    for name, text in files.items():
        host.put(f"/sys/devices/system/cpu/cpu0/cpufreq/{name}", text)
    found = check_power(host, lambda: False)
    assert found.level is (Level.WARN if problem else Level.OK)
    assert problem in found.message
    assert bool(found.advice) == bool(problem)


def test_power_elsewhere_and_on_battery(tmp_path: Path) -> None:
    saver = "Power Scheme GUID: a1841308-3541-4fab-bc81-f71556f20b4a  (Power saver)"
    assert (
        check_power(FileHost(tmp_path, "win32", said={"powercfg": saver}), lambda: False).level is Level.WARN
    )
    balanced = "Power Scheme GUID: 381b4222-f694-41f0-9685-ff5bb260df2e  (Balanced)"
    assert (
        check_power(FileHost(tmp_path, "win32", said={"powercfg": balanced}), lambda: False).level is Level.OK
    )
    low = "System-wide power settings:\n lowpowermode         1\n sleep 1\n"
    assert check_power(FileHost(tmp_path, "darwin", said={"pmset": low}), lambda: False).level is Level.WARN
    battery = check_power(FileHost(tmp_path), lambda: True)
    assert (battery.level, battery.message) == (Level.WARN, "this PC runs on battery")
    host = FileHost(tmp_path).put("/sys/firmware/acpi/platform_profile", "low-power\n")
    assert "low-power" in check_power(host, lambda: False).message


def test_clocks_are_measured_and_coarse_ones_told(tmp_path: Path) -> None:
    assert check_clock(Host()).level in (Level.OK, Level.WARN)
    # So long that what a busy machine adds is little.
    coarse = check_clock(FileHost(tmp_path), lambda _: time.sleep(0.1))
    assert coarse.level is Level.WARN
    waited = coarse.facts["sleep_1ms_s"]
    assert isinstance(waited, float)
    assert math.isclose(waited, 0.1, rel_tol=0.5)
    host = FileHost(tmp_path).put(
        "/sys/devices/system/clocksource/clocksource0/current_clocksource", "hpet\n"
    )
    assert "hpet" in check_clock(host, lambda _: None).message


def test_numbers_in_files() -> None:
    assert [whole_number(text) for text in ("12", "-3", "", "max", "1.5", "²")] == [
        12,
        -3,
        None,
        None,
        None,
        None,
    ]
