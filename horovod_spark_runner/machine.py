"""This machine: its boot, processes and cores; threads that repeat an action."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path


def boot_id() -> str:
    """Return the identity of this machine's boot."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def process_start(pid: int) -> str | None:
    """Return the start of a process of this machine, in clock ticks; ``None`` if it has ended.

    Process ids are reused; together with the start they are unique.
    """
    fields = process_fields(pid)
    return None if fields is None or fields[0] == "Z" else fields[19]


def process_fields(pid: int) -> list[str] | None:
    """Return a process's fields in ``/proc``, from its state on; ``None`` if it has ended."""
    try:
        # The command's name, in brackets, may hold anything; the rest are numbers.
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None


def usable_cores(cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """Return the number of cores that this host's processes may use, by a container's limits.

    Args:
        cgroup: mount point of the kernel's control groups.
    """
    cores = os.cpu_count() or 1
    # Version 2 and version 1 of control groups.
    for file in ("cpuset.cpus.effective", "cpuset/cpuset.effective_cpus"):
        with contextlib.suppress(OSError, ValueError):
            ends = [part.split("-") for part in (cgroup / file).read_text().strip().split(",")]
            cores = min(cores, sum(int(end[-1]) - int(end[0]) + 1 for end in ends))
    for quota, period in (("cpu.max", ""), ("cpu/cpu.cfs_quota_us", "cpu/cpu.cfs_period_us")):
        with contextlib.suppress(OSError, ValueError):  # no limit: no file, "max" or -1
            numbers = (cgroup / quota).read_text().split()
            numbers += (cgroup / period).read_text().split() if period else []
            if int(numbers[0]) > 0:
                cores = min(cores, max(1, round(int(numbers[0]) / int(numbers[1]))))
    return cores


@contextlib.contextmanager
def repeat_in_thread(
    action: Callable[[], object], name: str, *, every: float, first: float | None = None
) -> Iterator[None]:
    """Call ``action`` repeatedly in a thread while the block runs; it has ended afterwards.

    Args:
        action: what to do.
        name: of the thread.
        every: seconds between two calls.
        first: seconds until the first call; by default ``every``.
    """
    ended = threading.Event()

    def repeat() -> None:
        wait = every if first is None else first
        while not ended.wait(wait):
            wait = every
            action()

    thread = threading.Thread(target=repeat, name=name, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
