"""Checks OpenVINO and the GPU: its version, which devices it sees, and why a GPU is not among them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final, Protocol

from pydantic import JsonValue

from cascadia_p2p.doctor.finding import Finding, Level
from cascadia_p2p.doctor.host import Host, read_text, version_of
from cascadia_p2p.engine.openvino.environment import LEAST_OPENVINO, PLUGIN_ENVIRONMENT
from cascadia_p2p.errors import CascadiaError, UsageError

GOOD_OPENVINO: Final = (2026, 4, 1)
_OLD_FOR_LUNAR_LAKE: Final = (24, 39)
_GOOD_DRIVER: Final = (25, 48)
_PANTHER_LAKE_KERNEL: Final = (6, 17)
_INTEL: Final = "0x8086"
_OPENCL: Final = "libOpenCL.so.1"
_VENDORS: Final = "/etc/OpenCL/vendors"
_OVERRIDES: Final = ("OV_GPU_", "OV_CPU_", "NEO_", "OverrideGpu")
_ALLOWED: Final = 0.55
"""A limit above this share of the memory has been lifted from the usual half."""


class OpenVino(Protocol):
    """What is asked of OpenVINO."""

    def version(self) -> str:
        """As it spells it, such as `2026.4.1-22982-...`."""

    def devices(self) -> tuple[str, ...]:
        """The devices that it finds."""

    def ask(self, device: str, name: str) -> str:
        """A property of a device as text; empty when there is no such property."""


class InstalledOpenVino:
    """The OpenVINO of this environment.

    Raises:
        ImportError: there is none, or it can not be loaded.
    """

    def __init__(self) -> None:
        import openvino

        self._openvino = openvino
        self._core = openvino.Core()

    def version(self) -> str:
        return str(self._openvino.get_version())

    def devices(self) -> tuple[str, ...]:
        return tuple(map(str, self._core.available_devices))

    def ask(self, device: str, name: str) -> str:
        try:
            value = self._core.get_property(device, name)
        except Exception:  # whatever a plugin raises for what it does not know
            return ""
        return " ".join(map(str, value)) if isinstance(value, list | tuple | set) else str(value)


def check_devices(host: Host, device: str, shown: int) -> Iterator[Finding]:
    """OpenVINO and the GPU.

    Args:
        host: this machine.
        device: what a node would be asked to use.
        shown: bytes of memory that the system says it has.
    """
    try:
        openvino = InstalledOpenVino()
    except Exception as error:  # a broken library raises what it likes
        yield Finding(
            "openvino",
            Level.FAIL,
            f"OpenVINO can not be loaded: {error}",
            "install it again: 'pip install --force-reinstall openvino'",
        )
        return
    yield check_openvino(openvino, device)
    gpu = check_gpu(host, openvino, device, shown)
    yield gpu
    if device.startswith("GPU") and gpu.level is not Level.FAIL:
        yield check_experts(device)
    yield from check_overrides(dict(os.environ))


def check_openvino(openvino: OpenVino, device: str) -> Finding:
    """Its version, by what is known of each, and that it has the device that is asked for."""
    version, devices = openvino.version(), openvino.devices()
    message = f"OpenVINO {version.split('-')[0]} sees {', '.join(devices) or 'no device'}"
    found, gpu = version_of(version), device.startswith("GPU")
    if found < LEAST_OPENVINO:
        why = (
            "before 2026.3 the GPU wants routing inside its graph, and up to 2026.2.1 it mixes up shapes "
            "when one request is reset while another runs"
            if gpu
            else "the graphs are built for 2026.3 and newer"
        )
        return Finding("openvino", Level.FAIL, f"{message}; {why}", "pip install 'openvino>=2026.4.1'")
    if not any(device in (name, name.partition(".")[0]) for name in devices):
        return Finding(
            "openvino",
            Level.FAIL,
            f"{message}, not {device}",
            "choose one of these with --device" + (", or see the line on the GPU" if gpu else ""),
        )
    if gpu and found < GOOD_OPENVINO:
        return Finding(
            "openvino",
            Level.WARN,
            f"{message}; 2026.4 mends wrong INT4 results on Xe2 and 2026.4.1 wrong outputs of changing shape",
            "pip install 'openvino>=2026.4.1'",
        )
    return Finding("openvino", Level.OK, message, facts={"version": version, "devices": list(devices)})


def check_gpu(host: Host, openvino: OpenVino, device: str, shown: int) -> Finding:
    """The GPU that OpenVINO sees, or why it sees none."""
    wanted = device.startswith("GPU")
    found = [name for name in openvino.devices() if name.startswith("GPU")]
    if found:
        return _visible(openvino, device if device in found else found[0], wanted, shown)
    if not host.linux:
        return _not_visible_elsewhere(host, wanted)
    hardware = intel_gpus(host)
    if not hardware:
        if wanted:
            return Finding("gpu", Level.FAIL, "no Intel GPU in this PC", "use --device CPU on this PC")
        return Finding("gpu", Level.OK, "no Intel GPU in this PC: matrices are multiplied by the CPU")
    reasons = why_invisible(host, hardware)
    if not reasons:
        reasons = [("nothing that is known to hide it is wrong", "look at the output of 'clinfo'")]
    return Finding(
        "gpu",
        Level.FAIL if wanted else Level.WARN,
        f"an Intel GPU ({', '.join(hardware)}) is here, but OpenVINO does not see it: "
        + "; ".join(reason for reason, _ in reasons),
        "; ".join(advice for _, advice in reasons),
    )


def check_experts(device: str) -> Finding:
    """A small layer of experts, compiled for the device, looked at and compared as at loading."""
    # The engine takes seconds to import, and whatever its libraries lack is another finding's.
    from cascadia_p2p.doctor.experts import try_experts

    try:
        try_experts(device)
    except CascadiaError as error:
        return Finding(
            "experts",
            Level.FAIL,
            str(error),
            "install OpenVINO 2026.4.1 and Intel's newest driver, or use --device CPU",
        )
    return Finding("experts", Level.OK, f"{device} fuses experts of 4 bits and computes them rightly")


def require_device(host: Host, openvino: OpenVino, device: str, shown: int) -> None:
    """Refuse a device that a node can not serve with, by what the checks find.

    Args:
        host: this machine.
        openvino: as installed.
        device: what a node is to use.
        shown: bytes of memory that the system says it has.

    Raises:
        UsageError: the device is not there; the message holds why and what to do.
    """
    findings = [check_openvino(openvino, device)]
    if device.startswith("GPU"):
        findings.append(check_gpu(host, openvino, device, shown))
    failed = [finding for finding in findings if finding.level is Level.FAIL]
    if failed:
        reasons = "; ".join(finding.message for finding in failed)
        # The later finding knows more of why.
        raise UsageError(f"--device {device}: {reasons}: {failed[-1].advice}")


def _visible(openvino: OpenVino, name: str, wanted: bool, shown: int) -> Finding:
    def ask(what: str) -> str:
        return openvino.ask(name, what)

    total, capabilities = ask("GPU_DEVICE_TOTAL_MEM_SIZE"), ask("OPTIMIZATION_CAPABILITIES")
    limit = int(total) if total.isdigit() else 0
    driver = ask("GPU_DRIVER_VERSION") or "unknown"
    parts = [ask("FULL_DEVICE_NAME") or name, f"driver {driver}"]
    if limit:
        parts.append(f"may take {limit / 2**30:.1f} of this PC's {shown / 2**30:.1f} GiB")
    largest = ask("GPU_DEVICE_MAX_ALLOC_MEM_SIZE")
    if largest.isdigit():
        parts.append(f"{int(largest) / 1e9:.1f} GB in one piece")
    message = ", ".join(parts)
    facts: dict[str, JsonValue] = {"device": name, "total": limit, "driver": driver}
    facts["capabilities"] = capabilities
    if "GPU_HW_MATMUL" not in capabilities:
        return Finding(
            "gpu",
            Level.FAIL if wanted else Level.WARN,
            f"{message}; it has no matrix engines (XMX), without which experts are not fused",
            "use --device CPU on this PC",
            facts,
        )
    if limit and limit < _ALLOWED * shown:
        pages = int(max(shown / 2, shown - 8 * 2**30)) // 4096
        return Finding(
            "gpu",
            Level.WARN if wanted else Level.OK,
            f"{message}, which is the limit as shipped",
            f"to use more: on Linux put ttm.pages_limit={pages} ttm.page_pool_size={pages} on the kernel's "
            "command line; on Windows raise 'Shared GPU Memory Override' in Intel Graphics Software",
            facts,
        )
    return Finding("gpu", Level.OK, message, facts=facts)


def _not_visible_elsewhere(host: Host, wanted: bool) -> Finding:
    level = Level.FAIL if wanted else Level.OK
    if host.system == "win32":
        library = host.path("Windows/System32/OpenCL.dll")
        if not library.exists():
            return Finding(
                "gpu",
                level,
                "OpenVINO sees no GPU: OpenCL.dll is missing, so no graphics driver with OpenCL is installed",
                "install Intel's graphics driver from intel.com (not the one of Windows Update)",
            )
        return Finding(
            "gpu",
            level,
            "OpenVINO sees no GPU",
            "if this PC has an Intel GPU, install Intel's newest graphics driver and restart",
        )
    return Finding(
        "gpu", level, "OpenVINO sees no GPU, as on every Mac" if host.system == "darwin" else "no GPU"
    )


def intel_gpus(host: Host) -> list[str]:
    """Intel's display adapters by PCI address."""
    found = []
    for device in host.find("/sys/bus/pci/devices", "*"):
        if read_text(device / "vendor") == _INTEL and read_text(device / "class").startswith("0x03"):
            found.append(f"{device.name}, id {read_text(device / 'device').removeprefix('0x') or 'unknown'}")
    return found


def why_invisible(host: Host, hardware: list[str]) -> list[tuple[str, str]]:
    """What hides an Intel GPU on Linux: reasons, each with what to do."""
    reasons = [*_no_nodes(host), *_no_rights(host), *_no_opencl(host)]
    old = version_of(host.kernel()) < _PANTHER_LAKE_KERNEL
    if not host.find("/dev/dri", "renderD*") and old:
        reasons.append(
            (
                f"the kernel is {host.kernel()}",
                "Panther Lake needs Linux 6.17 or newer with current linux-firmware",
            )
        )
    return reasons


def _no_nodes(host: Host) -> Iterator[tuple[str, str]]:
    if host.find("/dev/dri", "renderD*"):
        return
    if host.find("/sys/class/drm", "renderD*"):
        yield (
            "/dev/dri is missing, though the kernel has the GPU: this is a container",
            "start the container with --device /dev/dri and the group that owns it (--group-add)",
        )
    else:
        yield (
            "the kernel has no driver for it, there is no /dev/dri/renderD*",
            "load the driver (xe, older chips i915) or take a newer kernel",
        )


def _no_rights(host: Host) -> Iterator[tuple[str, str]]:
    for node in host.find("/dev/dri", "renderD*"):
        if not host.may_use(node):
            yield (
                f"this user may not use {Path('/dev/dri') / node.name}",
                "sudo usermod -aG render $USER, then log in again",
            )


def _no_opencl(host: Host) -> Iterator[tuple[str, str]]:
    if reason := host.loads(_OPENCL):
        yield (f"{_OPENCL} can not be loaded ({reason})", "sudo apt install ocl-icd-libopencl1")
    drivers = [path for path in host.find(_VENDORS, "*.icd") if "intel" in path.name.lower()]
    if not drivers:
        yield (
            f"no Intel driver is registered in {_VENDORS}",
            "sudo apt install intel-opencl-icd, from Intel's repository if the system's is older than 25.48",
        )
        return
    for driver in drivers:
        library = read_text(driver)
        if library and (reason := host.loads(library)):
            yield (
                f"the OpenCL driver {library} can not be loaded ({reason})",
                "install intel-opencl-icd again",
            )
    version = driver_version(host)
    if version and version_of(version) < _OLD_FOR_LUNAR_LAKE:
        yield (
            f"intel-opencl-icd {version} is older than Lunar Lake and Battlemage",
            "install 25.48 or newer from Intel's repository",
        )
    elif version and version_of(version) < _GOOD_DRIVER:
        yield (
            f"intel-opencl-icd {version} may be too old for this GPU",
            "Panther Lake is known to work with 26.09",
        )


def driver_version(host: Host) -> str:
    """The version of the installed package intel-opencl-icd; empty when dpkg knows none."""
    inside = False
    for line in host.read("/var/lib/dpkg/status").splitlines():
        if line.startswith("Package: "):
            inside = line == "Package: intel-opencl-icd"
        elif inside and line.startswith("Version: "):
            return line.removeprefix("Version: ").rpartition(":")[2]
    return ""


def check_overrides(environ: dict[str, str]) -> Iterator[Finding]:
    """Variables that change what OpenVINO and its driver do, but for what the engine itself sets."""
    found = sorted(
        name
        for name, value in environ.items()
        if name.startswith(_OVERRIDES) and PLUGIN_ENVIRONMENT.get(name) != value
    )
    if found:
        values: dict[str, str] = {name: environ[name] for name in found}
        yield Finding(
            "overrides",
            Level.WARN,
            f"the environment changes OpenVINO or its driver: {', '.join(found)}",
            "unset them, unless you know that you want them",
            dict(values.items()),
        )
