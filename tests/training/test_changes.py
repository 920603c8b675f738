"""Changed settings of a resumed run: honoured, warned of, or refused by name."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import keras
import pytest

from horovod_spark_runner.checkpoint.files import CheckpointInfo
from horovod_spark_runner.checkpoint.resume import (
    _describe_rest,
    _resolve_settings,
    check_same_data,
)
from horovod_spark_runner.config.training import FitOptions
from horovod_spark_runner.engines.keras.state import compare_models, describe_model
from horovod_spark_runner.errors import RunDirectoryError
from horovod_spark_runner.frameworks import KERAS

layers = keras.layers
optimizers = keras.optimizers


def plain(
    activation: str = "relu",
    rate: float = 0.3,
    optimizer: Any = None,
    loss: Any = "mse",
    metrics: Any = ("mae",),
    trainable: bool = True,
) -> Any:
    model = keras.Sequential(
        [
            layers.Input((4,)),
            layers.Dense(3, activation=activation, trainable=trainable),
            layers.BatchNormalization(),
            layers.Dropout(rate),
            layers.Dense(1),
        ]
    )
    model.compile(optimizer or optimizers.Adam(1e-3), loss, metrics=list(metrics))
    return model


def connected(activation: str = "relu", operation: Any = keras.ops.tanh, swap: bool = False) -> Any:
    """A functional model with operations, wrappers, attention, a Lambda and a model inside."""
    start = keras.Input((6, 4))
    one = layers.Bidirectional(layers.LSTM(3))(start)
    two = layers.MultiHeadAttention(2, 3)(start, start)
    two = layers.TimeDistributed(layers.Dense(1, activation=activation))(two)
    two = layers.Lambda(lambda x: x * 2, output_shape=(6, 1))(two)
    parts = [one, layers.Flatten()(two)]
    joined = operation(keras.ops.concatenate(parts[::-1] if swap else parts, axis=-1))
    inner = keras.Sequential([layers.Dense(4), layers.Dense(2, activation=activation)])
    model = keras.Model(start, inner(joined))
    model.compile(
        optimizers.RMSprop(0.01), keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    )
    return model


class CustomModel(keras.Model):
    """A subclass that cannot tell its settings."""

    def __init__(self, activation: Any) -> None:
        super().__init__()
        self.first = layers.Dense(3, activation=activation)
        self.second = layers.Dense(1)

    def get_config(self) -> Any:
        raise NotImplementedError

    def call(self, inputs: Any) -> Any:
        return self.second(self.first(inputs))


def custom(activation: str = "relu") -> Any:
    model = CustomModel(activation)
    model(keras.ops.zeros((1, 4)))
    model.compile("sgd", "mse")
    return model


def recorded(model: Any) -> Any:
    """Return what a checkpoint says of ``model`` once it was read again."""
    return json.loads(json.dumps(describe_model(model)))


@pytest.mark.parametrize("make", [plain, connected, custom])
def test_automatic_names_do_not_count(make: Callable[[], Any]) -> None:
    then, now = recorded(make()), recorded(make())
    assert then == now
    changes = compare_models(then, now, in_epoch=True)
    assert (changes.refusal, changes.warnings, changes.record) == (None, (), now)


@pytest.mark.parametrize("make", [plain, connected])
def test_a_file_is_the_same_model_as_its_function(make: Callable[[], Any], tmp_path: Any) -> None:
    model = make()
    model.save(tmp_path / "m.keras")
    loaded = keras.saving.load_model(tmp_path / "m.keras", safe_mode=False)
    for then, now in [(loaded, make()), (make(), loaded)]:
        changes = compare_models(recorded(then), recorded(now), in_epoch=True)
        assert (changes.refusal, changes.warnings) == (None, ())


@pytest.mark.parametrize(
    ("then", "now", "message"),
    [
        (
            plain(),
            lambda: plain("tanh"),
            r"layer 2\b.*Dense.*activation.*'tanh'.*'relu'",
        ),
        (plain(), lambda: plain(rate=0.5), r"layer 4\b.*Dropout.*rate.*0.5.*0.3"),
        (plain(), lambda: plain(trainable=False), r"layer 2\b.*Dense.*trainable.*False"),
        (
            plain(),
            lambda: plain(optimizer=optimizers.AdamW()),
            "optimizer.*'AdamW'.*'Adam'",
        ),
        (plain(), connected, r"layer 2\b.*Dense.*layer 2\b.*MultiHeadAttention"),
        (connected(), lambda: connected("gelu"), r"layer.activation.*'gelu'"),
        (connected(), lambda: connected(operation=keras.ops.sin), "connect"),
        (connected(), lambda: connected(swap=True), r"layer 12\b.*Flatten"),
        (custom(), lambda: custom("tanh"), r"layer 1\b.*Dense.*activation.*'tanh'"),
    ],
)
def test_another_model_is_refused_by_name(then: Any, now: Callable[[], Any], message: str) -> None:
    refusal = compare_models(recorded(then), recorded(now()), in_epoch=False).refusal
    assert refusal is not None
    assert re.search(message, refusal), refusal


def test_another_learning_rate_is_warned_of_each_time() -> None:
    then = recorded(plain())
    requested = recorded(plain(optimizer=optimizers.Adam(0.5)))
    changes = compare_models(then, requested, in_epoch=True)
    assert changes.refusal is None
    (text,) = changes.warnings
    assert re.search("learning_rate.*Adam.*0.5.*0.001", text)
    assert "checkpoint" in text
    again = compare_models(changes.record, requested, in_epoch=True)
    assert again.warnings == changes.warnings
    assert compare_models(changes.record, then, in_epoch=True).warnings == ()


def test_what_a_new_optimizer_honours_needs_no_warning() -> None:
    def with_schedule(start: float) -> Any:
        rate = optimizers.schedules.ExponentialDecay(start, 10, 0.9)
        return recorded(plain(optimizer=optimizers.Adam(rate)))

    cases = [
        (recorded(plain()), recorded(plain(optimizer=optimizers.Adam(1e-3, clipnorm=1.0)))),
        (with_schedule(0.1), with_schedule(0.2)),
    ]
    for then, now in cases:
        changes = compare_models(then, now, in_epoch=True)
        assert (changes.refusal, changes.warnings) == (None, ())
        assert len(changes.optimizers) == 1


def test_loss_scaling_goes_on_with_its_own_scale() -> None:
    def scaled(initial: float, rate: float) -> Any:
        inner = optimizers.SGD(rate)
        optimizer = optimizers.LossScaleOptimizer(inner, initial_scale=initial)
        return recorded(plain(optimizer=optimizer))

    changes = compare_models(scaled(8.0, 0.1), scaled(16.0, 0.2), in_epoch=False)
    warnings = " ".join(changes.warnings)
    assert re.search(r"initial_scale.*LossScaleOptimizer.*\b16\b", warnings)
    assert "inner_optimizer.learning_rate" in warnings
    assert compare_models(changes.record, scaled(8.0, 0.1), in_epoch=False).warnings == ()


@pytest.mark.parametrize(
    ("now", "name"),
    [
        ({"loss": "mae"}, "loss.*mae"),
        ({"loss": keras.losses.Huber(0.3)}, r"loss.*Huber\(delta=0.3"),
        ({"metrics": ["mse"]}, "metrics"),
    ],
)
def test_another_loss_or_metric(now: dict[str, Any], name: str) -> None:
    then, requested = recorded(plain()), recorded(plain(**now))
    within = compare_models(then, requested, in_epoch=True).refusal
    assert within is not None
    assert re.search(f"{name}.*checkpoint.*epoch", within), within
    between = compare_models(then, requested, in_epoch=False)
    assert between.refusal is None
    assert len(between.warnings) == ("loss" in now)
    for text in between.warnings:
        assert re.search(f"{name}.*new", text), text
    # Once told, it is the run's own.
    assert compare_models(between.record, requested, in_epoch=True).refusal is None


def test_a_seed_changed_twice_is_not_said_to_be_the_first() -> None:
    info = replace(INFO, order={"seed": 5})  # that of the second call
    _, _, (warning,) = _resolve_settings(info, replace(FIT, seed=7), 2, None, DATA, SYNC)
    assert re.search(r"seed.*\b7\b.*checkpoint.*\b5\b.*order", warning)


def test_checkpoints_that_say_nothing_of_the_model_are_gone_on_with() -> None:
    now = recorded(plain())
    changes = compare_models({}, now, in_epoch=True)
    assert (changes.refusal, changes.warnings, changes.record) == (None, (), now)


INFO = CheckpointInfo(
    step=4,
    epoch=1,
    history=[{}],
    data_fingerprint="f",
    variables=[],
    engine=KERAS,
    order={"seed": 0},
    state={"learning_rate": {"base": 0.1, "done": True}},
    settings={
        "fit": {"lr_scaling": "linear", "warmup_epochs": 2.0, "batch_size": 32},
        "num_workers": 2,
        "initial_weights": None,
        "feature_cols": ["a", "b"],
        "label_cols": ["y"],
        "sample_weight_col": None,
        "data": {"validation": 0.1, "stratify": None, "shapes": {}, "dtypes": {}, "transforms": []},
    },
)
SYNC = {"sync": "allreduce", "compression": "none"}
DATA: dict[str, Any] = {"validation": None, "transforms": []}
FIT = FitOptions(epochs=2, lr_scaling="linear", warmup_epochs=2.0)


@pytest.mark.parametrize(
    ("fit", "workers", "start", "message"),
    [
        (FitOptions(), 2, None, "lr_scaling.*'none'.*'linear'"),
        (FitOptions(), 2, None, r"warmup_epochs.*\b0\b.*\b2"),
        (replace(FIT, lr_scaling="sqrt"), 2, None, "lr_scaling.*'sqrt'"),
        (replace(FIT, seed=7), 2, None, r"seed.*\b7\b.*\b0"),
        (FIT, 4, None, r"num_workers.*\b4\b.*\b2\b.*learning"),
        (FIT, 2, "old/run", "initial_weights='old/run'"),
    ],
)
def test_settings_that_are_not_honoured(
    fit: FitOptions, workers: int, start: str | None, message: str
) -> None:
    held, recorded_start, warnings = _resolve_settings(INFO, fit, workers, start, DATA, SYNC)
    assert any(re.search(message, text) for text in warnings)
    assert (held.lr_scaling, held.warmup_epochs, recorded_start) == ("linear", 2.0, None)


@pytest.mark.parametrize(
    ("recorded", "fit", "data", "message"),
    [
        (
            {"class_weight": {"0": 1.0}},
            {"class_weight": {0: 9.0}},
            DATA,
            r"class_weight.*\{0: 9.0\}",
        ),
        ({"class_weight": {"0": 1.0}}, {}, DATA, "class_weight.*None"),
        (
            {"class_weight": None},
            {"class_weight": {1: 2.0}},
            DATA,
            r"class_weight.*\{1: 2.0\}",
        ),
        ({"steps_per_epoch": None}, {"steps_per_epoch": 5}, DATA, r"steps_per_epoch.*\b5\b"),
        ({}, {}, {**DATA, "transforms": ["a"]}, "transforms"),
    ],
)
def test_what_is_left_is_trained_with_new_ones_and_they_are_told(
    recorded: Any, fit: Any, data: Any, message: str
) -> None:
    settings = {**INFO.settings, "fit": {**INFO.settings["fit"], **recorded}}
    info = replace(INFO, settings=settings)
    _, _, (warning,) = _resolve_settings(info, replace(FIT, **fit), 2, None, data, SYNC)
    assert re.search(message, warning)
    assert "new" in warning


def test_another_compression_is_told() -> None:
    info = replace(INFO, settings={**INFO.settings, "sync": {"compression": "fp16"}})
    _, _, (warning,) = _resolve_settings(info, FIT, 2, None, DATA, SYNC)
    assert re.search("compression.*'none'.*'fp16'", warning)


def test_another_way_within_an_epoch_of_taken_batches_is_refused() -> None:
    within, over = (replace(INFO, state={**INFO.state, "taken": one}) for one in ([3, 2], None))
    with pytest.raises(RunDirectoryError, match=r"epoch 2\b.*sync=AsyncServer"):
        _resolve_settings(within, FIT, 2, None, DATA, SYNC)
    for info, sync in ((over, SYNC), (within, {"sync": "async_server", "staleness": 8})):
        assert _resolve_settings(info, FIT, 2, None, DATA, sync)[2] == []


def test_the_same_class_weight_is_not_warned_of() -> None:
    then, now = {"2": 2.0, "10": 3.0}, {2: 2.0, 10: 3.0}
    settings = {**INFO.settings, "fit": {**INFO.settings["fit"], "class_weight": then}}
    info, fit = replace(INFO, settings=settings), replace(FIT, class_weight=now)
    assert _resolve_settings(info, fit, 2, None, DATA, SYNC)[2] == []


def test_a_seed_that_changes_the_split_is_refused_not_warned_of() -> None:
    data = {**DATA, "validation": 0.1}
    assert _resolve_settings(INFO, replace(FIT, seed=7), 2, None, data, SYNC)[2] == []


@pytest.mark.parametrize(
    ("info", "fit", "message"),
    [
        (INFO, {"epochs": 1}, r"epochs=1\b.*new run_dir.*more epochs"),
        (INFO, {"epochs": 1, "seed": 7, "class_weight": {0: 2.0}}, r"trained 1\b.*epochs=1\b"),
        (replace(INFO, epoch=3), {"epochs": 2}, r"trained 3\b.*epochs=2\b"),
        (
            replace(INFO, epoch=6, state={"stopped_at": 20}),
            {"epochs": 30},
            r"callback .*epoch 6\b.*new run_dir.*initial_weights",
        ),
    ],
)
def test_where_nothing_is_left_to_train_it_is_told(
    info: CheckpointInfo, fit: Any, message: str
) -> None:
    settings = {**INFO.settings, "fit": {**INFO.settings["fit"], "class_weight": None}}
    held = replace(FIT, **fit)
    info = replace(info, settings=settings)
    (text,) = _resolve_settings(info, held, 2, None, DATA, SYNC)[2]
    assert "nothing is left to train" in text
    assert re.search(message, text)
    assert _describe_rest(info, held.epochs) == ""


def test_which_epochs_are_left_is_told() -> None:
    assert re.search(r"2 to 6\b.*\b6\b", _describe_rest(INFO, 6))
    assert re.search(r"epoch 2 of 2\b", _describe_rest(INFO, 2))
    within = _describe_rest(replace(INFO, epoch_step=13), 6)
    assert re.search(r"2 to 6\b.*epoch 2\b.*\b13\b", within)


def test_the_same_call_is_not_warned_of() -> None:
    assert _resolve_settings(INFO, FIT, 2, None, DATA, SYNC) == (FIT, None, [])
    started = replace(INFO, settings={**INFO.settings, "initial_weights": "old/run"})
    assert _resolve_settings(started, FIT, 2, "old/run", DATA, SYNC) == (FIT, "old/run", [])
    empty = replace(INFO, settings={}, order={}, state={})
    assert _resolve_settings(empty, FIT, 9, None, DATA, SYNC) == (FIT, None, [])


@pytest.mark.parametrize(
    ("fingerprint", "changed", "message"),
    [
        (
            "g",
            {"data": {**INFO.settings["data"], "validation": 0.2}},
            "validation.*0.2.*0.1",
        ),
        ("g", {"data": {**INFO.settings["data"], "validation": None}}, "validation.*None"),
        ("g", {"fit": {"seed": 3}}, r"seed.*\b3\b.*\b0\b.*split"),
        ("g", {}, "arguments.*rows"),
        ("g", {"sample_weight_col": "w"}, "sample_weight_col.*'w'.*None"),
        ("f", {"feature_cols": ["b", "a"]}, r"feature_cols.*\['b', 'a'\]"),
    ],
)
def test_other_data_are_refused_by_name(
    fingerprint: str, changed: dict[str, Any], message: str
) -> None:
    settings = {**INFO.settings, "fit": {"seed": 0}, **changed}
    with pytest.raises(RunDirectoryError, match=message):
        check_same_data(INFO, fingerprint, settings, "runs/x")


def test_a_table_that_has_moved_on_is_named_with_its_version() -> None:
    then = {"file:/delta": "3", "ice.t": "branch_null_snapshot_77", "file:/same": "1"}
    now = {"file:/delta": "5", "ice.t": "branch_null_snapshot_88", "file:/same": "1"}
    settings, info = {**INFO.settings, "fit": {"seed": 0}}, replace(INFO, tables=then)
    with pytest.raises(RunDirectoryError, match="VERSION AS OF 3.*VERSION AS OF 77") as caught:
        check_same_data(info, "g", settings, "runs/x", now)
    assert "file:/same" not in str(caught.value)


def test_the_same_rows_may_be_validated_otherwise() -> None:
    data = {**INFO.settings["data"], "validation": "a DataFrame"}
    settings = {**INFO.settings, "fit": {"seed": 5}, "data": data}
    check_same_data(INFO, "f", settings, "runs/x")
    single = {**INFO.settings, "feature_cols": ["a"]}
    for columns in (["a"], {"p": "a"}):
        check_same_data(
            replace(INFO, settings=single), "f", {**settings, "feature_cols": columns}, "runs/x"
        )


@pytest.mark.parametrize(
    ("then", "now"),
    [
        (["a", "b"], {"p": "b", "q": "a"}),
        (["a", "b"], {"p": "a", "q": "b"}),
        ({"p": "a", "q": "b"}, ["a", "b"]),
        ([["a", "b"], "c"], {"p": ["a", "b"], "q": "c"}),
    ],
)
def test_which_input_a_column_feeds_must_be_told_in_the_same_way(then: Any, now: Any) -> None:
    """A list feeds the inputs in the model's order, which the driver does not know."""
    info = replace(INFO, settings={**INFO.settings, "feature_cols": then})
    settings = {**INFO.settings, "fit": {"seed": 0}, "feature_cols": now}
    with pytest.raises(RunDirectoryError, match="feature_cols"):
        check_same_data(info, "f", settings, "runs/x")


def test_a_new_global_batch_is_told_where_the_place_in_the_data_depends_on_it() -> None:
    info = replace(INFO, order={"seed": 0, "global_batch": 64})
    assert _resolve_settings(info, replace(FIT, batch_size=16), 2, None, DATA, SYNC)[2] == []
    fit = replace(FIT, batch_size=16, steps_per_epoch=5)
    settings = {**INFO.settings, "fit": {**INFO.settings["fit"], "steps_per_epoch": 5}}
    info = replace(info, settings=settings)
    (warning,) = _resolve_settings(info, fit, 2, None, DATA, SYNC)[2]
    assert re.search(r"batch.*\b32\b.*\b64\b.*rows", warning)
