"""Checks power plan and clocks: what makes a PC slower than it is, or its timers coarse."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from typing import Final

import psutil
from pydantic import JsonValue

from cascadia_p2p.doctor.finding import Finding, Level
from cascadia_p2p.doctor.host import Host

_CPUS: Final = "/sys/devices/system/cpu"
_SELF_DRIVEN: Final = ("intel_pstate", "amd-pstate-epp", "amd-pstate")
"""Drivers under which the governor `powersave` is the normal one and does not keep the clock low."""

_GOOD_SOURCES: Final = ("tsc", "kvm-clock", "hyperv_clocksource_tsc_page", "arch_sys_counter")
_COARSE_S: Final = 5e-3
_SLEEPS: Final = 15
_SAVER: Final = "a1841308-3541-4fab-bc81-f71556f20b4a"


def check_power(host: Host, battery: Callable[[], bool] | None = None) -> Finding:
    """Power plan, governor and battery."""
    problems = list(_plan(host))
    if (battery or _on_battery)():
        problems.insert(0, ("this PC runs on battery", "plug it in"))
    if problems:
        return Finding(
            "power",
            Level.WARN,
            "; ".join(problem for problem, _ in problems),
            "; ".join(advice for _, advice in problems),
        )
    known = _known(host)
    return Finding("power", Level.OK, f"nothing here saves power at speed's cost{known}")


def _plan(host: Host) -> Iterator[tuple[str, str]]:
    if host.linux:
        yield from _linux_plan(host)
    elif host.system == "win32":
        said = host.run(["powercfg", "/getactivescheme"])
        if said is not None and _SAVER in said.lower():
            yield (
                "the power plan is 'Power saver'",
                "choose 'Best performance': powercfg /setactive SCHEME_MIN",
            )
    elif host.system == "darwin":
        said = host.run(["pmset", "-g"])
        if said is not None and any(line.split()[:2] == ["lowpowermode", "1"] for line in said.splitlines()):
            yield "low power mode is on", "sudo pmset -a lowpowermode 0"


def _linux_plan(host: Host) -> Iterator[tuple[str, str]]:
    governor = host.read(f"{_CPUS}/cpu0/cpufreq/scaling_governor")
    driver = host.read(f"{_CPUS}/cpu0/cpufreq/scaling_driver")
    if governor == "powersave" and driver not in _SELF_DRIVEN:
        yield (
            f"the CPU governor is powersave (driver {driver or 'unknown'})",
            "sudo cpupower frequency-set -g performance",
        )
    preference = host.read(f"{_CPUS}/cpu0/cpufreq/energy_performance_preference")
    if preference == "power":
        yield "the CPU is told to prefer saving power", "sudo powerprofilesctl set performance"
    profile = host.read("/sys/firmware/acpi/platform_profile")
    if profile in ("low-power", "quiet", "cool"):
        yield f"the platform profile is {profile}", "sudo powerprofilesctl set performance"


def _known(host: Host) -> str:
    governor = host.read(f"{_CPUS}/cpu0/cpufreq/scaling_governor") if host.linux else ""
    return f" (governor {governor})" if governor else ""


def _on_battery() -> bool:
    # psutil has no such function where the system has no notion of batteries.
    sensors = getattr(psutil, "sensors_battery", None)
    state = sensors() if sensors is not None else None
    return state is not None and state.power_plugged is False


def check_clock(host: Host, sleep: Callable[[float], None] = time.sleep) -> Finding:
    """How coarse the timers are, and whether reading the clock is slow. No node trusts another's clock."""
    waited = statistics.median(_slept(sleep) for _ in range(_SLEEPS))
    source = (
        host.read("/sys/devices/system/clocksource/clocksource0/current_clocksource") if host.linux else ""
    )
    facts: dict[str, JsonValue] = {"sleep_1ms_s": waited, "source": source}
    message = f"a wait of 1 ms takes {waited * 1e3:.1f} ms" + (f", clock source {source}" if source else "")
    if waited > _COARSE_S:
        return Finding(
            "clock", Level.WARN, message, "timers are coarse: an idle node notices things late", facts
        )
    if source and source not in _GOOD_SOURCES:
        return Finding(
            "clock",
            Level.WARN,
            message,
            "reading this clock is slow: see why the kernel gave up on tsc",
            facts,
        )
    return Finding("clock", Level.OK, message, facts=facts)


def _slept(sleep: Callable[[float], None]) -> float:
    start = time.perf_counter()
    sleep(1e-3)
    return time.perf_counter() - start
