"""Scaling and warm-up of the learning rate."""

from __future__ import annotations

import pytest

from horovod_spark_runner.config import FitOptions
from horovod_spark_runner.training.learning_rate import scale_factor, warmup_factor


def test_scaling() -> None:
    assert scale_factor("none", 8) == 1.0
    assert scale_factor("linear", 8) == 8.0
    assert scale_factor("sqrt", 16) == 4.0


def test_warm_up_rises_evenly_to_the_scaled_rate() -> None:
    options = FitOptions(epochs=10, lr_scaling="linear", warmup_epochs=2.0)
    factors = [warmup_factor(options, 5, progress) for progress in (0.0, 0.5, 1.0, 2.0, 7.0)]
    assert factors == pytest.approx([1.0, 2.0, 3.0, 5.0, 5.0])


def test_without_warm_up_the_scaled_rate_holds_from_the_start() -> None:
    assert warmup_factor(FitOptions(lr_scaling="linear"), 4, 0.0) == 4.0
