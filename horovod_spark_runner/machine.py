"""What tells this machine and its processes from others."""

from __future__ import annotations

from pathlib import Path


def boot_id() -> str:
    """Return what is equal for all processes of a machine until it is started again."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def process_start(pid: int) -> str | None:
    """Return when a process of this machine started, in clock ticks; ``None`` if it is gone.

    Numbers of processes come again; together with this they do not.
    """
    try:
        # The command's name, in brackets, may hold anything; the rest are numbers.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] == "Z" else fields[19]
