"""Files and variables that Spark gives its Python workers, on ranks."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from horovod_spark_runner import (
    DataOptions,
    HorovodRunner,
    InvalidInputError,
    RestartOptions,
    TFTransformer,
)
from horovod_spark_runner.testing import Fault, with_faults
from tests.trainings import train

pytestmark = [pytest.mark.mpi, pytest.mark.spark]


@pytest.fixture(scope="module")
def vocabulary(spark: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file and a module that were added to Spark."""
    folder = tmp_path_factory.mktemp("added")
    file = folder / "vocabulary.txt"
    file.write_text("a\nbe\nsea")
    (folder / "added_to_spark.py").write_text("LENGTHS = [1, 2, 3]")
    spark.sparkContext.addFile(str(file))
    spark.sparkContext.addPyFile(str(folder / "added_to_spark.py"))
    return file


def words() -> list[str]:
    from pyspark import SparkFiles

    return Path(SparkFiles.get("vocabulary.txt")).read_text().split()


@pytest.mark.usefixtures("vocabulary")
def test_files_modules_and_broadcasts_in_a_function(spark: Any) -> None:
    lengths = spark.sparkContext.broadcast({"a": 1, "be": 2, "sea": 3})
    weights = spark.sparkContext.broadcast(np.arange(3.0))

    def look(argument: Any) -> tuple[bool, float, Any]:
        added_to_spark: Any = importlib.import_module("added_to_spark")

        known = [lengths.value[word] for word in words()]
        return known == added_to_spark.LENGTHS, float(argument.value.sum()), lengths

    lengths.unpersist()  # Spark sends it again, too
    for result in HorovodRunner(2, stream_logs=False).run(look, weights).results:
        assert result[:2] == (True, 3.0)
        assert result[2].value == lengths.value


@pytest.mark.thorough
@pytest.mark.usefixtures("vocabulary")
def test_files_and_broadcasts_in_a_training(spark: Any, small: Any, tmp_path: Path) -> None:
    import keras

    rates = spark.sparkContext.broadcast({"first": 0.1})
    marks = spark.sparkContext.broadcast(np.array([1.0, 2.0]))

    def model_fn() -> Any:
        layers = [keras.layers.Input((64,)), keras.layers.Dense(len(words()))]
        model = keras.Sequential([*layers, keras.layers.Dense(10, activation="softmax")])
        rate = rates.value["first"]
        model.compile(keras.optimizers.SGD(rate), "sparse_categorical_crossentropy")
        return model

    class Mark(keras.callbacks.Callback):
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            logs["mark"] = float(marks.value[epoch]) + len(words())

    def scaled(image: Any, generator: Any) -> Any:
        return image * np.float32(marks.value[1] * len(words()))

    frame = small.filter("id < 100")
    model = train(
        frame,
        tmp_path / "run",
        model_fn=model_fn,
        callbacks=with_faults([Fault(3, rank=1)], tmp_path / "notes", [Mark()]),
        data=DataOptions(transforms={"image": scaled}),
        restarts=RestartOptions(max_restarts=1),
    )
    assert [epoch["mark"] for epoch in model.summary.history] == [4.0, 5.0]
    loss = model.evaluate(frame)["loss"]
    assert loss == pytest.approx(model.summary.history[-1]["loss"], rel=0.5)
    again = TFTransformer.from_run(
        str(tmp_path / "run"), model_fn=model_fn, transforms={"image": scaled}
    )
    assert again.evaluate(frame)["loss"] == loss
    name = "prediction"
    both = [one.transform(frame).orderBy("id").first()[name] for one in (model, again)]
    assert both[0] == both[1]


def test_what_holds_no_value_is_refused_on_the_driver(
    spark: Any, small: Any, tmp_path: Path
) -> None:
    counter = spark.sparkContext.accumulator(0)
    gone = spark.sparkContext.broadcast([1])
    gone.destroy()

    class Counts:
        def transform(self, image: Any, generator: Any) -> Any:
            counter.add(1)
            return image

    def count() -> Any:
        return lambda: counter.add(1)

    def look() -> Any:
        return gone.value

    before = spark.sparkContext.statusTracker().getJobIdsForGroup(None)
    for function, told in ((count, "'counter'.*[Aa]ccumulator"), (look, "'gone'.*destroy")):
        with pytest.raises(InvalidInputError, match=told):
            HorovodRunner(2).run(function)
        with pytest.raises(InvalidInputError, match=f"model_fn.*{told}"):
            train(small, tmp_path / "run", model_fn=function)
    transforms = {"image": Counts().transform}
    with pytest.raises(InvalidInputError, match="transforms.*'counter'"):
        train(small, tmp_path / "run", data=DataOptions(transforms=transforms))
    assert spark.sparkContext.statusTracker().getJobIdsForGroup(None) == before
    assert not (tmp_path / "run").exists()
