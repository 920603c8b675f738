"""Who may start: as many runs as there is room for, in the order they come."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest

from horovod_spark_runner.cluster.driver.slot_queue import SlotDemand, SlotQueue, fits


def demand(
    slots: int, total: int | None = 4, shape: str = "1 core", where: str = "app"
) -> SlotDemand:
    return SlotDemand(where, shape, slots, total)


@pytest.mark.parametrize(
    ("requested", "running", "may"),
    [
        (demand(4), [], True),
        (demand(2), [demand(2)], True),
        (demand(1), [demand(2), demand(1)], True),
        (demand(3), [demand(2)], False),
        (demand(1), [demand(2), demand(2)], False),
        (demand(4), [demand(4, where="other")], True),
        # Slots of different tasks are not to be counted together, nor unknown ones.
        (demand(1), [demand(1, shape="2 cores")], False),
        (demand(1, total=None), [demand(1)], False),
        (demand(1), [demand(1, total=None)], False),
        (demand(9, total=None), [], True),
    ],
)
def test_what_fits(requested: SlotDemand, running: list[SlotDemand], may: bool) -> None:
    assert fits(requested, running) is may


class Runs:
    """Runs on threads of their own, which end when told to."""

    def __init__(self) -> None:
        self.turns = SlotQueue()
        self.started: list[str] = []
        self.queued: list[str] = []
        self.ends: dict[str, threading.Event] = {}
        self.threads: list[threading.Thread] = []

    def start(self, name: str, requested: SlotDemand) -> None:
        self.ends[name] = threading.Event()
        thread = threading.Thread(target=self._run, args=(name, requested))
        self.threads.append(thread)
        thread.start()
        self.until(lambda: name in self.started + self.queued)

    def _run(self, name: str, requested: SlotDemand) -> None:
        with self.turns.hold(requested, lambda: self.queued.append(name), lambda: None) as waited:
            assert waited is (name in self.queued)
            self.started.append(name)
            self.ends[name].wait(120)

    def until(self, holds: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 60
        while not holds():
            assert time.monotonic() < deadline
            time.sleep(0.01)

    def end(self) -> None:
        for event in self.ends.values():
            event.set()
        for thread in self.threads:
            thread.join(20)
            assert not thread.is_alive()


def test_a_large_run_is_not_overtaken() -> None:
    runs = Runs()
    runs.start("first", demand(3))
    runs.start("large", demand(4))
    runs.start("small", demand(1))  # for which there would be room
    runs.start("elsewhere", demand(4, where="other"))
    time.sleep(0.5)
    assert runs.started == ["first", "elsewhere"]
    assert runs.queued == ["large", "small"]
    runs.ends["first"].set()
    runs.until(lambda: "large" in runs.started)
    time.sleep(0.5)
    assert "small" not in runs.started
    runs.end()
    assert runs.started == ["first", "elsewhere", "large", "small"]


def test_one_that_gives_up_waiting_holds_up_nobody() -> None:
    runs = Runs()
    runs.start("first", demand(3))

    def give_up() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), runs.turns.hold(demand(4), give_up, lambda: None):
        pass
    with pytest.raises(KeyboardInterrupt), runs.turns.hold(demand(4), lambda: None, give_up):
        pass
    runs.start("second", demand(1))
    runs.until(lambda: "second" in runs.started)
    runs.end()


def test_one_that_waits_keeps_no_other_from_starting_and_ending() -> None:
    runs = Runs()
    runs.start("first", demand(4))
    looks, goes_on = threading.Event(), threading.Event()

    def look() -> None:
        looks.set()
        assert goes_on.wait(20)

    def wait() -> None:
        with runs.turns.hold(demand(4), lambda: None, look):
            pass

    runs.threads.append(threading.Thread(target=wait))
    runs.threads[-1].start()
    assert looks.wait(60)
    runs.start("elsewhere", demand(4, where="other"))
    runs.ends["elsewhere"].set()
    runs.threads[-1].join(10)
    assert not runs.threads[-1].is_alive()
    goes_on.set()
    runs.end()
