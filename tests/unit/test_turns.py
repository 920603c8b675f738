"""Who may start: as many runs as there is room for, in the order they come."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest

from horovod_spark_runner.cluster.driver.slot_queue import Claim, Turns, fits


def claim(slots: int, total: int | None = 4, demand: str = "1 core", where: str = "app") -> Claim:
    return Claim(where, demand, slots, total)


@pytest.mark.parametrize(
    ("asked", "running", "may"),
    [
        (claim(4), [], True),
        (claim(2), [claim(2)], True),
        (claim(1), [claim(2), claim(1)], True),
        (claim(3), [claim(2)], False),
        (claim(1), [claim(2), claim(2)], False),
        (claim(4), [claim(4, where="other")], True),
        # Slots of different tasks are not to be counted together, nor unknown ones.
        (claim(1), [claim(1, demand="2 cores")], False),
        (claim(1, total=None), [claim(1)], False),
        (claim(1), [claim(1, total=None)], False),
        (claim(9, total=None), [], True),
    ],
)
def test_what_fits(asked: Claim, running: list[Claim], may: bool) -> None:
    assert fits(asked, running) is may


class Runs:
    """Runs on threads of their own, which end when told to."""

    def __init__(self) -> None:
        self.turns = Turns()
        self.started: list[str] = []
        self.told: list[str] = []
        self.ends: dict[str, threading.Event] = {}
        self.threads: list[threading.Thread] = []

    def start(self, name: str, asked: Claim) -> None:
        self.ends[name] = threading.Event()
        thread = threading.Thread(target=self._run, args=(name, asked))
        self.threads.append(thread)
        thread.start()
        self.until(lambda: name in self.started + self.told)

    def _run(self, name: str, asked: Claim) -> None:
        with self.turns.turn(asked, lambda: self.told.append(name), lambda: None) as waited:
            assert waited is (name in self.told)
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
    runs.start("first", claim(3))
    runs.start("large", claim(4))
    runs.start("small", claim(1))  # for which there would be room
    runs.start("elsewhere", claim(4, where="other"))
    time.sleep(0.5)
    assert runs.started == ["first", "elsewhere"]
    assert runs.told == ["large", "small"]
    runs.ends["first"].set()
    runs.until(lambda: "large" in runs.started)
    time.sleep(0.5)
    assert "small" not in runs.started
    runs.end()
    assert runs.started == ["first", "elsewhere", "large", "small"]


def test_one_that_gives_up_waiting_holds_up_nobody() -> None:
    runs = Runs()
    runs.start("first", claim(3))

    def give_up() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), runs.turns.turn(claim(4), give_up, lambda: None):
        pass
    with pytest.raises(KeyboardInterrupt), runs.turns.turn(claim(4), lambda: None, give_up):
        pass
    runs.start("second", claim(1))
    runs.until(lambda: "second" in runs.started)
    runs.end()


def test_one_that_waits_keeps_no_other_from_starting_and_ending() -> None:
    runs = Runs()
    runs.start("first", claim(4))
    looks, goes_on = threading.Event(), threading.Event()

    def look() -> None:
        looks.set()
        assert goes_on.wait(20)

    def wait() -> None:
        with runs.turns.turn(claim(4), lambda: None, look):
            pass

    runs.threads.append(threading.Thread(target=wait))
    runs.threads[-1].start()
    assert looks.wait(60)
    runs.start("elsewhere", claim(4, where="other"))
    runs.ends["elsewhere"].set()
    runs.threads[-1].join(10)
    assert not runs.threads[-1].is_alive()
    goes_on.set()
    runs.end()
