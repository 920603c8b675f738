"""Runs of several threads: at once where there is room, in the order they come where not."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from horovod_spark_runner import HorovodRunner

pytestmark = [pytest.mark.mpi, pytest.mark.spark]


def meet(folder: str, name: str, others: list[str]) -> tuple[int, int, int]:
    """Wait until the runs of these names go on, too; return rank, size and the parent process."""
    import horovod.tensorflow as hvd
    import tensorflow as tf

    hvd.init()
    Path(folder, f"{name}-{hvd.rank()}").touch()
    deadline = time.monotonic() + 60
    while not all(Path(folder, f"{other}-0").exists() for other in others):
        if time.monotonic() > deadline:
            raise TimeoutError(f"{name} is alone")
        time.sleep(0.05)
    if ASKED in others:
        time.sleep(2)  # it comes to wait meanwhile
    return hvd.rank(), int(hvd.allreduce(tf.constant(1.0), op=hvd.Sum)), os.getppid()


# What is there once a run that has to wait is asked for.
ASKED = "asked"


def at_once(*calls: Callable[[], Any]) -> list[Any]:
    """Return what the calls give, each made in a thread, one begun after the other."""
    found: list[Any] = [None] * len(calls)

    def call(number: int) -> None:
        try:
            found[number] = calls[number]()
        except BaseException as error:
            found[number] = error

    threads = [threading.Thread(target=call, args=(number,)) for number in range(len(calls))]
    for thread in threads:
        thread.start()
        time.sleep(0.3)
    for thread in threads:
        thread.join(150)
        assert not thread.is_alive()
    return found


def test_runs_share_the_slots_there_are(
    spark: Any, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Two runs of two ranks have room beside each other; one of all slots waits for both."""
    folder = str(tmp_path)

    def run(name: str, ranks: int | None, others: list[str]) -> Callable[[], Any]:
        return lambda: HorovodRunner(ranks, spark=spark).run(meet, folder, name, others).results

    def ask_for_all() -> Any:
        (tmp_path / f"{ASKED}-0").touch()
        return run("all", None, ["one", "two"])()

    one, two, everything = at_once(
        run("one", 2, ["two", ASKED]), run("two", 2, ["one", ASKED]), ask_for_all
    )
    parents = {parent for _, _, parent in (*one, *two, *everything)}
    assert [result[:2] for result in one] == [(0, 2), (1, 2)]
    assert [result[:2] for result in two] == [(0, 2), (1, 2)]
    assert [result[:2] for result in everything] == [(rank, 4) for rank in range(4)]
    assert len(parents) == 1, "all are forked from the executor's one prefork process"
    shown = capfd.readouterr().err
    assert shown.count("waiting for slots") >= 1  # told again where it takes long


@pytest.mark.thorough
def test_one_port_has_room_for_one_run(spark: Any, capfd: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    spark.conf.set("spark.horovod.controlPort", str(port))
    try:
        found = at_once(
            *(partial(HorovodRunner(1, spark=spark).run, time.sleep, 1) for _ in range(2))
        )
    finally:
        spark.conf.unset("spark.horovod.controlPort")
    assert [run.results for run in found] == [(None,), (None,)]
    assert capfd.readouterr().err.count("waiting for slots") == 1


def look_around(folder: str, name: str, others: list[str]) -> str | None:
    meet(folder, name, others)
    return os.environ.get("HSR_TEST_ENVIRONMENT")


@pytest.mark.thorough
def test_ready_processes_of_different_environments_do_not_harm_each_other(
    spark: Any, tmp_path: Path
) -> None:
    def run(name: str, other: str) -> Callable[[], Any]:
        environment = {"HSR_TEST_ENVIRONMENT": name}
        runner = HorovodRunner(1, spark=spark, stream_logs=False, env=environment)
        return lambda: runner.run(look_around, str(tmp_path), name, [other]).result

    for _ in range(2):
        assert at_once(run("a", "b"), run("b", "a")) == ["a", "b"]
        for file in tmp_path.iterdir():
            file.unlink()


def fail(folder: str) -> None:
    meet(folder, "bad", ["good"])
    raise KeyError("the culprit")


def outlive(folder: str) -> Any:
    found = meet(folder, "good", ["bad"])
    time.sleep(3)
    return found


@pytest.mark.thorough
def test_a_run_that_fails_leaves_the_others_alone(spark: Any, tmp_path: Path) -> None:
    def run(function: Callable[..., Any]) -> Callable[[], Any]:
        runner = HorovodRunner(2, spark=spark, stream_logs=False)
        return lambda: runner.run(function, str(tmp_path)).results

    good, bad = at_once(run(outlive), run(fail))
    assert [result[:2] for result in good] == [(0, 2), (1, 2)]
    assert isinstance(bad, Exception)
    assert "the culprit" in str(bad)
