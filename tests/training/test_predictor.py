"""The body of the prediction UDF, Arrow in and Arrow out, without Spark."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import keras
import numpy as np
import pyarrow as pa
import pytest

from horovod_spark_runner.data.manifest import Column
from horovod_spark_runner.errors import DataError
from horovod_spark_runner.ml import inference
from horovod_spark_runner.ml.inference import Predictor
from horovod_spark_runner.ml.trained import read_finished_run
from horovod_spark_runner.rundir.directory import RunDirectory

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


def arrays(rows: Any) -> tuple[pa.Array, ...]:
    x, n = ([row[i] for row in rows] for i in (0, 1))
    return pa.array(x, pa.list_(pa.float32())), pa.array(n, pa.int32())


def expected(rows: Any) -> list[Any]:
    return [{"output0": [a + n for a in x], "output1": 2 * n} for x, n in rows]


@pytest.mark.parametrize("batch_size", [1, 3, 4, 100])
def test_any_number_of_rows(predictor: Any, batch_size: int) -> None:
    given = [arrays(VALID[:count]) for count in (0, 1, 7, 11)]
    found = list(predictor(batch_size=batch_size)(iter(given)))
    assert [len(array) for array in found] == [0, 1, 7, 11]
    for array, count in zip(found, (0, 1, 7, 11), strict=True):
        assert array.to_pylist() == expected(VALID[:count])
        assert array.type == found[0].type


def test_invalid_rows_are_null_and_disturb_no_others(predictor: Any) -> None:
    rows = [*INVALID[:2], *VALID[:5], *INVALID[2:], *VALID[5:]]
    for policy in ("keep", "skip"):
        (found,) = predictor(handle_invalid=policy)(iter([arrays(rows)]))
        assert [v for v in found.to_pylist() if v is not None] == expected(VALID)
        assert [v is None for v in found.to_pylist()] == [row in INVALID for row in rows]
    (none,) = predictor(handle_invalid="keep")(iter([arrays(INVALID)]))
    assert none.to_pylist() == [None] * len(INVALID)


@pytest.mark.parametrize("row", INVALID)
def test_an_invalid_row_is_named(predictor: Any, row: Any) -> None:
    name = "n" if row[1] is None else "x"
    with pytest.raises(DataError, match=f"column '{name}' .* in row 3 of a batch of 5"):
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
    (found,) = predict(iter([(pa.array([good, None, good]),)]))
    assert found.to_pylist() == [[7.0] * 12, None, [7.0] * 12]
    with pytest.raises(DataError, match="row 3 of a batch of 4"):
        list(predict(iter([(pa.array([good, None, good, b"broken"]),)])))
