"""Faults while a function runs: each ends the run soon, explains itself and leaves nothing."""

from __future__ import annotations

import contextlib
import gc
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from horovod_spark_runner import (
    EnvironmentProblem,
    HorovodRunner,
    HorovodSparkError,
    LaunchError,
    MpiOptions,
    RankFailedError,
    RunCancelledError,
    StalledError,
)
from horovod_spark_runner.cluster.driver.control_server import ControlServer
from horovod_spark_runner.cluster.protocol.messages import Envelope, Silent
from tests.connections import cut as drop_connections
from tests.leftovers import await_nothing_left, leftovers, own_task

pytestmark = [pytest.mark.mpi, pytest.mark.spark]
HOST = os.uname().nodename
# From the fault to the exception; far more than it takes on an idle machine.
SOON = 20.0


def allreduce_forever(folder: str) -> None:
    """Leave the process ids in ``folder``, then take part in allreduces until ended."""
    import horovod.tensorflow as hvd
    import tensorflow as tf

    hvd.init()
    print(f"rank {hvd.rank()} is in the loop", flush=True)
    # The slot is the Spark task's Python process.
    Path(folder, f"{hvd.rank()}.pid").write_text(f"{os.getpid()} {own_task()}")
    while True:
        hvd.allreduce(tf.constant(1.0), name="x")
        time.sleep(0.02)


class Fault(threading.Thread):
    """Does something to the run once all ranks are in their loop; notes when."""

    def __init__(self, folder: Path, ranks: int, do: Any) -> None:
        super().__init__(daemon=True)
        self._folder, self._ranks, self._do = folder, ranks, do
        self.at = 0.0

    def run(self) -> None:
        while len(list(self._folder.glob("*.pid"))) < self._ranks:
            time.sleep(0.05)
        time.sleep(0.3)
        self.at = time.monotonic()
        self._do()

    def pids(self, rank: int) -> tuple[int, int]:
        worker, slot = (self._folder / f"{rank}.pid").read_text().split()
        return int(worker), int(slot)


def run_with_fault(folder: Path, ranks: int, do: Any, **options: Any) -> tuple[Exception, float]:
    """Return the exception of the run and the seconds from the fault to it."""
    fault: Fault = Fault(folder, ranks, lambda: do(fault))
    fault.start()
    with pytest.raises(HorovodSparkError) as caught:
        HorovodRunner(ranks, stream_logs=False, **options).run(allreduce_forever, str(folder))
    seconds = time.monotonic() - fault.at
    await_nothing_left()
    return caught.value, seconds


@pytest.mark.thorough
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_a_rank_killed_while_it_runs(spark: Any, tmp_path: Path, ranks: int) -> None:
    victim = ranks - 1
    error, seconds = run_with_fault(
        tmp_path, ranks, lambda fault: os.kill(fault.pids(victim)[0], signal.SIGKILL)
    )
    assert isinstance(error, RankFailedError)
    assert (error.rank, error.host) == (victim, HOST)
    assert re.search("signal 9.*SIGKILL", str(error))
    assert f"rank {victim} is in the loop" in str(error)
    assert seconds < SOON


def crash_in_c() -> None:
    import ctypes

    def whose_line_is_asked_for() -> None:
        ctypes.string_at(0)

    whose_line_is_asked_for()


@pytest.mark.parametrize("idle_timeout", [60.0, 0.0])  # a forked worker, and one that is started
def test_a_crash_shows_the_stacks_of_python_and_of_c(
    spark: Any, tmp_path: Path, idle_timeout: float
) -> None:
    runner = HorovodRunner(
        1, stream_logs=False, worker_idle_timeout=idle_timeout, log_dir=str(tmp_path)
    )
    with pytest.raises(RankFailedError, match="signal 11.*SIGSEGV") as caught:
        runner.run(crash_in_c)
    log = (tmp_path / "rank-00000.log").read_text()
    for text in (str(caught.value), log):
        assert "Fatal Python error: Segmentation fault" in text
        assert "in whose_line_is_asked_for" in text
        assert "End of error message" in text  # of Open MPI's handler, which shows C's frames
        assert "Extension modules" not in text
    assert "in whose_line_is_asked_for" in caught.value.remote_traceback
    assert caught.value.exception_type is None


@pytest.mark.thorough
def test_a_killed_python_worker_of_spark_is_a_lost_rank(spark: Any, tmp_path: Path) -> None:
    error, seconds = run_with_fault(
        tmp_path, 2, lambda fault: os.kill(fault.pids(1)[1], signal.SIGKILL)
    )
    assert isinstance(error, RankFailedError)
    assert error.rank == 1
    assert "Spark task" in str(error)
    assert "rank 1 is in the loop" in str(error)
    assert seconds < SOON


def signal_mpirun(number: signal.Signals) -> None:
    """Send a signal to the mpirun that this test started: the one below this process."""
    import psutil

    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):  # or a zombie
            if "prterun" in " ".join(process.cmdline()):
                process.send_signal(number)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("number", "told"),
    [
        (signal.SIGKILL, "mpirun.*signal 9.*SIGKILL"),
        (signal.SIGTERM, "mpirun.*code"),  # it ends its ranks, then itself
    ],
)
def test_mpirun_is_ended(spark: Any, tmp_path: Path, number: signal.Signals, told: str) -> None:
    error, seconds = run_with_fault(tmp_path, 2, lambda fault: signal_mpirun(number))
    assert isinstance(error, LaunchError)
    assert re.search(told, str(error))
    assert seconds < SOON


def raise_once_told(folder: str) -> None:
    """Leave the process ids in ``folder``; rank 1 then raises once the file "go" is there."""
    import horovod.tensorflow as hvd
    import tensorflow as tf

    hvd.init()
    Path(folder, f"{hvd.rank()}.pid").write_text(f"{os.getpid()} {own_task()}")
    while hvd.rank() == 0 or not Path(folder, "go").exists():
        hvd.allreduce(tf.constant(1.0), name="x")
        time.sleep(0.02)
    raise ValueError("told to")


@pytest.mark.thorough
def test_a_stopped_mpirun_hides_no_exception(
    spark: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It would end the ranks, which wait for it."""

    def do() -> None:
        signal_mpirun(signal.SIGSTOP)
        (tmp_path / "go").touch()

    fault = Fault(tmp_path, 2, do)
    fault.start()
    with pytest.raises(RankFailedError, match="ValueError: told to") as caught:
        HorovodRunner(2, stream_logs=False).run(raise_once_told, str(tmp_path))
    assert caught.value.rank == 1
    assert time.monotonic() - fault.at < SOON
    assert re.search(r"mpirun.*\d+.*SIGSTOP", caplog.text)
    await_nothing_left()


@pytest.mark.thorough
def test_a_stopped_mpirun_is_named_by_a_stall(spark: Any, tmp_path: Path) -> None:
    error, _ = run_with_fault(
        tmp_path, 2, lambda fault: signal_mpirun(signal.SIGSTOP), stall_timeout=4
    )
    assert isinstance(error, StalledError)
    assert re.search(r"mpirun.*\d+.*stopped", str(error))


@pytest.mark.thorough
@pytest.mark.parametrize(
    "cancel",
    [
        lambda spark: spark.sparkContext.cancelAllJobs(),
        lambda spark: spark.sparkContext.cancelJobGroup("nightly"),
        lambda spark: spark.sparkContext.cancelJobsWithTag("team-a"),
        lambda spark: spark.interruptAll(),
    ],
    ids=["all", "group", "tag", "session"],
)
def test_a_job_cancelled_through_spark(
    spark: Any, tmp_path: Path, cancel: Callable[[Any], None]
) -> None:
    """A run is its caller's job: it has the group and the tags that are set around the call."""
    spark.sparkContext.setJobGroup("nightly", "what runs at night")
    spark.sparkContext.addJobTag("team-a")
    try:
        error, seconds = run_with_fault(tmp_path, 2, lambda fault: cancel(spark))
    finally:
        spark.sparkContext.removeJobTag("team-a")
        for name in ("spark.jobGroup.id", "spark.job.description"):
            spark.sparkContext.setLocalProperty(name, None)
    assert isinstance(error, RunCancelledError)
    assert seconds < SOON


def allreduce_for_a_while(folder: str) -> float:
    """Go on for as long as slots take to connect again, and a while; return the last sum."""
    import horovod.tensorflow as hvd
    import tensorflow as tf

    hvd.init()
    Path(folder, f"{hvd.rank()}.pid").write_text(f"{os.getpid()} {own_task()}")
    until, over = time.monotonic() + 100, Path(folder, "over")
    total = 0.0
    while not hvd.allreduce(
        tf.constant(float(over.exists() or time.monotonic() > until)), name="end"
    ):
        total = float(hvd.allreduce(tf.constant(1.0), name="x", op=hvd.Sum))
        print("goes on", flush=True)
        time.sleep(0.1)
    return total


def servers() -> list[ControlServer]:
    """Return the driver's ends of the runs of this process that are not over."""
    # By type: isinstance would ask lazy objects of frameworks for their class.
    found = [thing for thing in gc.get_objects() if type(thing) is ControlServer]
    return [server for server in found if server._thread.is_alive()]


def connections() -> dict[int, Any]:
    """Return the driver's connection to each slot."""
    return {slot: peer for server in servers() for slot, peer in list(server._slots.items())}


@pytest.mark.thorough
def test_lost_connections_to_the_driver_harm_nothing(
    spark: Any, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    lost: dict[int, Any] = {}
    again: dict[int, Any] = {}

    def cut() -> None:
        """Close the driver's connections to all slots, as a network that drops them would."""
        capfd.readouterr()
        deadline = time.monotonic() + 60
        # On a busy machine slots may find each other by Spark before they reach the driver.
        while time.monotonic() < deadline and len(lost) < 2:
            lost.update(connections())
            time.sleep(0.05)
        for server in servers():
            drop_connections(server)
        while time.monotonic() < deadline and not (
            len(again) == 2 and all(again[slot] is not lost[slot] for slot in again)
        ):
            again.update(connections())
            time.sleep(0.05)
        time.sleep(4)
        (tmp_path / "over").touch()

    fault = Fault(tmp_path, 2, cut)
    fault.start()
    run = HorovodRunner(2).run(allreduce_for_a_while, str(tmp_path))
    assert run.results == (2.0, 2.0)
    fault.join(60)
    assert lost.keys() == again.keys() == {0, 1}
    assert all(again[slot] is not lost[slot] for slot in lost)
    # Lines of both ranks keep coming.
    lines = capfd.readouterr().err
    assert lines.count("[0/") > 10
    assert lines.count("[1/") > 10


def hang(rank: int) -> None:
    """Let one rank leave the others alone in a collective."""
    import horovod.tensorflow as hvd
    import tensorflow as tf

    hvd.init()
    if hvd.rank() == rank:
        while True:
            print("still here", flush=True)
            time.sleep(1)
    hvd.allreduce(tf.constant(1.0), name="never")


def test_a_stalled_run_shows_where_every_rank_is(spark: Any) -> None:
    chatty = {"HOROVOD_STALL_CHECK_TIME_SECONDS": "1"}
    with pytest.raises(StalledError, match=r"stall_timeout=4 s") as caught:
        HorovodRunner(2, stall_timeout=4, stream_logs=False, env=chatty).run(hang, 1)
    assert set(caught.value.stacks) == {0, 1}
    assert "in hang" in caught.value.stacks[1]
    assert "allreduce" in caught.value.stacks[0]
    await_nothing_left()


def stop(what: str) -> None:
    """Stop a process of rank 1 as a debugger or a frozen container does, and wait for it."""
    import horovod.tensorflow as hvd
    import tensorflow as tf

    hvd.init()
    if hvd.rank() == 0:
        signal.signal(signal.SIGUSR2, signal.SIG_DFL)
    else:
        os.kill(os.getpid() if what == "rank" else own_task(), signal.SIGSTOP)
    for _ in range(600):
        hvd.allreduce(tf.constant(1.0), name="x")
        time.sleep(0.1)


@pytest.mark.thorough
def test_a_stopped_rank_is_a_stall(spark: Any) -> None:
    with pytest.raises(StalledError, match=r"stall_timeout=4 s") as caught:
        HorovodRunner(2, stall_timeout=4, stream_logs=False).run(stop, "rank")
    assert "SIGUSR2" in caught.value.stacks[0]
    named = r"rank 1 on \S+:\n.*\d+.*SIGSTOP"
    assert re.search(named, str(caught.value))
    await_nothing_left()


@pytest.mark.thorough
def test_a_stopped_slot_is_lost(spark: Any) -> None:
    began = time.monotonic()
    runner = HorovodRunner(2, heartbeat_timeout=15, stream_logs=False)
    with pytest.raises(RankFailedError, match="rank 1 .* 15 s"):
        runner.run(stop, "slot")
    assert time.monotonic() - began < 90  # its start included
    await_nothing_left()


def exhaust_memory() -> None:
    """Ask for more memory than the limit set here allows."""
    import resource

    resource.setrlimit(resource.RLIMIT_AS, (8 << 30, 8 << 30))
    bytearray(64 << 30)


@pytest.mark.thorough
def test_slots_that_cannot_reach_the_driver_say_where(
    spark: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        closed = listener.getsockname()
    monkeypatch.setattr(ControlServer, "address", property(lambda server: closed))
    with pytest.raises(LaunchError, match=f"driver.*127.0.0.1.*{closed[1]}"):
        HorovodRunner(2, stream_logs=False).run(max, 1, 2)


@pytest.mark.thorough
def test_what_the_driver_knew_is_not_lost(spark: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def silent(server: ControlServer, seconds: float) -> list[Any]:
        return [
            Envelope(p.slot, p.rank, p.host, Silent(seconds))
            for p in server._current()
            if p.slot is not None and p.rank == 1
        ]

    monkeypatch.setattr(ControlServer, "silent_slots", silent)
    with pytest.raises(RankFailedError, match=" 30 s"):
        HorovodRunner(2, stream_logs=False).run(time.sleep, 60)


def work_slowly() -> str:
    import horovod_spark_runner

    for _ in range(7):
        time.sleep(1)
        horovod_spark_runner.report_progress()
    return "done"


@pytest.mark.thorough
def test_a_function_that_tells_of_its_progress_does_not_stall(spark: Any) -> None:
    assert HorovodRunner(1, stall_timeout=4, stream_logs=False).run(work_slowly).result == "done"


def test_a_rank_out_of_memory(spark: Any) -> None:
    with pytest.raises(RankFailedError, match="MemoryError"):
        HorovodRunner(2, stream_logs=False).run(exhaust_memory)


def lack_something() -> None:
    raise EnvironmentProblem("a package is not installed here")


def test_what_a_rank_lacks_is_told_as_what_it_is(spark: Any) -> None:
    with pytest.raises(EnvironmentProblem, match=rf"^rank 0 .*{HOST}.*package is not") as caught:
        HorovodRunner(num_workers=1, stream_logs=False).run(lack_something)
    assert isinstance(caught.value.__cause__, EnvironmentProblem)


def grandchildren(folder: str) -> None:
    """Start a process that would outlive this rank, then be killed."""
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)", "cluster.worker.main"])
    allreduce_forever(folder)


def test_what_a_rank_started_ends_with_its_slot(spark: Any, tmp_path: Path) -> None:
    there = []

    def end(fault: Fault) -> None:
        there.extend(leftovers())
        os.kill(fault.pids(0)[1], signal.SIGKILL)

    fault: Fault = Fault(tmp_path, 1, lambda: end(fault))
    fault.start()
    with pytest.raises(RankFailedError):
        HorovodRunner(1, stream_logs=False).run(grandchildren, str(tmp_path))
    assert any("time.sleep(600)" in process for process in there)
    await_nothing_left()


def speak() -> None:
    import horovod.tensorflow as hvd

    hvd.init()
    print(f"grüße von {hvd.rank()}: " + "ä" * 100_000)
    if hvd.rank() == 1:
        raise KeyError("the culprit")


@pytest.mark.thorough
def test_the_full_log_of_each_rank_is_kept(spark: Any, tmp_path: Path) -> None:
    with pytest.raises(RankFailedError):
        HorovodRunner(2, stream_logs=False, log_dir=str(tmp_path / "logs")).run(speak)
    logs = sorted((tmp_path / "logs").iterdir())
    assert [log.name for log in logs] == ["rank-00000.log", "rank-00001.log"]
    text = logs[1].read_text()
    assert f"rank 1 of 2 on {HOST}" in text
    assert "grüße von 1" in text
    assert text.count("ä") == 100_000


def test_a_log_that_cannot_be_written_harms_nothing(spark: Any) -> None:
    run = HorovodRunner(2, stream_logs=False, log_dir="/proc/no-such-place").run(max, 1, 2)
    assert run.results == (2, 2)


@pytest.mark.thorough
def test_large_calls_and_results_pass_beside_spark(spark: Any) -> None:
    data = os.urandom(300 * 1024 * 1024)
    run = HorovodRunner(2, stream_logs=False).run(lambda value: value[::-1], data)
    assert run.results[0] == run.results[1] == data[::-1]


def test_an_interface_that_is_not_there_is_named_with_those_that_are(spark: Any) -> None:
    with pytest.raises(LaunchError, match=r"network_interface='nope7'.* lo"):
        HorovodRunner(2, mpi=MpiOptions(network_interface="nope7"), stream_logs=False).run(
            max, 1, 2
        )


def test_an_interface_may_be_a_network(spark: Any) -> None:
    run = HorovodRunner(2, mpi=MpiOptions(network_interface="127.0.0.0/8"), stream_logs=False).run(
        max, 1, 2
    )
    assert run.results == (2, 2)


def close_all_files() -> None:
    os.closerange(0, 1000)


@pytest.mark.thorough
def test_a_rank_that_closes_its_connections_does_not_hang_the_run(spark: Any) -> None:
    with pytest.raises(RankFailedError, match=r"connection"):
        HorovodRunner(2, stream_logs=False).run(close_all_files)
    await_nothing_left()


STOPPED_SESSION = """
import sys, threading, time
from collections.abc import Callable
from pathlib import Path
from pyspark.sql import SparkSession
from horovod_spark_runner import HorovodRunner, RunCancelledError
spark = SparkSession.builder.master("local[2]").config("spark.ui.enabled", "false").getOrCreate()
spark.sparkContext.setLogLevel("OFF")
begun = Path(sys.argv[1])

def stop():
    while not begun.exists():
        time.sleep(0.1)
    if sys.argv[2] == "slowly":  # for longer than the run takes to end
        spark.sparkContext._jsc.sc().stop()
        time.sleep(20)
    spark.stop()

def wait(place):
    Path(place).touch()
    time.sleep(60)

stopping = threading.Thread(target=stop)
stopping.start()
try:
    HorovodRunner(2, stream_logs=False).run(wait, sys.argv[1])
except RunCancelledError as error:
    print(error)
stopping.join()
"""


@pytest.mark.thorough
@pytest.mark.parametrize("how", ["at once", "slowly"])
def test_a_session_that_is_stopped_during_a_run(tmp_path: Path, how: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", STOPPED_SESSION, str(tmp_path / "begun"), how],
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert "Spark session" in "".join(done.stdout.splitlines()[-1:]), done.stderr[-2000:]
