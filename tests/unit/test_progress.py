"""How long the rest of a training will take, as its progress tells."""

from __future__ import annotations

from typing import Any, cast

import pytest

from horovod_spark_runner.cluster.protocol.messages import Progress as Told
from horovod_spark_runner.config.training import FitOptions
from horovod_spark_runner.training.progress import Progress, ProgressReporter
from horovod_spark_runner.training.time_breakdown import Kind

STEPS = 10


class Training:
    """A training by a clock of its own: each step takes a second, each validation five.

    Attributes:
        seconds: of each kind; stands for `Accounts`.
        told: what was told.
    """

    def __init__(self, fit: FitOptions, *, validates: bool) -> None:
        self.fit, self.validates = fit, validates
        self.now = 100.0
        self.spent = dict.fromkeys((Kind.STEP, Kind.VALIDATION, Kind.FIRST_STEP), 0.0)
        self.epochs: list[Any] = []
        validation = cast(Any, object() if validates else None)
        self.reporter = ProgressReporter(0, fit, validation, cast(Any, self), lambda: self.now)
        self.progress = Progress()

    def seconds(self) -> dict[str, float]:
        return dict(self.spent)

    def take(self, kind: str, seconds: float) -> None:
        self.now += seconds
        self.spent[kind] += seconds

    def epoch(self) -> None:
        progress = self.progress
        for step in range(STEPS):
            if progress.step in (0, 1, 3):  # the first one builds, others are tried
                self.take(Kind.FIRST_STEP, 29.0)
            self.take(Kind.STEP, 1.0)
            progress.to_step(step + 1)
            self.reporter.step(progress, STEPS, {}, 32)
        if self.validates and self.fit.validates(progress.epoch):
            self.take(Kind.VALIDATION, 5.0)
        progress.epoch, progress.epoch_step = progress.epoch + 1, 0
        progress.history.append({})
        self.epochs.append({"ranks": [0], "seconds": {kind: [1.0] for kind in self.spent}})
        self.reporter.epoch(progress, STEPS, 1.0)()


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[Told]:
    found: list[Told] = []
    monkeypatch.setattr("horovod_spark_runner.training.progress.send", found.append)
    return found


@pytest.mark.parametrize(
    ("freq", "left"),
    [
        (1, [45.0, 30.0, 15.0, 0.0]),
        (2, [30.0, 25.0, 15.0, 0.0]),  # the first one comes after two epochs
        (3, [30.0, 20.0, 10.0, 0.0]),  # and with these there is none after the last
        ([1, 4], [35.0, 25.0, 15.0, 0.0]),
        ([4], [30.0, 20.0, 10.0, 0.0]),  # nobody knows yet how long it will take
    ],
)
def test_the_time_left_counts_the_validations_to_come(
    told: list[Told], freq: Any, left: list[float]
) -> None:
    training = Training(FitOptions(epochs=4, validation_freq=freq), validates=True)
    for _ in range(4):
        training.epoch()
    ends = [one.seconds_left for one in told if one.step == STEPS]
    assert ends == pytest.approx(left)


def test_without_rows_to_validate_with_none_is_to_come(told: list[Told]) -> None:
    training = Training(FitOptions(epochs=2), validates=False)
    training.epoch()
    assert told[0].seconds_left is None, "the first step takes a time of its own"
    assert told[-1].seconds_left == pytest.approx(10.0)


@pytest.mark.parametrize("freq", [1, 2, 3, [2, 5], [5, 5, 1]])
def test_validations_are_counted_as_they_come(freq: Any) -> None:
    fit = FitOptions(epochs=7, validation_freq=freq)
    for first in range(8):
        for end in range(first, 8):
            one_by_one = sum(fit.validates(epoch) for epoch in range(first, end))
            assert fit.validations(first, end) == one_by_one
