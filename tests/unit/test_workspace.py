"""What a slot leaves is cleared up, also where what clears up was killed."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from horovod_spark_runner.cluster.protocol.processes import numbering
from horovod_spark_runner.cluster.slot import workspace as module
from horovod_spark_runner.cluster.slot.node_runtime import _Daemon
from horovod_spark_runner.cluster.slot.workspace import Workspace
from horovod_spark_runner.errors import EnvironmentProblem
from tests.faults.disks import memory_disk

# Says where its directories are, and the number of its sweeper.
SLOT = """
import sys, time
from horovod_spark_runner.cluster.slot.workspace import Workspace
made = Workspace(sys.argv[1])
print(made.path, made.shared_memory, made._sweeper.pid, flush=True)
time.sleep(600)
"""


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The temporary folder."""
    monkeypatch.setattr(module, "short_temporary", lambda below: str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    return tmp_path


@contextlib.contextmanager
def slot() -> Iterator[tuple[subprocess.Popen[str], list[Path], psutil.Process]]:
    """Run a slot in a process of its own: that, its directories, and its sweeper."""
    arguments = [sys.executable, "-c", SLOT, uuid.uuid4().hex[:8]]
    # Paths of tests may be too long for what lies in them: then it is in /tmp.
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        *paths, sweeper = process.stdout.readline().split()
        places = [Path(path) for path in paths if path != "None"]
        yield process, places, psutil.Process(int(sweeper))
        process.kill()


@contextlib.contextmanager
def another() -> Iterator[Workspace]:
    made = Workspace(uuid.uuid4().hex[:8])
    try:
        yield made
    finally:
        made.close()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_slot_clears_up_where_its_sweeper_does_not(
    number: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "CLOSE_TIMEOUT", 0.5)
    with another() as made, subprocess.Popen(["sleep", "600"], start_new_session=True) as child:
        made.watch(child.pid)
        os.kill(made._sweeper.pid, number)
        made.close()
        assert child.wait(60) == -signal.SIGKILL
        assert not made.path.exists()
        assert made.shared_memory is None or not made.shared_memory.exists()
        assert made._sweeper.wait(60) == -signal.SIGKILL


def test_the_next_slot_removes_what_one_left_that_was_killed_with_its_sweeper(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with slot() as (process, places, sweeper), slot() as (_, living, _):
        monkeypatch.setattr(module, "short_temporary", lambda below: str(places[0].parent))
        sweeper.kill()
        process.kill()
        process.wait()
        assert all(place.exists() for place in places)
        with another():
            assert not any(place.exists() for place in places)
            assert all(place.exists() for place in living)


def test_what_may_be_of_a_living_slot_is_left_alone(temporary: Path) -> None:
    elsewhere, unsigned, open_to_all = (temporary / f"hsr-{name}" for name in "abc")
    for place in (elsewhere, unsigned, open_to_all):
        place.mkdir(mode=0o700)
    (elsewhere / "owner-1").write_text(f"00000000 {2**22 + 1} 5")
    (open_to_all / "owner-1").write_text(f"{numbering()} {2**22 + 1} 5")
    open_to_all.chmod(0o755)
    half = temporary / "hsr-d"
    half.mkdir(mode=0o700)
    (half / "owner-1").touch()
    with another():
        assert all(place.exists() for place in (elsewhere, unsigned, open_to_all, half))
    open_to_all.chmod(0o700)
    with another():
        assert not open_to_all.exists()


@pytest.mark.parametrize("place", ["TMPDIR", "shared memory"])
@pytest.mark.parametrize("options", ["64k", "1m,nr_inodes=1", "1m,nr_inodes=2"])
def test_a_place_without_room_is_named_and_left_as_it_was(
    temporary: Path, monkeypatch: pytest.MonkeyPatch, place: str, options: str
) -> None:
    other = temporary / "other"
    other.mkdir()
    with memory_disk(temporary / "disk", options) as disk:
        if options == "64k":
            with contextlib.suppress(OSError), (disk / "filler").open("wb", 0) as filler:
                while True:
                    filler.write(bytes(4096))
        before = list(disk.iterdir())
        at = (disk, other) if place == "TMPDIR" else (other, disk)
        monkeypatch.setattr(module, "short_temporary", lambda below: str(at[0]))
        monkeypatch.setattr(module, "_SHARED_MEMORY", at[1])
        with pytest.raises(EnvironmentProblem, match=rf"{disk}.*{os.uname().nodename}.*inode"):
            Workspace(uuid.uuid4().hex[:8])
        assert list(disk.iterdir()) == before
        assert list(other.iterdir()) == []


def test_an_mpirun_that_found_no_room_is_said_to_have(temporary: Path) -> None:
    command = ["/bin/sh", "-c", "kill -BUS $$"]
    with memory_disk(temporary / "disk", "1m") as disk, contextlib.ExitStack() as closing:
        for place, message in (
            (disk, r"SIGBUS.*/hsr-\S+.*\b1 MiB.*TMPDIR"),
            (temporary, r"SIGBUS\W*$"),
        ):
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(module, "short_temporary", lambda below, place=place: str(place))
                made = Workspace(uuid.uuid4().hex[:8])
            closing.callback(made.close)
            daemon = _Daemon(command, dict(os.environ), made)
            closing.callback(daemon.close)
            assert re.search(message, daemon.describe_end())


def test_shared_memory_without_inodes_is_said_to_have_none(
    temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with memory_disk(temporary / "disk", "64m,nr_inodes=8") as disk:
        monkeypatch.setattr(module, "_SHARED_MEMORY", disk)
        assert Workspace.lacking_shared_memory() == ""
        with contextlib.suppress(OSError):
            for number in range(8):
                (disk / str(number)).touch()
        assert re.search(rf"{disk}.*no inodes", Workspace.lacking_shared_memory())
