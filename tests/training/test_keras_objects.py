"""Keras objects that functions capture: losses and metrics travel, layers are refused."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
from keras import ops

from horovod_spark_runner.errors import InvalidInputError
from horovod_spark_runner.serialize import check_picklable, dumps


class Focal(keras.losses.Loss):
    """A loss whose configuration, as most people leave it, lacks its own arguments."""

    def __init__(self, gamma: float = 2.0) -> None:
        super().__init__(name="focal")
        self.gamma = gamma

    def call(self, y_true: Any, y_pred: Any) -> Any:
        return ops.mean(ops.abs(y_true - y_pred) ** self.gamma, axis=-1)


class Above(keras.metrics.Metric):
    """A metric whose configuration lacks its own argument."""

    def __init__(self, limit: float = 0.5, name: str = "above", **kwargs: Any) -> None:
        super().__init__(name=name, **kwargs)
        self.limit = limit
        self.count = self.add_weight(name="count", initializer="zeros")

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        self.count.assign_add(ops.sum(ops.cast(y_pred > self.limit, "float32")))

    def result(self) -> Any:
        return self.count


class Configured(Above):
    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), "limit": self.limit}


class WithTable(Above):
    def __init__(self, table: Any = (0.0,), **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.table = np.asarray(table)


class Unnamed(Above):
    """A metric that its base class's configuration does not fit."""

    def __init__(self) -> None:
        super().__init__()


class Counting(keras.callbacks.Callback):
    epochs = 0

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.epochs += 1


def scaled(y_true: Any, y_pred: Any, by: float = 1.0) -> Any:
    return by * ops.mean(ops.abs(y_true - y_pred), axis=-1)


@pytest.mark.parametrize(
    "make",
    [
        lambda: Focal(gamma=3.0),
        lambda: keras.losses.Huber(delta=0.3),
        lambda: Above(),
        lambda: Configured(0.25),
        lambda: keras.metrics.MeanMetricWrapper(scaled, name="scaled", by=3.0),
        lambda: keras.metrics.MeanMetricWrapper(lambda a, b: ops.abs(a - b), name="unnamed"),
        lambda: keras.metrics.SparseTopKCategoricalAccuracy(2, from_sorted_ids=True),
        lambda: keras.metrics.AUC(thresholds=[0.2, 0.7]),
    ],
)
def test_a_copy_of_a_loss_or_metric_computes_the_same(make: Callable[[], Any]) -> None:
    original = make()
    copy = pickle.loads(dumps(lambda: original))()
    y_true, y_pred = np.array([[0, 1, 0], [1, 0, 0]]), np.array([[0.3, 0.6, 0.1], [0.9, 0.3, 0]])
    if "Sparse" in type(original).__name__:
        y_true, y_pred = np.array([[1], [0]]), np.array([[1, 0, 2], [2, 1, 0]])
    one, other = (np.array(each(y_true, y_pred)) for each in (original, copy))
    np.testing.assert_array_equal(one, other)
    assert type(copy).__name__ == type(original).__name__
    assert copy.name == original.name


@pytest.mark.parametrize(
    ("make", "missing"),
    [
        (lambda: Above(0.25), "limit"),
        (lambda: WithTable((1.0,)), "table"),
        # Keras' own configuration lacks the axis.
        (lambda: keras.metrics.CosineSimilarity(axis=0), "_fn_kwargs"),
        (Unnamed, "get_config"),
    ],
)
def test_a_metric_that_its_configuration_does_not_describe_is_refused(
    make: Callable[[], Any], missing: str
) -> None:
    original = make()
    with pytest.raises(InvalidInputError, match=f"(?s)'original'.*{missing}.*inside"):
        check_picklable({"metrics": lambda: original})


@pytest.mark.parametrize(
    "make",
    [
        lambda: keras.layers.Dense(2),
        lambda: keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)]),
        lambda: keras.optimizers.SGD(),
        lambda: keras.Variable(1.0),
        lambda: [keras.layers.ReLU()],
    ],
)
def test_what_has_weights_is_refused(make: Callable[[], Any]) -> None:
    original = make()
    with pytest.raises(InvalidInputError, match="inside model_fn"):
        check_picklable({"model_fn": lambda: original})


def test_callbacks_leave_the_model_of_an_earlier_fit_behind() -> None:
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    used = [Counting(), keras.callbacks.EarlyStopping("loss", restore_best_weights=True)]
    model.fit(np.ones((4, 3)), np.ones((4, 1)), epochs=2, callbacks=used, verbose=0)
    counting, stopping = pickle.loads(dumps(used))
    assert (counting.epochs, counting.model, stopping.model) == (2, None, None)
    assert stopping.best == used[1].best
    assert used[0].model is model
