"""How many cores of a host its processes may use."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

_CGROUP = Path("/sys/fs/cgroup")


def usable_cores(cgroup: Path = _CGROUP) -> int:
    """Return the cores of this host that its processes may use, by what limits containers.

    Args:
        cgroup: where the kernel tells what it allows the container, if this is one.
    """
    cores = os.cpu_count() or 1
    # By version 2 and version 1 of the kernel's control groups.
    for file in ("cpuset.cpus.effective", "cpuset/cpuset.effective_cpus"):
        with contextlib.suppress(OSError, ValueError):
            cores = min(cores, _listed(_read(cgroup, file)))
    with contextlib.suppress(OSError, ValueError):  # none, or "max"
        cores = min(cores, _of_quota(*_read(cgroup, "cpu.max").split()))
    with contextlib.suppress(OSError, ValueError):
        quota = _read(cgroup, "cpu/cpu.cfs_quota_us")
        cores = min(cores, _of_quota(quota, _read(cgroup, "cpu/cpu.cfs_period_us")))
    return cores


def _read(cgroup: Path, file: str) -> str:
    return (cgroup / file).read_text().strip()


def _listed(cores: str) -> int:
    """Return how many cores a list of the kernel's names, such as ``0-3,8``.

    Raises:
        ValueError: it is none.
    """
    ends = [part.split("-") for part in cores.split(",")]
    return sum(int(end[-1]) - int(end[0]) + 1 for end in ends)


def _of_quota(allowed: str, period: str) -> int:
    """Return the cores that a quota of processor time is as good as.

    Raises:
        ValueError: there is none.
    """
    if int(allowed) <= 0:
        raise ValueError("no limit")
    return max(1, round(int(allowed) / int(period)))
