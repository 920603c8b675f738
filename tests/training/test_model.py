"""What only the built model can show."""

from __future__ import annotations

import contextlib
import pickle
from typing import Any

import keras
import mpi4py.MPI  # noqa: F401 - it listens from its import on, so before the tests
import numpy as np
import pytest

from horovod_spark_runner.data.manifest import Column, Manifest
from horovod_spark_runner.engines.keras.binding import InputBinding, bind_outputs
from horovod_spark_runner.engines.keras.engine import ENGINE
from horovod_spark_runner.engines.keras.model import (
    build_model,
    call_outputs,
    check_trainable,
    fresh_keras_state,
    keras_state,
    using_keras_state,
)
from horovod_spark_runner.engines.keras.optimizers import check_optimizers, find_optimizers
from horovod_spark_runner.errors import DataError, ModelError
from horovod_spark_runner.serialize import dumps
from horovod_spark_runner.training.spec import Binding, ModelSource


def manifest(**columns: tuple[int, ...]) -> Manifest:
    described = tuple(Column(name, "float32", shape) for name, shape in columns.items())
    return Manifest("", (), described, (), "")


def sequential(shape: tuple[int | None, ...] = (4,), **compile_arguments: Any) -> Any:
    model = keras.Sequential([keras.layers.Input(shape), keras.layers.Dense(1)])
    model.compile(**{"optimizer": "sgd", "loss": "mse", **compile_arguments})
    return model


def two_inputs() -> Any:
    a, b = keras.Input((2,), name="a"), keras.Input((3,), name="b")
    joined = keras.layers.concatenate([a, b])
    outputs = {
        "p": keras.layers.Dense(1, name="p")(joined),
        "q": keras.layers.Dense(2, name="q")(b),
    }
    model = keras.Model([a, b], list(outputs.values()))
    model.compile("sgd", loss=["mse", "mse"])
    return model


@pytest.mark.parametrize(
    ("value", "message"),
    [(None, "return statement"), ("x", "builtins.str")],
)
def test_what_is_no_model_is_refused(value: Any, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        build_model(ModelSource(function=lambda: value))


def test_a_model_object_is_refused_on_the_driver() -> None:
    with pytest.raises(ModelError, match="function.*build"):
        ENGINE.source(sequential(), None)


def test_settings_of_the_drivers_process_hold_for_the_model() -> None:
    """Ranks are processes of their own; a policy set in a notebook's first cell is theirs, too."""
    assert ENGINE.source(sequential, None).function is sequential
    settings = {"dtype_policy": "mixed_bfloat16", "epsilon": 1e-5, "floatx": "float16"}
    with using_keras_state({**keras_state(), **settings}):
        source = pickle.loads(dumps(ENGINE.source(sequential, None)))
    before = keras_state()
    with using_keras_state(before):
        model = build_model(source)
        assert model.layers[-1].compute_dtype == "bfloat16"
        assert {**before, **settings} == keras_state()
    assert keras_state() == before


def test_an_unnamed_policy_is_refused() -> None:
    before = keras_state()
    policy = keras.dtype_policies.DTypePolicyMap()
    with using_keras_state(before):
        keras.config.set_dtype_policy(policy)
        with pytest.raises(ModelError, match="name"):
            ENGINE.source(sequential, None)
        keras.config.set_dtype_policy("float32")


def test_keras_is_as_before_after_it_was_fresh() -> None:
    """Names that users' layers were given on the driver are not given again, and seeds stay."""
    keras.utils.set_random_seed(7)
    keras.layers.Dense(1)
    last = keras.layers.Dense(1).name
    with fresh_keras_state():
        assert keras.layers.Dense(1).name == "dense"
        keras.config.set_epsilon(1e-3)
    assert keras.layers.Dense(1).name == f"dense_{int(last.rpartition('_')[2]) + 1}"
    drawn = []
    for within in (contextlib.nullcontext, fresh_keras_state):
        with fresh_keras_state():
            keras.utils.set_random_seed(7)
            with within():
                keras.layers.Dense(1).build((None, 1))
            drawn.append(np.array(keras.random.normal((2,))))
    one, other = drawn
    np.testing.assert_array_equal(one, other)
    assert keras.config.epsilon() == 1e-7


def test_uncompiled() -> None:
    with pytest.raises(ModelError, match="compiled"):
        check_trainable(keras.Sequential([keras.layers.Input((1,)), keras.layers.Dense(1)]), 4)


def test_horovods_own_optimizer() -> None:
    import horovod.tensorflow.keras as hvd

    hvd.init()
    try:
        optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1))
        with pytest.raises(ModelError, match="DistributedOptimizer.*plain Keras optimizer"):
            check_optimizers(find_optimizers(sequential(optimizer=optimizer)))
    finally:
        hvd.shutdown()


def test_input_shape_shows_both() -> None:
    with pytest.raises(ModelError, match=r"\(4,\).*'x'.*\(5,\)"):
        InputBinding(sequential((4,)), Binding(("x",)), manifest(x=(5,)))


def test_several_columns_for_one_input_point_to_the_assembler() -> None:
    with pytest.raises(ModelError, match=r"feature_cols=\[\['x', 'y'\]\].*VectorAssembler"):
        InputBinding(sequential((2,)), Binding(("x", "y")), manifest(x=(), y=()))


def test_a_single_number_feeds_an_input_of_one() -> None:
    binding = InputBinding(sequential((1,)), Binding(("x",)), manifest(x=()))
    assert binding({"x": np.zeros(3, np.float32)}).shape == (3, 1)


@pytest.mark.parametrize(
    ("taken", "column", "right", "wrong"),
    [
        ("uint8", "int16", [0, 255], [256, -1]),
        ("uint32", "int64", [0, 2**32 - 1], [2**32, -1]),
        ("int32", "int64", [-(2**31), 2**31 - 1], [2**31]),
        ("bool", "int8", [0, 1, 2], []),
        ("bfloat16", "int64", [2**20], []),
        ("float32", "int64", [2**62], []),
    ],
)
def test_whole_numbers_that_an_input_cannot_hold(
    taken: str, column: str, right: list[int], wrong: list[int]
) -> None:
    """Keras would take 256 for 0."""
    x = keras.Input((1,), dtype=taken, name="n")
    made = Manifest("", (), (Column("x", column),), (), "")
    binding = InputBinding(keras.Model(x, keras.ops.cast(x, "float64")), Binding(("x",)), made)
    assert binding({"x": np.array(right, column)}).ravel().tolist() == right
    for number in wrong:
        with pytest.raises(DataError, match=rf"'x'.*{number}\b.*'n'.*{taken}\b"):
            binding({"x": np.array([0, number], column)})


def test_unknown_sizes_fit_anything() -> None:
    InputBinding(sequential((None, 4)), Binding(("x",)), manifest(x=(9, 4)))


@pytest.mark.parametrize(
    "binding",
    [
        Binding(("x", "y")),  # in order
        Binding(("y", "x"), ("b", "a")),  # by a dictionary
    ],
)
def test_several_inputs(binding: Binding) -> None:
    bound = InputBinding(two_inputs(), binding, manifest(x=(2,), y=(3,)))
    values = bound({"x": np.zeros((1, 2)), "y": np.zeros((1, 3))})
    assert [value.shape for value in values] == [(1, 2), (1, 3)]


def test_inputs_by_column_name() -> None:
    bound = InputBinding(two_inputs(), Binding(("b", "a")), manifest(b=(3,), a=(2,)))
    assert bound({"a": np.zeros((1, 2)), "b": np.zeros((1, 3))})[1].shape == (1, 3)


def test_wrong_input_names() -> None:
    with pytest.raises(ModelError, match=r"feature_cols.*\['c', 'a'\]"):
        InputBinding(two_inputs(), Binding(("x", "y"), ("c", "a")), manifest(x=(2,), y=(3,)))


def test_outputs_in_order_and_by_name() -> None:
    model, described = two_inputs(), manifest(u=(1,), v=(1,))
    arrays = {"u": np.zeros((2, 1)), "v": np.ones((2, 1))}

    def bound(binding: Binding) -> list[float]:
        labels = bind_outputs(model, binding, described, call_outputs(model, None))(arrays)
        return [float(values[0, 0]) for values in labels]

    assert bound(Binding(("u", "v"))) == [0, 1]
    assert bound(Binding(("v", "u"), ("q", "p"))) == [0, 1]
    with pytest.raises(ModelError, match="label_cols"):
        bound(Binding(("u",)))
    with pytest.raises(ModelError, match="label_cols"):
        bound(Binding(("u", "v"), ("p", "nosuch")))


def test_model_files(tmp_path: Any) -> None:
    model = sequential()
    model.save(tmp_path / "m.keras")
    (tmp_path / "m.json").write_text(model.to_json())
    for name in ("m.keras", "m.json"):
        built = build_model(ENGINE.source(str(tmp_path / name), None))
        check_trainable(built, 4)
        assert built.input_shape == (None, 4)
