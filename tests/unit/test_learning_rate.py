"""Scaling and warm-up of the learning rate."""

from __future__ import annotations

import re
from typing import Any

import pytest

from horovod_spark_runner.config.training import FitOptions
from horovod_spark_runner.engines.keras.optimizers import LearningRates
from horovod_spark_runner.errors import ModelError
from horovod_spark_runner.training.learning_rate import LearningRate


def sgd(*rates: Any) -> list[Any]:
    import keras

    return [keras.optimizers.SGD(rate) for rate in rates]


def rates(optimizers: list[Any]) -> list[float]:
    return [float(optimizer.learning_rate) for optimizer in optimizers]


def scaled(optimizers: list[Any], options: FitOptions, world: int, state: Any = None) -> Any:
    rates = LearningRates(optimizers, options.lr_scaling)
    return LearningRate(rates, options, world, state)


@pytest.mark.parametrize(("scaling", "factor"), [("none", 1), ("linear", 16), ("sqrt", 4)])
def test_without_warm_up_the_scaled_rate_holds_from_the_start(scaling: Any, factor: int) -> None:
    optimizers = sgd(0.1)
    scaled(optimizers, FitOptions(lr_scaling=scaling), 16)
    assert rates(optimizers) == pytest.approx([0.1 * factor])


WARMED = FitOptions(epochs=9, lr_scaling="linear", warmup_epochs=2.0)


def test_all_optimizers_are_scaled() -> None:
    optimizers = sgd(0.1, 0.3)
    rate = scaled(optimizers, WARMED, 3)
    for progress, factor in ((0.0, 1), (0.5, 1.5), (2.0, 3), (2.5, 3)):
        rate.before_step(progress)
        assert rates(optimizers) == pytest.approx([0.1 * factor, 0.3 * factor])


def test_optimizers_that_others_wrap_are_scaled() -> None:
    import keras

    if not hasattr(keras.optimizers, "OptimizerMap"):
        pytest.skip("this Keras has no optimizers of several others")
    first, second, third = sgd(0.1, 0.2, 0.3)
    wrapped = keras.optimizers.LossScaleOptimizer(first)
    by_path = keras.optimizers.OptimizerMap(second, {".*bias": third})
    pair = keras.optimizers.MultiOptimizer(by_path)
    scaled([wrapped, pair], FitOptions(lr_scaling="linear"), 2).before_step(0.0)
    assert rates([first, second, third]) == pytest.approx([0.2, 0.4, 0.6])


@pytest.mark.parametrize("when", [0.0, 1.0])
def test_what_a_callback_sets_has_the_last_word(when: float) -> None:
    (optimizer,) = sgd(0.1)
    rate = scaled([optimizer], WARMED, 3)
    if when:
        rate.before_step(0.0)
    optimizer.learning_rate = 0.07
    for progress in (when, when + 0.5, 4.0):
        rate.before_step(progress)
        assert rates([optimizer]) == pytest.approx([0.07])
    assert rate.state["done"]


def test_a_callback_that_sets_what_was_there_is_seen_when_it_does_so_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    (optimizer,) = sgd(0.1)
    rate = scaled([optimizer], WARMED, 2)
    for epoch in range(4):
        optimizer.learning_rate = 0.1  # LearningRateScheduler(lambda epoch: 0.1)
        rate.before_step(float(epoch))
        rate.before_step(epoch + 0.5)
        scaled([optimizer], WARMED, 2, rate.state).before_step(epoch + 0.5)  # tells no more
        assert rates([optimizer]) == pytest.approx([0.125 if epoch == 0 else 0.1])
    told = r"learning rate.*\b0.125\b.*\b0.1\b.*\b1.00"
    assert len(re.findall(told, caplog.text)) == caplog.text.count("learning rate") == 1
    assert caplog.text.count("warm-up") == 1


def test_callbacks_find_the_scaled_rate_where_there_is_no_warm_up() -> None:
    (optimizer,) = sgd(0.1)
    rate = scaled([optimizer], FitOptions(epochs=4, lr_scaling="linear"), 2)
    for epoch in range(4):  # LearningRateScheduler(lambda epoch, rate: rate / 2)
        optimizer.learning_rate = float(optimizer.learning_rate) / 2
        rate.before_step(float(epoch))
        assert rates([optimizer]) == pytest.approx([0.2 / 2 ** (epoch + 1)])


def test_a_resumed_warm_up_goes_on() -> None:
    whole, optimizers = sgd(0.1, 0.3), sgd(0.1, 0.3)
    first, before = scaled(whole, WARMED, 3), scaled(optimizers, WARMED, 3)
    for progress in (0.0, 0.5, 1.0):
        first.before_step(progress)
    before.before_step(0.0)
    before.before_step(0.5)
    restored = sgd(*rates(optimizers))  # as they come with a checkpoint
    after = scaled(restored, WARMED, 3, before.state)
    after.before_step(1.0)
    assert rates(restored) == rates(whole)


def test_a_schedule_is_refused_by_name() -> None:
    import keras

    (plain,) = sgd(0.1)
    second = keras.optimizers.SGD(keras.optimizers.schedules.CosineDecay(0.1, 10), name="second")
    with pytest.raises(ModelError, match="'second'.*CosineDecay"):
        scaled([plain, second], FitOptions(lr_scaling="linear"), 2)
    unscaled = LearningRate(None, FitOptions(), 2)
    unscaled.before_step(0.0)
    assert unscaled.state == {"base": [], "last": [], "done": True}
