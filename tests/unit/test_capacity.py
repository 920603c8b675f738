"""Slots of local masters, as Spark counts them."""

from __future__ import annotations

import re
import time
from typing import Any

import pytest

from horovod_spark_runner.cluster.spark import capacity as capacity_module
from horovod_spark_runner.cluster.spark.capacity import (
    REGISTRATION_SECONDS,
    REPLACEMENT_SECONDS,
    _executor_timeout,
    _local_capacity,
    check_slots,
)
from horovod_spark_runner.config.launch import LaunchSettings
from horovod_spark_runner.errors import EnvironmentProblem, InvalidInputError, NotEnoughSlotsError


@pytest.mark.parametrize(
    ("master", "cpus", "slots"),
    [
        ("local", 1, 1),
        ("local[4]", 1, 4),
        ("local[4]", 2, 2),
        ("local[*]", 1, 6),
        ("local[3, 2]", 1, 3),
        ("local[*,4]", 4, 1),
        ("local-cluster[2,3,1024]", 1, 6),
        ("local-cluster[2, 3, 1024]", 2, 2),
    ],
)
def test_local_masters(master: str, cpus: int, slots: int) -> None:
    capacity = _local_capacity(master, cpus, machine_cpus=6)
    assert capacity is not None
    assert capacity.slots == slots
    assert master in capacity.reason


@pytest.mark.parametrize("master", ["spark://h:7077", "yarn", "k8s://https://h", ""])
def test_real_clusters_have_to_be_asked(master: str) -> None:
    assert _local_capacity(master, 1, 6) is None


class Cluster:
    """Stands in for a Spark session whose executors can run ``slots`` tasks at once."""

    def __init__(self, master: str, slots: int) -> None:
        self.master = master
        self.conf = self._sc = self._jsc = self
        self.startTime = 0
        self.settings: dict[str, str] = {}
        self.maxNumConcurrentTasks = lambda profile: slots
        self.size = lambda: 1 + bool(slots)  # of what tells the memory of driver and executors

    def get(self, name: str, default: str = "") -> str:
        known = {
            "spark.master": self.master,
            "spark.task.cpus": "1",
            "spark.executor.cores": "4",
            "spark.executor.memory": "8g",
            **self.settings,
        }
        return known.get(name, default)

    def sc(self) -> Cluster:
        return self

    def getExecutorMemoryStatus(self) -> Cluster:  # noqa: N802 - Spark's name
        return self


@pytest.mark.parametrize(
    ("master", "start_timeout", "ending"),
    [
        # Waiting helps where executors may come, and has not been tried yet.
        ("spark://h:1", None, "executors.*spark://h:1.*start_timeout=…"),
        ("spark://h:1", 0.1, "executors.*spark://h:1(?!.*start_timeout)"),
        ("local[2]", None, r"local\[2\].*cores(?!.*(executors|start_timeout))"),
        ("local[2]", 0.1, r"local\[2\].*cores(?!.*(executors|start_timeout))"),
        ("local-cluster[1,2,512]", None, "cores(?!.*(executors|start_timeout))"),
    ],
)
def test_the_advice_helps(
    master: str, start_timeout: float | None, ending: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(capacity_module, "_java_profile", lambda *arguments: None)
    session: Any = Cluster(master, 2)
    told = rf"\b3\b.*\b2\b.*ranks.*{ending}"
    with pytest.raises(NotEnoughSlotsError, match=told):
        check_slots(session, LaunchSettings(start_timeout=start_timeout), 3)


def test_where_no_executor_starts_what_they_ask_for_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(capacity_module, "_java_profile", lambda *arguments: None)
    monkeypatch.setattr(capacity_module, "REPLACEMENT_SECONDS", 0.1)
    session: Any = Cluster("spark://h:1", 0)
    asked = "spark.executor.cores=4.*spark.executor.memory=8g"
    with pytest.raises(NotEnoughSlotsError, match=rf"\b0\b.*executor.*{asked}"):
        check_slots(session, LaunchSettings(), 2)


def test_executors_are_waited_for_where_they_are_to_come() -> None:
    asked, unasked = LaunchSettings(2, start_timeout=3), LaunchSettings(2)
    assert _executor_timeout(asked, 1000, none_there=True) == 3
    assert _executor_timeout(unasked, 1, none_there=False) == REGISTRATION_SECONDS
    assert _executor_timeout(unasked, 1000, none_there=True) == REPLACEMENT_SECONDS  # all were lost
    assert _executor_timeout(unasked, 1000, none_there=False) == 0  # there are some, and too few
    assert _executor_timeout(unasked, 1, none_there=False, replacing=True) == REPLACEMENT_SECONDS
    assert _executor_timeout(asked, 1, none_there=False, replacing=True) == 3


@pytest.mark.parametrize(
    ("master", "slots", "workers", "reason"),
    [
        ("local[4]", 9, 4, r"local\[4\].*\b4 cores.*\b1\b"),
        # What executors there are may give less than the master's URL says, of GPUs, say.
        ("local-cluster[2,3,1024]", 6, 6, "executors"),
        ("local-cluster[2,3,1024]", 5, 5, "executors"),
        ("spark://h:1", 7, 7, "executors"),
    ],
)
def test_as_many_as_there_are(
    master: str, slots: int, workers: int, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(capacity_module, "_java_profile", lambda *arguments: None)
    session: Any = Cluster(master, slots)
    found = check_slots(session, LaunchSettings(), None)
    assert (found.workers, found.slots) == (workers, workers)
    assert re.search(rf"num_workers={workers}\b.*{reason}", found.describe())
    assert check_slots(session, LaunchSettings(), 2).workers == 2


def test_dynamic_allocation_is_refused_where_there_are_executors(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(capacity_module, "_java_profile", lambda *arguments: None)
    for master in ("spark://h:1", "local-cluster[2,3,1024]", "yarn", "local[4]", "local"):
        session: Any = Cluster(master, 1)
        session.settings["spark.dynamicAllocation.enabled"] = "true"
        if master.startswith("local") and "cluster" not in master:
            assert check_slots(session, LaunchSettings(), 1).workers == 1
            continue
        with pytest.raises(EnvironmentProblem, match="dynamicAllocation.*false"):
            check_slots(session, LaunchSettings(), 1)


def test_where_there_are_none_that_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capacity_module, "_java_profile", lambda *arguments: None)
    session: Any = Cluster("spark://h:1", 0)
    with pytest.raises(NotEnoughSlotsError, match=r"\b1\b.*\b0\b.*executor"):
        check_slots(session, LaunchSettings(start_timeout=0.1), None)


def test_executors_that_come_one_by_one_are_all_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capacity_module, "_java_profile", lambda *arguments: None)
    monkeypatch.setattr(capacity_module, "POLL_SECONDS", 0.001)
    monkeypatch.setattr(capacity_module, "REGISTRATION_SECONDS", 0.1)
    session: Any = Cluster("spark://h:1", 1)
    counts = iter([0, 1, 1, 3])
    session.maxNumConcurrentTasks = lambda profile: next(counts, 4)
    session.startTime = time.time() * 1000
    # However long it may wait for the first.
    assert check_slots(session, LaunchSettings(start_timeout=600), None).workers == 4


def test_spark_connect_does_not_tell(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capacity_module, "classic_context", lambda session: None)
    session: Any = Cluster("spark://h:1", 3)
    with pytest.raises(InvalidInputError, match="num_workers.*Spark Connect"):
        check_slots(session, LaunchSettings(), None)
    assert check_slots(session, LaunchSettings(), 2).workers == 2
