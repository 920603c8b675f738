"""Identity of this machine and its processes."""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
from pathlib import Path


def boot_id() -> str:
    """Return what is equal for all processes of a machine until it is started again."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def numbering() -> str:
    """Return eight letters for where a process's number means it: a name space of one boot."""
    space = f"{boot_id()} {os.readlink('/proc/self/ns/pid')}"
    return hashlib.sha256(space.encode()).hexdigest()[:8]


def process_start(pid: int) -> str | None:
    """Return when a process of this machine started, in clock ticks; ``None`` if it is gone.

    Numbers of processes come again; together with this they do not.
    """
    fields = _stat(pid)
    return None if fields is None or fields[0] == "Z" else fields[19]


def is_stopped(pid: int) -> bool:
    """Tell whether a process of this machine does nothing since SIGSTOP.

    One that is traced stops again and again, and goes on.
    """
    fields = _stat(pid)
    return fields is not None and fields[0] == "T"


def handles(pid: int, number: int) -> bool:
    """Tell whether a process of this machine handles a signal, in place of what it does by default.

    Args:
        pid: the process.
        number: the signal.
    """
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:  # it has ended
        return False
    caught = re.search(r"^SigCgt:\s*([0-9a-f]+)", status, re.MULTILINE)
    return caught is not None and bool(int(caught[1], 16) >> (number - 1) & 1)


def resident_bytes(pid: int) -> int:
    """Return how much memory a process of this machine holds, shared pages included, in bytes."""
    pages = Path(f"/proc/{pid}/statm").read_text().split()[1]
    return int(pages) * os.sysconf("SC_PAGE_SIZE")


def environment_at_start() -> dict[str, str]:
    """Return the environment this process was started with.

    That of now may have more: frameworks set variables when they are imported, which are not for
    another process (``KMP_INIT_AT_FORK``, ``TF_NUM_INTEROP_THREADS``).
    """
    try:
        data = Path("/proc/self/environ").read_bytes()
    except OSError:
        return dict(os.environ)
    pairs = (os.fsdecode(entry).partition("=") for entry in data.split(b"\0") if entry)
    environment = {name: text for name, separator, text in pairs if name and separator}
    # Programs that give themselves another title write it there.
    return environment if "PATH" in environment or "PATH" not in os.environ else dict(os.environ)


def exit_code_of(pid: int) -> int | None:
    """Return the exit code of an ended process of this user whose parent has not asked for it yet.

    That of a signal is negative; ``None`` if the process runs or is gone.
    """
    fields = _stat(pid)
    return (
        None if fields is None or fields[0] != "Z" else os.waitstatus_to_exitcode(int(fields[49]))
    )


def _stat(pid: int) -> list[str] | None:
    """Return what the kernel tells of a process from its state on; ``None`` if it is gone."""
    try:
        # The command's name, in brackets, may hold anything; the rest are numbers.
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None


def usable_cores(cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """Return the cores of this host that its processes may use, by a container's limits.

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
