"""States of ranks, callbacks and generators."""

from __future__ import annotations

import json
import random
import re
from types import SimpleNamespace
from typing import Any, cast

import mpi4py.MPI  # noqa: F401 - it listens from its import on, so before the tests
import numpy as np
import pytest

from horovod_spark_runner.data.read.reader import Batch
from horovod_spark_runner.errors import ModelError, RunDirectoryError
from horovod_spark_runner.training.epochs import Step
from tests.runs import variables_of


@pytest.fixture(scope="module")
def keras() -> Any:
    return pytest.importorskip("keras")


def test_generators_go_on_where_they_were(keras: Any) -> None:
    import tensorflow as tf

    from horovod_spark_runner.checkpoint.rank_state import capture_random, restore_random
    from horovod_spark_runner.engines.keras.state import generators

    def draw() -> list[Any]:
        return [
            random.random(),
            random.gauss(0, 1),
            np.random.rand(),
            np.random.normal(),
            tf.random.get_global_generator().normal((2,)).numpy().tolist(),
            np.asarray(keras.random.normal((2,))).tolist(),
        ]

    keras.utils.set_random_seed(3)
    draw()  # a gauss of each pair is kept for the next call
    values, arrays = capture_random(generators())
    expected = draw()
    draw()
    restore_random(json.loads(json.dumps(values)), arrays, generators())
    assert draw() == expected
    before = generators()["keras"].numpy().tolist()
    restore_random(values, {name: arrays[name] for name in ("python", "numpy")}, generators())
    assert generators()["keras"].numpy().tolist() == before
    assert random.random() == expected[0]


def test_making_the_generators_draws_nothing(keras: Any) -> None:
    from horovod_spark_runner.engines.keras.state import generators

    keras.utils.set_random_seed(3)
    expected = random.random()
    keras.utils.clear_session()
    keras.utils.set_random_seed(3)
    generators()
    assert random.random() == expected


def some_callbacks(keras: Any) -> dict[str, Any]:
    class CustomCallback(keras.callbacks.Callback):
        def __init__(self) -> None:
            super().__init__()
            self.limit = 3
            self.function = len

        def on_train_begin(self, logs: Any = None) -> None:
            self.seen: dict[str, Any] = {}
            self.pair = (0, None)

    model = keras.Sequential([keras.layers.Input((2,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    stop = keras.callbacks.EarlyStopping(
        "loss", min_delta=0.1, patience=5, restore_best_weights=True
    )
    plateau = keras.callbacks.ReduceLROnPlateau("loss", patience=2)
    callbacks = {"0": stop, "1": plateau, "2": CustomCallback()}
    for callback in callbacks.values():
        callback.set_model(model)
        callback.on_train_begin()
    return callbacks


def test_callbacks_go_on_where_they_were(keras: Any) -> None:
    from horovod_spark_runner.engines.keras.callbacks import _CallbackStates

    before = some_callbacks(keras)
    states = _CallbackStates(before)
    assert states.capture() == ({name: {} for name in before}, {})
    for epoch, loss in enumerate([3.0, 1.0, 2.0, 1.05]):
        before["0"].on_epoch_end(epoch, {"loss": loss})
        before["1"].on_epoch_end(epoch, {"loss": loss})
    before["2"].seen = {"a": [1, np.float32(2.5)], "b": np.arange(3)}
    before["2"].pair = (7, "x")
    values, arrays = states.capture()
    after = some_callbacks(keras)
    _CallbackStates(after).restore(json.loads(json.dumps(values)), arrays)
    assert (after["0"].wait, after["0"].best, after["0"].best_epoch) == (2, 1.0, 1)
    for ours, theirs in zip(after["0"].best_weights, before["0"].best_weights, strict=True):
        np.testing.assert_array_equal(ours, theirs)
    assert after["2"].seen["a"] == [1, 2.5]
    np.testing.assert_array_equal(after["2"].seen["b"], [0, 1, 2])
    assert after["2"].pair == (7, "x")
    for epoch, loss in enumerate([1.01, 0.95, 0.8], start=4):
        for number in ("0", "1"):
            before[number].on_epoch_end(epoch, {"loss": loss})
            after[number].on_epoch_end(epoch, {"loss": loss})
            for name in ("wait", "best", "best_epoch", "min_delta", "cooldown_counter"):
                assert getattr(after[number], name, 0) == getattr(before[number], name, 0)


def test_settings_of_callbacks_may_change(keras: Any) -> None:
    from horovod_spark_runner.engines.keras.callbacks import _CallbackStates

    before = some_callbacks(keras)
    states = _CallbackStates(before)
    before["0"].on_epoch_end(0, {"loss": 1.0})
    values, arrays = states.capture()
    after = some_callbacks(keras)
    after["0"].patience = 99
    _CallbackStates(after).restore(values, arrays)
    assert (after["0"].patience, after["0"].best) == (99, 1.0)


def rank_states() -> list[Any]:
    from horovod_spark_runner.checkpoint.rank_state import RankState

    return [
        RankState(
            {"random": rank, "callbacks": {}},
            {
                "seed/00000": np.array([rank + 5, 9], np.uint32),
                "metric/00000": np.array(10.0 + rank, np.float32),
                "random/python": np.array([rank]),
                "random/keras": np.array([rank]),
                **({"callback/0/best/00000": np.ones(2)} if rank == 0 else {}),
            },
        )
        for rank in range(2)
    ]


def test_states_are_joined_and_split() -> None:
    from horovod_spark_runner.checkpoint.rank_state import join_states, split_states

    states = rank_states()
    again = split_states([state.values for state in states], join_states(states))
    for ours, theirs in zip(again, states, strict=True):
        assert ours.values == theirs.values
        assert ours.arrays.keys() == theirs.arrays.keys()


def test_as_many_ranks_take_their_own_states() -> None:
    from horovod_spark_runner.checkpoint.rank_state import state_for

    second = state_for(rank_states(), 1, 2)
    assert second.values["random"] == 1
    assert second.arrays["seed/00000"].tolist() == [6, 9]
    assert second.arrays["metric/00000"] == 11.0
    assert "callback/0/best/00000" in second.arrays


def test_other_numbers_of_ranks_keep_the_sums() -> None:
    from horovod_spark_runner.checkpoint.rank_state import state_for

    for size in (1, 3):
        states = [state_for(rank_states(), rank, size) for rank in range(size)]
        assert [float(s.arrays["metric/00000"]) for s in states] == [21.0, 0.0, 0.0][:size]
        seeds = [tuple(s.arrays["seed/00000"]) for s in states]
        assert len(set(seeds)) == size
        assert all(count == 9 for _, count in seeds)
        # A new rank draws none of the framework's numbers of rank 0.
        streams = [{n: a.tolist() for n, a in s.group("random").items()} for s in states]
        both = [{"python": [rank], "keras": [rank]} for rank in range(2)]
        assert streams == [*both, {"python": [0]}][:size]


def test_metrics_are_merged_as_they_say() -> None:
    from horovod_spark_runner.checkpoint.rank_state import RankState, state_for

    def state(rank: int) -> RankState:
        arrays = {f"metric/{n:05d}": np.array(10.0 + rank) for n in range(3)}
        return RankState(
            {"random": rank, "callbacks": {}, "merges": ["sum", "mean", "first"]}, arrays
        )

    for size in (1, 3):
        states = [state_for([state(0), state(1)], rank, size) for rank in range(size)]
        merged = [[float(s.arrays[f"metric/{n:05d}"]) for n in range(3)] for s in states]
        assert merged == [[21.0, 10.5, 10.0], [0.0, 10.5, 10.0], [0.0, 10.5, 10.0]][:size]


def test_small_arrays_of_callbacks_are_each_ranks_own() -> None:
    from horovod_spark_runner.checkpoint.rank_state import RankState, state_for

    first = RankState(
        {"random": 0}, {"callback/0/a/00000": np.zeros(2), "callback/0/b/00000": np.ones(9)}
    )
    second = RankState({"random": 1}, {"callback/0/a/00000": np.ones(2)})
    arrays = state_for([first, second], 1, 2).group("callback")
    assert {name: array.tolist() for name, array in arrays.items()} == {
        "0/a/00000": [1.0, 1.0],
        "0/b/00000": [1.0] * 9,  # a large one, say
    }


def test_what_a_way_of_synchronising_keeps_goes_to_its_own_rank() -> None:
    from horovod_spark_runner.checkpoint.rank_state import RankState, state_for

    def state(rank: int) -> RankState:
        arrays = {"sync/residual": np.array([rank]), "variable/model/00000": np.array([10 + rank])}
        if rank == 0:
            arrays["sync/shared/anchor"] = np.array([7])
        return RankState({"random": rank, "callbacks": {}}, arrays)

    states = [state(0), state(1)]
    for size in (1, 2, 3):
        for rank in range(size):
            received = state_for(states, rank, size)
            assert received.group("sync/shared") == {"anchor": 7}
            # A rank that was not there begins with none of its own, and with rank 0's model.
            expected = [rank] if rank < 2 else None
            assert received.group("sync").get("residual", np.array(None)).tolist() == expected
            assert received.group("variable")["model/00000"] == 10 + (rank if rank < 2 else 0)


def small_model(keras: Any, width: int = 3) -> Any:
    return keras.Sequential(
        [
            keras.layers.Input((2,)),
            keras.layers.Dense(width),
            keras.layers.BatchNormalization(),
            keras.layers.Dropout(0.5),
            keras.layers.Dense(1),
        ]
    )


@pytest.mark.parametrize("form", ["keras", "weights.h5", "saved_model"])
def test_weights_to_begin_with(keras: Any, tmp_path: Any, form: str) -> None:
    from horovod_spark_runner.config.training import InitialWeights
    from horovod_spark_runner.engines.keras.engine import ENGINE
    from horovod_spark_runner.engines.keras.loading import load_initial_weights
    from horovod_spark_runner.frameworks import KERAS
    from horovod_spark_runner.training.warm_start import read_warm_start

    source = small_model(keras)
    place = tmp_path / f"model.{form}"
    if form == "keras":
        source.save(place)
    elif form == "weights.h5":
        source.save_weights(place)
    else:
        source.export(place, verbose=False)
    start = read_warm_start(InitialWeights(place), KERAS, ENGINE.weights_formats)
    model = small_model(keras)
    load_initial_weights(model, start)
    for ours, theirs in zip(model.weights, source.weights, strict=True):
        np.testing.assert_array_equal(ours, theirs)
    with pytest.raises(ModelError, match="model"):
        load_initial_weights(small_model(keras, 4), start)


def test_other_metrics_within_an_epoch_are_refused(keras: Any) -> None:
    from horovod_spark_runner.checkpoint.rank_state import capture_rank, restore_rank
    from horovod_spark_runner.engines.keras.trainee import KerasTrainee
    from horovod_spark_runner.sync.allreduce import AllreduceSynchroniser
    from horovod_spark_runner.training.trainee import Hooks

    class Fitted(KerasTrainee):
        def __init__(self, metrics: list[str]) -> None:
            self.model = small_model(keras)
            self.model.compile("sgd", "mse", metrics=metrics)
            self.model.fit(np.zeros((4, 2)), np.zeros(4), verbose=0)
            self.variables = variables_of(self.model)

    one, other = Fitted(["mae"]), Fitted([])
    one._callbacks, other._callbacks = [], [keras.callbacks.LambdaCallback(on_epoch_end=print)]
    assert one.has_complete_logs
    assert not other.has_complete_logs  # its results may have more than the steps tell
    sync: Any = object.__new__(AllreduceSynchroniser)
    state = capture_rank(one, Hooks(), sync, rank=0, in_epoch=True)
    restore_rank(state, one, Hooks(), sync)
    with pytest.raises(RunDirectoryError, match="metrics"):
        restore_rank(state, other, Hooks(), sync)


def test_a_step_of_one_rank_without_rows_leaves_the_metrics(keras: Any) -> None:
    from horovod_spark_runner.engines.keras.trainee import KerasTrainee

    class Fitted(KerasTrainee):
        def __init__(self) -> None:
            self.model = small_model(keras)
            self.model.compile("sgd", "mse", metrics=["mae"])
            self.model.fit(np.zeros((4, 2)), np.ones(4), verbose=0)
            exchange: Any = SimpleNamespace(size=1)
            self._exchange = exchange

    one = Fitted()
    before = {name: float(value) for name, value in one.model.get_metrics_result().items()}
    logs, counts = one.train_step(Step(3, Batch(3, 0, {}), 1, equal=False), (False,) * 3, True)
    assert counts is None
    assert logs is not None
    every: tuple[Any, ...] = (logs, one.model.get_metrics_result())
    for rank_logs in every:
        assert {name: float(value) for name, value in rank_logs.items()} == before


def test_ranks_drop_other_units(keras: Any) -> None:
    def dropped(rank: int) -> list[bool]:
        model = keras.Sequential([keras.layers.Input((64,)), keras.layers.Dropout(0.5, seed=1)])
        model.compile("sgd", "mse")
        variables_of(model).separate_seeds(rank)
        outputs = np.asarray(model(np.ones((1, 64)), training=True))
        dropped_units: list[bool] = (outputs == 0).ravel().tolist()
        return dropped_units

    masks = [dropped(rank) for rank in (0, 0, 1, 2)]
    assert masks[0] == masks[1]
    assert masks[0] != masks[2] != masks[3] != masks[0]


def two_optimizers(keras: Any, rate: float = 0.1) -> Any:
    """A model whose second optimizer Keras builds in the first step only."""

    class Pair(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.one = keras.layers.Dense(2)
            self.other = keras.layers.Dense(1)
            self.other_optimizer = keras.optimizers.RMSprop(rate)

        def call(self, inputs: Any) -> Any:
            return self.other(self.one(inputs))

        def train_step(self, data: Any) -> Any:
            import tensorflow as tf

            inputs, target = data[:2]
            with tf.GradientTape(persistent=True) as tape:
                loss = keras.ops.mean((self(inputs) - target) ** 2)
            pairs = [(self.optimizer, self.one), (self.other_optimizer, self.other)]
            for optimizer, layer in pairs:
                weights = layer.trainable_variables
                optimizer.apply(tape.gradient(loss, weights), weights)
            return {"loss": loss}

    model = Pair()
    model(np.zeros((1, 3), np.float32))
    model.compile(keras.optimizers.Adam(rate))
    model.optimizer.build(model.trainable_variables)
    return model


def restored(keras: Any, source: Any) -> Any:
    """Return a new model brought to where ``source`` is by way of what a checkpoint holds."""
    saved = variables_of(source)
    trained_by = json.loads(json.dumps(saved.trained_by()))
    described = json.loads(json.dumps(saved.describe()))
    model = two_optimizers(keras)
    variables = variables_of(model)
    variables.build_optimizers(trained_by)
    variables.check_same(described, "checkpoint")
    variables.restore(saved.capture())
    return model


def test_optimizers_built_in_the_first_step_go_on(keras: Any) -> None:
    rng = np.random.default_rng(0)
    batches = [
        (rng.normal(size=(8, 3)).astype("float32"), rng.normal(size=(8, 1)).astype("float32"))
        for _ in range(4)
    ]
    whole = two_optimizers(keras)
    assert not whole.other_optimizer.built
    for batch in batches[:2]:
        whole.train_on_batch(*batch)
    part = restored(keras, whole)
    for batch in batches[2:]:
        whole.train_on_batch(*batch)
        part.train_on_batch(*batch)
    for name in ("weights", "optimizer.variables", "other_optimizer.variables"):
        expected, got = whole, part
        for each in name.split("."):
            expected, got = getattr(expected, each), getattr(got, each)
        assert len(expected) == len(got) > 2
        for ours, theirs in zip(got, expected, strict=True):
            np.testing.assert_array_equal(ours, theirs, err_msg=name)


def test_variables_made_after_the_start_are_kept(keras: Any) -> None:
    model = two_optimizers(keras)
    variables = variables_of(model)
    before = variables.capture()
    model.train_on_batch(np.ones((8, 3), np.float32), np.ones((8, 1), np.float32))
    after = variables.capture(before)
    assert len(after) > len(before)
    assert after.keys() == {name for name, *_ in variables.describe()}


def test_other_variables_are_refused_whatever_their_names(keras: Any) -> None:
    def variables(momentum: float, width: int = 3) -> Any:
        model = small_model(keras, width)
        model.compile(keras.optimizers.SGD(0.1, momentum=momentum), "mse")
        model.optimizer.build(model.trainable_variables)
        return variables_of(model)

    saved = variables(0.9)
    variables(0.9).check_same(saved.describe(), "checkpoint")
    with pytest.raises(RunDirectoryError, match=r"kernel'.*float32.*\(2, 3\).*4"):
        variables(0.9, 4).check_same(saved.describe(), "checkpoint")
    with pytest.raises(RunDirectoryError, match=r"momentum'.*\bbecause\b"):
        variables(0.0).check_same(saved.describe(), "checkpoint", ["because"])


def test_a_best_metric_that_comes_later_is_told_only_where_it_does_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from horovod_spark_runner.checkpoint import manager
    from horovod_spark_runner.config.training import CheckpointOptions, FitOptions
    from horovod_spark_runner.training.progress import Progress

    messages: list[str] = []
    monkeypatch.setattr(manager, "notify", messages.append)

    def messages_after(*epochs: dict[str, Any]) -> list[str]:
        messages.clear()
        fit = FitOptions(epochs=9, validation_freq=2)
        one = object.__new__(manager.CheckpointManager)
        one._spec = cast(Any, SimpleNamespace(has_all_results=fit.validates))
        one._options = CheckpointOptions(best_metric="val_f1")
        one._metric_known = False
        for number, results in enumerate(epochs, start=1):
            history = [*epochs[: number - 1], results]
            one._look_for_metric(Progress(epoch=number, history=history))
        return list(messages)

    assert messages_after({"loss": 1.0}, {"loss": 1.0, "val_f1": 0.5}, {"loss": 1.0}) == []
    (text,) = messages_after({"loss": 1.0}, {"loss": 1.0, "val_loss": 1.0}, {"loss": 1.0})
    assert re.search(r"best_metric='val_f1'.*epoch 2\b.*\bloss\b.*val_loss", text)
