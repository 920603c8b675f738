"""The body of the prediction UDF, Arrow in and Arrow out, without Spark."""

from __future__ import annotations

import gc
from dataclasses import replace
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pyarrow as pa
import pytest

from horovod_spark_runner.checkpoint.run_directory import RunDirectory
from horovod_spark_runner.data.manifest import Column
from horovod_spark_runner.errors import DataError
from horovod_spark_runner.model import inference
from horovod_spark_runner.model.inference import Predictor
from horovod_spark_runner.model.load import read_finished_run
from horovod_spark_runner.model.shipping import load_model
from horovod_spark_runner.training.trained_model import Model

from ..runs import save_run

COLUMNS = (Column("x", "float32", (2,)), Column("n", "int32"))
VALID = [([float(i), 2.0], i % 3) for i in range(11)]
INVALID = [(None, 1), ([1.0], 1), ([1.0, None], 1), ([1.0, 2.0], None)]


def doubling(batch: int | None) -> Any:
    x = keras.Input(batch_shape=(batch, 2), name="x")
    n = keras.Input(batch_shape=(batch, 1), name="n")
    model = keras.Model({"x": x, "n": n}, {"both": x + keras.ops.cast(n, "float32"), "n": n * 2})
    model.compile("sgd", "mse")
    return model


@pytest.fixture(scope="module", params=[None, 4], ids=["any batch", "batch of 4"])
def predictor(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    place = tmp_path_factory.mktemp("run")
    save_run(place, doubling(request.param), COLUMNS)
    recipe = read_finished_run(RunDirectory(str(place))).recipe

    def make(**fields: Any) -> Predictor:
        digest = str(place)
        return Predictor(
            digest, lambda: recipe, recipe.columns, recipe.outputs, **{"batch_size": 3, **fields}
        )

    yield make
    inference._models.clear()
    gc.unfreeze()


def arrays(rows: Any) -> tuple[pa.Array, ...]:
    x, n = ([row[i] for row in rows] for i in (0, 1))
    return pa.array(x, pa.list_(pa.float32())), pa.array(n, pa.int32())


def joined(arrays: Any) -> list[Any]:
    return [row for array in arrays for row in array.to_pylist()]


def expected(rows: Any) -> list[Any]:
    return [{"output0": [a + n for a in x], "output1": 2 * n} for x, n in rows]


@pytest.mark.thorough
@pytest.mark.parametrize("batch_size", [1, 3, 4, 100])
def test_any_number_of_rows(predictor: Any, batch_size: int) -> None:
    given = [arrays(VALID[:count]) for count in (0, 1, 7, 11)]
    found = list(predictor(batch_size=batch_size)(iter(given)))
    rows = [row for array in found for row in array.to_pylist()]
    assert rows == expected([*VALID[:1], *VALID[:7], *VALID])
    assert {array.type for array in found} == {found[0].type}


def test_no_rows(predictor: Any) -> None:
    assert list(predictor()(iter([]))) == []
    assert list(predictor()(iter([arrays([]), arrays([])]))) == []


@pytest.mark.parametrize("sizes", [[1] * 11, [2, 9], [5, 0, 5, 1], [11]])
def test_batches_are_made_across_arrow_batches(predictor: Any, sizes: list[int]) -> None:
    """And no more is asked for than a batch needs: predictions come as soon as they can."""
    asked, begin, given = 0, 0, []
    for size in sizes:
        given.append(arrays(VALID[begin : begin + size]))
        begin += size

    def arriving() -> Any:
        nonlocal asked
        for some in given:
            asked += len(some[0])
            yield some

    calls: list[int] = []
    predict = predictor(batch_size=4)
    model = predict._model()

    def counting(values: Any) -> Any:
        calls.append(len(values["n"]))
        return model.prepare(values)

    inference._models[predict.digest] = replace(model, prepare=counting)
    rows: list[Any] = []
    for array in predict(arriving()):
        rows += array.to_pylist()
        assert asked - len(rows) < 4
    inference._models[predict.digest] = model
    assert rows == expected(VALID)
    assert calls == [4, 4, 3]


def test_invalid_rows_are_null_and_disturb_no_others(predictor: Any) -> None:
    rows = [*INVALID[:2], *VALID[:5], *INVALID[2:], *VALID[5:]]
    for policy in ("keep", "skip"):
        found = joined(predictor(handle_invalid=policy)(iter([arrays(rows)])))
        assert [v for v in found if v is not None] == expected(VALID)
        assert [v is None for v in found] == [row in INVALID for row in rows]
    found = joined(predictor(handle_invalid="keep")(iter([arrays(INVALID)])))
    assert found == [None] * len(INVALID)


@pytest.mark.parametrize("row", INVALID)
def test_an_invalid_row_is_named(predictor: Any, row: Any) -> None:
    name = "n" if row[1] is None else "x"
    with pytest.raises(DataError, match=rf"'{name}'.*row 3\b.*batch.*\b5"):
        list(predictor()(iter([arrays([*VALID[:3], row, *VALID[3:4]])])))


def test_an_image_that_cannot_be_decoded_is_named_by_its_row(tmp_path: Path) -> None:
    import io

    from PIL import Image

    model = keras.Sequential([keras.Input((2, 2, 3)), keras.layers.Flatten()])
    model.compile("sgd", "mse")
    column = Column("p", "uint8", (2, 2, 3), "image")
    save_run(tmp_path, model, [column])
    recipe = read_finished_run(RunDirectory(str(tmp_path))).recipe
    buffer = io.BytesIO()
    Image.fromarray(np.full((2, 2, 3), 7, np.uint8)).save(buffer, "PNG")
    predict = Predictor(str(tmp_path), lambda: recipe, recipe.columns, recipe.outputs, 2, "keep")
    good = buffer.getvalue()
    found = joined(predict(iter([(pa.array([good, None, good]),)])))
    assert found == [[7.0] * 12, None, [7.0] * 12]
    with pytest.raises(DataError, match=r"row 3\b.*batch.*\b4"):
        list(predict(iter([(pa.array([good, None, good, b"broken"]),)])))
    with pytest.raises(DataError, match=r"row 1\b.*batch.*\b2"):
        list(predict(iter([(pa.array([good]),), (pa.array([None, b"broken"]),)])))


def test_the_next_batch_is_prepared_meanwhile(
    predictor: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stand-in for a GPU: computing waits until the next batch has been prepared."""
    import threading

    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    predict = predictor(batch_size=2)
    model = predict._model()
    prepared = [threading.Event() for _ in range(6)]
    numbers = iter(range(6))

    def prepare(values: Any) -> Any:
        number = next(numbers)
        prepared[number].set()
        return number, model.prepare(values)

    def compute(given: Any) -> Any:
        number, inputs = given
        if number < 4:  # the last one needs an Arrow batch to come
            assert prepared[number + 1].wait(20), "the next batch waits for this one"
        return model.compute(inputs)

    monkeypatch.setitem(inference._models, predict.digest, Model(prepare, compute))
    assert joined(predict(iter([arrays(VALID)]))) == expected(VALID)
    names = [thread.name for thread in threading.enumerate()]
    assert not [name for name in names if name.startswith("hsr-prepare")]


def test_batches_of_any_size_are_traced_once(tmp_path: Path) -> None:
    traces = []

    class Counting(keras.layers.Layer):
        def call(self, x: Any) -> Any:
            traces.append(x.shape)
            return x

    model = keras.Sequential([keras.Input((2,)), Counting()])
    model.compile("sgd", "mse")
    save_run(tmp_path, model, COLUMNS[:1])
    directory = RunDirectory(str(tmp_path))
    recipe = read_finished_run(directory, custom_objects={"Counting": Counting}).recipe
    predict = load_model(recipe)
    predict({"x": np.zeros((5, 2), np.float32)})
    traces.clear()
    for rows in (4, 5, 1, 7):
        x = np.full((rows, 2), rows, np.float32)
        np.testing.assert_array_equal(predict({"x": x})[0], x)
    assert traces == []
