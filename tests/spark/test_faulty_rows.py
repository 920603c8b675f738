"""A row that ranks cannot read is reported as a row of the user's DataFrame."""

from __future__ import annotations

import io
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from horovod_spark_runner import DataError, DataOptions, prepare_dataset
from horovod_spark_runner.data.prepare.datasets import add_faulty_row_number
from horovod_spark_runner.data.prepare.schema import Roles
from tests.numpy_engine import Line
from tests.trainings import train

pytestmark = pytest.mark.spark


def _image(number: int) -> bytes:
    from PIL import Image

    pixels = np.random.default_rng(number).integers(0, 256, (4, 4, 3), np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "PNG")
    return buffer.getvalue()


def _strict(value: np.ndarray, rng: object) -> np.ndarray:
    if value.flat[0] == 11:
        raise ValueError("eleven")
    return value


@pytest.mark.parametrize("column", ["image", "vector", "number", "text"])
def test_a_row_that_cannot_be_read_is_named(spark: Any, tmp_path: Path, column: str) -> None:
    rows = [(f"file{n}.png", _image(n), [float(n), 0.1], n, f"word{n}", n % 3) for n in range(20)]
    transforms: dict[str, Any] = {column: _strict}
    if column == "image":
        transforms = {}
        rows[11] = (*rows[11][:1], rows[11][1][:60], *rows[11][2:])
    if column == "text":
        transforms = {"text": lambda value, rng: 1 if value == "word11" else value}
    schema = "path string, image binary, vector array<float>, number int, text string, label int"
    frame = spark.createDataFrame(rows, schema).repartition(3, "label")
    data = DataOptions(shapes={"image": (4, 4, 3)}, transforms=transforms)
    names = ["image", "vector", "number", "text", "label"]
    dataset = prepare_dataset(frame, names, shapes=data.shapes, data_dir=str(tmp_path))
    read = type(dataset)(dataset.manifest, transforms)
    with pytest.raises(DataError) as caught:
        list(read.epoch(0, rank=0, size=1, batch_size=8))
    error = pickle.loads(pickle.dumps(caught.value))  # as it comes from a rank
    add_faulty_row_number(error, frame, Roles(tuple(names[:-1]), ("label",)), data)
    assert repr(column) in str(error)
    assert "path='file11.png'" in str(error)
    assert str(error).startswith(str(caught.value))


def test_files_that_were_overwritten_since_are_named(spark: Any, tmp_path: Path) -> None:
    table = str(tmp_path / "table")
    spark.range(10).selectExpr("float(id) as x").write.parquet(table)
    frame = spark.read.parquet(table)
    spark.range(5).selectExpr("float(id) as x").write.mode("overwrite").parquet(table)
    with pytest.raises(DataError, match=r"table/part.*read the table again"):
        train(
            frame.selectExpr("x", "x + 1 as y"),
            tmp_path / "run",
            feature_cols=["x"],
            label_cols=["y"],
            model_fn=Line(),
        )
