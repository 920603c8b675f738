"""What the driver makes of its slots' messages, over a real connection."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import ClassVar

import pytest

from horovod_spark_runner.cluster.driver import coordinator
from horovod_spark_runner.cluster.driver.control_server import ControlServer
from horovod_spark_runner.cluster.driver.coordinator import Coordinator
from horovod_spark_runner.cluster.driver.launch import run_job
from horovod_spark_runner.cluster.driver.watch import Verdict
from horovod_spark_runner.cluster.protocol import rendezvous
from horovod_spark_runner.cluster.protocol.messages import (
    Assigned,
    Dropped,
    Envelope,
    Failed,
    Gather,
    Hello,
    Instruction,
    Leaving,
    Located,
    Notice,
    RankReport,
    SlotReport,
)
from horovod_spark_runner.cluster.protocol.outcome import DIED, Failure, RankOutcome
from horovod_spark_runner.cluster.protocol.rendezvous import SlotPlan
from horovod_spark_runner.cluster.protocol.topology import SlotInfo
from horovod_spark_runner.cluster.slot.slot_link import SlotLink
from horovod_spark_runner.config.launch import LaunchSettings
from horovod_spark_runner.errors import EnvironmentProblem, RankFailedError
from horovod_spark_runner.observe.console import Console
from tests.connections import cut

KEY = b"k" * 32


class World:
    """A driver and its slots."""

    made: ClassVar[list[World]] = []

    def __init__(self, server: ControlServer, slots: int, *, quiet: bool = False) -> None:
        options = LaunchSettings(slots)
        self.plan = SlotPlan("unit", KEY, server.address, options, slots, slots, b"", 0)
        self.console = Console("run 1", quiet=quiet)
        self.coordinator = Coordinator(self.plan, server, self.console)
        self.links = [SlotLink(self.plan, slot) for slot in range(slots)]
        self.made.append(self)

    def say(self, slot: int, message: SlotReport | RankReport) -> None:
        self.links[slot].report(message)

    def place(self, slot: int) -> None:
        info = SlotInfo(slot, "h", "n", "10.0.0.1", 7000, "/t", (f"/t/{slot}",), ((),))
        self.say(slot, Located(info))

    def hear(self, slot: int) -> Instruction:
        """Return the next message to a slot; the driver goes on meanwhile."""
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            assert self.coordinator.step() is Verdict.CONTINUE
            for message in self.links[slot].receive():
                return message
        raise AssertionError("nothing was heard")

    def close(self) -> None:
        self.console.close()  # lines of runs that go on say whose they are
        for link in self.links:
            link.close()


@pytest.fixture
def server() -> Iterator[ControlServer]:
    with ControlServer("127.0.0.1", KEY) as server:
        yield server
    for world in World.made:
        world.close()
    World.made.clear()


def test_slots_are_told_their_ranks(
    server: ControlServer, capsys: pytest.CaptureFixture[str]
) -> None:
    world = World(server, 2)
    for slot in (1, 0):
        world.say(slot, Hello())
        world.place(slot)
    for slot in (0, 1):
        assigned = world.hear(slot)
        assert isinstance(assigned, Assigned)
        assert assigned.part.placements[0].rank == slot
    assert capsys.readouterr().err == "2 ranks on h: ranks 0, 1 (CPU)\n"


def test_slots_that_wait_in_vain_are_sent_to_spark(
    server: ControlServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rendezvous, "GATHER_AFTER", 0.2)
    monkeypatch.setattr(coordinator, "CHECK_SECONDS", 0.1)
    world = World(server, 3)
    world.place(0)
    assert world.hear(0) == Gather()
    world.place(2)
    assert world.hear(2) == Gather()


@pytest.mark.thorough
@pytest.mark.parametrize("quiet", [True, False])
def test_what_ranks_warn_of_reaches_the_caller_once(
    quiet: bool,
    server: ControlServer,
    caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
) -> None:
    world = World(server, 2, quiet=quiet)
    for slot in (0, 1):
        world.say(slot, Notice("the rate is kept", warn=True))
    world.say(1, Notice("all weights taken", warn=False))
    world.say(1, Dropped(1200))
    deadline = time.monotonic() + 1
    while time.monotonic() < deadline:
        world.coordinator.step()
    assert caplog.messages == ["the rate is kept"]  # also without progress and logs
    shown = capsys.readouterr().err.splitlines()
    if quiet:
        assert not shown
    else:
        taken, dropped = shown
        assert taken == "all weights taken"
        assert "1,200 lines" in dropped


def test_slots_whose_hosts_are_left_may_save_first(
    server: ControlServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World(server, 2)
    put = server.events.put

    def put_late(message: Envelope) -> None:
        time.sleep(0.1)
        put(message)

    monkeypatch.setattr(server.events, "put", put_late)
    world.say(1, Leaving("SIGTERM"))
    while not world.coordinator.watch.leaving:
        world.coordinator.step()
    began = time.monotonic()
    threading.Timer(0.5, world.links[1].close).start()
    world.coordinator.await_leaving_slots(10)
    assert 0.4 < time.monotonic() - began < 5
    world.coordinator.close()
    (lost,) = world.coordinator.watch.failures
    assert lost.failure is not None
    assert "SIGTERM" in lost.failure.message
    world.coordinator.await_leaving_slots(10)  # nobody is left to wait for


def test_slots_that_spark_missed_first_are_told_of(
    server: ControlServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(coordinator, "LOST_SECONDS", 0.2)
    world = World(server, 2)
    for slot in (0, 1):
        world.say(slot, Hello())
    while world.coordinator.watch.missing_slots:
        world.coordinator.step()
    time.sleep(0.3)
    world.say(0, Notice("it goes on", warn=True))
    deadline = time.monotonic() + 1
    while time.monotonic() < deadline and not caplog.messages:
        world.coordinator.step()
    world.coordinator.await_leaving_slots(10)
    (lost,) = world.coordinator.watch.failures
    assert lost.slot == 1
    assert lost.failure is not None
    assert "0.2 s" in lost.failure.message


def test_slots_that_have_ended_are_heard_out(server: ControlServer) -> None:
    world = World(server, 2)
    sent = [Notice(f"last words {number}", warn=False) for number in range(200)]
    for message in sent:
        world.say(1, message)
    while not server.has_any([1]):  # as of all slots long before they end
        time.sleep(0.001)
    for link in world.links:
        link.close()
    began = time.monotonic()
    world.coordinator.await_disconnects(10.0)
    assert time.monotonic() - began < 5
    heard = [envelope.message for envelope in server.events.drain()]
    assert [message for message in heard if isinstance(message, Notice)] == sent


def test_a_slot_that_stays_is_waited_for_no_longer_than_asked(server: ControlServer) -> None:
    world = World(server, 1)
    world.say(0, Notice("here", warn=False))
    while not server.has_any([0]):
        time.sleep(0.01)
    began = time.monotonic()
    world.coordinator.await_disconnects(0.05)
    assert 0.05 <= time.monotonic() - began < 5


def test_a_result_on_its_way_is_progress(
    server: ControlServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World(server, 1)
    (tmp_path / "result").write_bytes(bytes(8 << 20))
    heard: list[float] = []
    monkeypatch.setattr(world.coordinator.watch, "note_activity", heard.append)
    world.say(0, Hello())
    while world.coordinator.watch.missing_slots:
        world.coordinator.step()
    cut(server)  # a lost connection is restored for it
    assert world.links[0].send_result(0, tmp_path / "result", 8 << 20)
    deadline = time.monotonic() + 60
    while not heard and time.monotonic() < deadline:
        world.coordinator.step()
    assert heard
    received = server.result(0)
    assert received is not None
    assert len(received.read()) == 8 << 20


def test_a_result_that_the_driver_cannot_keep(
    server: ControlServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World(server, 1)
    (tmp_path / "result").write_bytes(b"12345678")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "none"))
    assert world.links[0].send_result(0, tmp_path / "result", 8)
    with pytest.raises(EnvironmentProblem, match="rank 0, 8 bytes.*TMPDIR.*none"):
        server.result(0)


class InterruptedJob:
    """A job whose driver is interrupted by an exception, as in a notebook; it ends when told."""

    error: BaseException | None = None
    cancelled_elsewhere = failed_by_itself = session_stopped = False

    def __init__(self) -> None:
        self.told: list[str] = []

    def start(self, on_end: Callable[[], object]) -> None:
        pass

    def is_alive(self) -> bool:
        return "save" not in self.told

    def join(self, timeout: float | None = None) -> None:
        self.told.append("join")

    def cancel(self) -> None:
        self.told.append("cancel")

    def outcomes(self) -> list[RankOutcome]:
        return []


class FailedJob(InterruptedJob):
    """A job that Spark has ended by itself, before the slots' last messages are there."""

    error: BaseException | None = RuntimeError("barrier ResultStage")
    failed_by_itself = True

    def is_alive(self) -> bool:
        return False


def test_the_last_messages_of_a_failed_job_name_the_slot_that_failed_first(
    server: ControlServer,
) -> None:
    world = World(server, 2)
    for slot in (0, 1):
        world.say(slot, Hello())
    while world.coordinator.watch.missing_slots:
        world.coordinator.step()
    died = Failed.of(Failure(DIED, 0.0, "its process exited with code 1"))

    def end() -> None:
        world.links[1].close()
        time.sleep(0.2)
        world.links[0].report(died, 0)  # because of that

    threading.Timer(0.3, end).start()
    with pytest.raises(RankFailedError, match=r"(?s)^slot 1 .*rank 0 .*code 1"):
        run_job(FailedJob(), world.coordinator)


def test_an_interrupt_of_the_end_cancels_the_job(server: ControlServer) -> None:
    class Impatient(InterruptedJob):
        def join(self, timeout: float | None = None) -> None:
            super().join()
            if self.told == ["join"]:
                raise KeyboardInterrupt

    world, job = World(server, 1), Impatient()
    world.coordinator.watch.take(Envelope(0, -1, "h", Hello()), 0.0)
    world.coordinator.watch.take(Envelope(0, -1, "h", Hello()), 0.0)  # given up
    with pytest.raises(KeyboardInterrupt):
        run_job(job, world.coordinator)
    assert job.told == ["join", "cancel", "join"]


@pytest.mark.parametrize("times", [1, 2])
def test_an_interrupt_that_is_an_exception_saves_first(
    server: ControlServer, monkeypatch: pytest.MonkeyPatch, times: int
) -> None:
    world, job = World(server, 1, quiet=True), InterruptedJob()
    left = times

    def poll() -> None:
        nonlocal left
        if left:
            left -= 1
            raise KeyboardInterrupt

    monkeypatch.setattr(world.coordinator, "poll_observer", poll)
    asked: list[int] = []

    def preempt() -> None:
        asked.append(left)
        if not left and times == 1:
            job.told.append("save")

    monkeypatch.setattr(world.coordinator, "preempt_ranks", preempt)
    with pytest.raises(KeyboardInterrupt):
        run_job(job, world.coordinator)
    assert asked == [times - 1]
    assert ("save" in job.told) == (times == 1)
