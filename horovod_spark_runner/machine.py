"""This machine: its identity, processes, cores and threads."""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

_SYSTEM = Path("/sys/devices/system/cpu")
# Cores of each rank, for `bind_to_cores`.
CPUS = "HSR_CPUS"
# Set where the user controls the placement of threads.
_DECIDED = ("OMP_PROC_BIND", "GOMP_CPU_AFFINITY", "KMP_AFFINITY")


def boot_id() -> str:
    """Return the identity of this machine's boot."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def numbering() -> str:
    """Return eight letters that identify the name space of process ids, within one boot."""
    space = f"{boot_id()} {os.readlink('/proc/self/ns/pid')}"
    return hashlib.sha256(space.encode()).hexdigest()[:8]


def process_start(pid: int) -> str | None:
    """Return the start of a process of this machine, in clock ticks; ``None`` if it has ended.

    Process ids are reused; together with the start they are unique.
    """
    fields = _stat(pid)
    return None if fields is None or fields[0] == "Z" else fields[19]


def is_stopped(pid: int) -> bool:
    """Return whether a process of this machine is stopped by SIGSTOP.

    A traced process, which stops repeatedly, is not.
    """
    fields = _stat(pid)
    return fields is not None and fields[0] == "T"


def handles(pid: int, number: int) -> bool:
    """Return whether a process of this machine has a handler for a signal.

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
    """Return the memory of a process of this machine in bytes, shared pages included."""
    pages = Path(f"/proc/{pid}/statm").read_text().split()[1]
    return int(pages) * os.sysconf("SC_PAGE_SIZE")


def environment_at_start() -> dict[str, str]:
    """Return the environment this process was started with.

    The current one may have more: frameworks set variables when they are imported, which must not
    reach other processes (``KMP_INIT_AT_FORK``, ``TF_NUM_INTEROP_THREADS``).
    """
    try:
        data = Path("/proc/self/environ").read_bytes()
    except OSError:
        return dict(os.environ)
    pairs = (os.fsdecode(entry).partition("=") for entry in data.split(b"\0") if entry)
    environment = {name: text for name, separator, text in pairs if name and separator}
    # Programs that change their title write it there.
    return environment if "PATH" in environment or "PATH" not in os.environ else dict(os.environ)


def exit_code_of(pid: int) -> int | None:
    """Return the exit code of an ended process of this user whose parent has not waited for it yet.

    That of a signal is negative; ``None`` if the process runs or does not exist.
    """
    fields = _stat(pid)
    return (
        None if fields is None or fields[0] != "Z" else os.waitstatus_to_exitcode(int(fields[49]))
    )


def _stat(pid: int) -> list[str] | None:
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


def _share_of_cores(
    allowed: Sequence[int], rank: int, ranks: int, cpus: int, online: int
) -> list[int]:
    """Return the cores of one rank; none if cores would be left over or unevenly shared. Pure.

    Also none where ranks need more cores than are allowed and these are not all of the host's: then
    other ranks may run on other cores, and the number that share these is unknown.

    Args:
        allowed: the cores that processes of this host may run on, neighbours side by side.
        rank: number among the ranks of this host, from 0.
        ranks: ranks of this host.
        cpus: cores of each.
        online: cores of the host.
    """
    cores = len(allowed)
    if ranks * cpus < cores or (cores % ranks and ranks % cores):
        return []
    if ranks * cpus > cores != online:
        return []
    first = rank * cores // ranks
    return list(allowed[first : first + max(1, cores // ranks)])


def side_by_side(cores: Iterable[int], system: Path = _SYSTEM) -> list[int]:
    """Return ``cores`` in an order in which those of a socket, and threads of a core, are together.

    Their numbers do not show it: most systems number the first threads of all cores first.
    """

    def position(core: int) -> tuple[int, int, int]:
        topology = system / f"cpu{core}" / "topology"
        try:
            package = int((topology / "physical_package_id").read_text())
            return package, int((topology / "core_id").read_text()), core
        except (OSError, ValueError):  # some virtual machines have no such files
            return 0, core, core

    return sorted(cores, key=position)


def bind_to_cores(environment: Mapping[str, str]) -> None:
    """Keep this process, all its threads, to its share of the host's cores, if it has one.

    Args:
        environment: variables, with those of mpirun that name the rank's number on this host.
    """
    if any(name in environment for name in _DECIDED):
        return
    try:
        rank = int(environment["OMPI_COMM_WORLD_LOCAL_RANK"])
        ranks = int(environment["OMPI_COMM_WORLD_LOCAL_SIZE"])
        allowed = side_by_side(os.sched_getaffinity(0))
        online = os.cpu_count() or len(allowed)
        cores = _share_of_cores(allowed, rank, ranks, int(environment[CPUS]), online)
        if cores:
            _set_affinity(cores)
    except (AttributeError, KeyError, OSError):
        pass  # not Linux, or not allowed here: only an optimization


def _set_affinity(cores: Iterable[int]) -> None:
    """Keep this process, all its threads, to these cores.

    Raises:
        OSError: the system does not allow it.
    """
    # Threads to come inherit it; imports have started some already.
    for thread in os.listdir("/proc/self/task"):
        with contextlib.suppress(ProcessLookupError):  # it has just ended
            os.sched_setaffinity(int(thread), cores)
