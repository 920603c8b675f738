"""The Spark session, where it ends meanwhile."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest

from horovod_spark_runner.cluster.spark import session
from horovod_spark_runner.cluster.spark.session import described


class Context:
    """What of a ``SparkContext`` describes jobs; it can be stopped."""

    def __init__(self) -> None:
        self.properties: dict[str, str | None] = {}
        self.stopped = False

    def getLocalProperty(self, name: str) -> str | None:  # noqa: N802 - as Spark calls it
        return self.properties.get(name)

    def setLocalProperty(self, name: str, value: str | None) -> None:  # noqa: N802
        if self.stopped:
            raise AttributeError("'NoneType' object has no attribute 'setLocalProperty'")
        self.properties[name] = value


class Session:
    def __init__(self) -> None:
        self._sc = Context()


def test_what_is_said_of_jobs_ends_with_them() -> None:
    spark: Any = Session()
    with described(spark, "outer"), described(spark, "inner"):
        assert spark._sc.properties == {"spark.job.description": "outer: inner"}
    assert spark._sc.properties == {"spark.job.description": None}


def test_a_session_that_was_stopped_hides_no_error() -> None:
    spark: Any = Session()

    def act() -> None:
        with described(spark, "job"):
            spark._sc.stopped = True
            raise RuntimeError("the true one")

    with pytest.raises(RuntimeError, match="the true one"):
        act()


@pytest.mark.parametrize("has_one", [True, False])
def test_sparks_own_progress_bar_pauses(monkeypatch: pytest.MonkeyPatch, has_one: bool) -> None:
    """Its timer shows it half a second after the last ``finishAll``; the first is at once."""
    monkeypatch.setattr(session, "_BAR_SECONDS", 0.02)
    calls: list[float] = []

    class Bar:
        def isDefined(self) -> bool:  # noqa: N802 - as Spark calls it
            return has_one

        def get(self) -> Bar:
            return self

        def finishAll(self) -> None:  # noqa: N802
            calls.append(time.monotonic())
            raise OSError("Spark was stopped")

    scala = SimpleNamespace(progressBar=Bar)
    spark: Any = SimpleNamespace(_sc=SimpleNamespace(_jsc=SimpleNamespace(sc=lambda: scala)))
    with session.mute_console_progress(spark):
        time.sleep(0.2)
    count = len(calls)
    assert (count > 2) == has_one
    time.sleep(0.1)
    assert len(calls) == count
    connected: Any = SimpleNamespace()  # Spark Connect has no context
    for without in (None, connected):
        with session.mute_console_progress(without):
            pass
