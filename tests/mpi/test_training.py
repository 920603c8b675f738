"""run_training as a whole: results, resume, callbacks, inputs, outputs, errors seen by a rank."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from horovod_spark_runner import (
    Allreduce,
    CheckpointError,
    DataError,
    DataOptions,
    InvalidInputError,
    LaunchOptions,
    ModelError,
    MpiOptions,
    RunDirectoryError,
    TFTransformer,
)
from horovod_spark_runner.checkpoint.run_directory import RunDirectory
from horovod_spark_runner.cluster.driver.result import PHASES
from horovod_spark_runner.training.time_breakdown import KINDS
from tests.runs import assert_same_weights
from tests.trainings import digits_model, train

# Seconds for which a busy machine keeps a process from its turn between two words of it.
MOMENTS = 0.2

pytestmark = [pytest.mark.mpi, pytest.mark.spark]


@pytest.fixture(scope="module")
def whole(small: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """An undisturbed run of four epochs."""
    return train(
        small,
        tmp_path_factory.mktemp("whole") / "run é dir",
        epochs=4,
        validation=0.2,
        lr_scaling="linear",
        warmup_epochs=3.0,
    )


def test_a_run_gives_history_placement_timings_and_files(whole: Any) -> None:
    assert len(whole.summary.history) == 4
    assert whole.summary.history[0].keys() == {"loss", "accuracy", "val_loss", "val_accuracy"}
    assert whole.summary.history[-1]["accuracy"] > 0.8 > whole.summary.history[0]["accuracy"]
    assert [rank.rank for rank in whole.summary.placement] == [0, 1]
    timings = whole.summary.timings
    assert timings["samples_per_second"] > 0
    launching = ("attempts", "check", "slots", *PHASES)
    phases = sum(timings[name] for name in ("prepare", "materialize", *launching, "load"))
    assert phases == pytest.approx(timings["total"], rel=0.03)
    training = sum(timings[name] for name in ("build", "epochs", "save"))
    assert training == pytest.approx(timings["function"], rel=0.02, abs=MOMENTS)
    assert sum(timings.get(kind, 0.0) for kind in KINDS) == pytest.approx(training)
    assert {"first_step", "data", "compute", "exchange", "validation"} <= timings.keys()
    assert "step" not in timings
    assert 0 < timings["train"] < timings["epochs"]
    run = Path(whole.summary.run_dir)
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [line.pop("epoch") for line in lines] == [0, 1, 2, 3]
    assert [line.pop("accounting")["ranks"] for line in lines] == [[0, 1]] * 4
    assert lines == whole.summary.history
    assert len(list(run.glob("checkpoints/*"))) == 3
    assert list(run.glob("data/*")) == []  # deleted at the end
    logs = sorted((run / "logs").iterdir())
    assert [log.name for log in logs] == ["rank-00000.log", "rank-00001.log"]
    assert "rank 1 of 2 on" in logs[1].read_text()


def test_every_second_is_accounted_for_on_every_rank(whole: Any) -> None:
    directory = RunDirectory(whole.summary.run_dir)
    (call,) = directory.read_calls()
    seconds, ranks = call["seconds"], call["accounts"]
    assert sum(seconds.values()) == pytest.approx(call["ended"] - call["began"], rel=0.02)
    assert ranks["ranks"] == [0, 1]
    totals = [sum(each[rank] for each in ranks["seconds"].values()) for rank in (0, 1)]
    assert totals == pytest.approx([seconds["function"]] * 2, rel=0.02, abs=MOMENTS)
    # The epochs' own accounts hold all of it but for what follows the last one.
    accounts = directory.read_accounts(4)
    for kind in ("build", "first_step", "data", "compute", "exchange", "validation"):
        for rank in (0, 1):
            parts = [a["seconds"].get(kind, [0, 0])[rank] for a in accounts if a is not None]
            assert len(parts) == 4
            assert sum(parts) == pytest.approx(ranks["seconds"][kind][rank], abs=1e-3)
    assert [rank["host"] for rank in call["placement"]] == [
        rank.host for rank in whole.summary.placement
    ]
    assert {"pyspark", "keras", "horovod"} <= call["versions"].keys()
    page = directory.report.read_text()
    assert "finished" in page
    assert "running" not in page
    assert page.count("<svg") == 7


def test_predictions_are_the_models_own(whole: Any, small: Any) -> None:
    import keras

    rows = whole.transform(small).select("image", "prediction", "id", "digit").collect()
    assert len(rows) == 500
    model = keras.saving.load_model(Path(whole.summary.run_dir, "model", "model.keras"))
    expected = model.predict(np.array([row.image for row in rows]), verbose=0)
    np.testing.assert_allclose([row.prediction for row in rows], expected, atol=1e-5)
    assert model.optimizer.__class__.__module__.startswith("keras.")


def test_predictions_through_pandas_where_spark_has_no_arrow_udf(
    whole: Any, small: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = {row.id: row.prediction for row in whole.transform(small).collect()}
    monkeypatch.delattr("pyspark.sql.functions.arrow_udf")
    rows = whole.transform(small).select("id", "prediction").collect()
    assert len(rows) == 500
    for row in rows:
        np.testing.assert_allclose(row.prediction, ours[row.id], atol=1e-6)


def test_a_finished_run_is_loaded_from_its_directory(whole: Any, small: Any) -> None:
    place = whole.summary.run_dir
    loaded = TFTransformer.from_run(place, prediction_col="p")
    assert loaded.summary.history == whole.summary.history
    # The checkpoint of the last step has the trained model's weights; one before it has others.
    steps = RunDirectory(place).checkpoint_steps()
    last, earlier = (
        TFTransformer.from_run(place, prediction_col="p", checkpoint=step)
        for step in (steps[0], steps[1])
    )
    ours = {row.id: row.prediction for row in whole.transform(small).collect()}
    for transformer in (loaded, last):
        for row in transformer.transform(small).select("id", "p").collect():
            np.testing.assert_allclose(row.p, ours[row.id], atol=1e-6)
    row = earlier.transform(small).select("id", "p").first()
    assert np.abs(np.array(row.p) - ours[row.id]).max() > 1e-5


def test_the_summary_of_a_training_is_saved_with_the_model(whole: Any, tmp_path: Path) -> None:
    whole.save(str(tmp_path / "stage"))
    loaded = TFTransformer.load(str(tmp_path / "stage"))
    assert loaded.summary == whole.summary
    assert [rank.rank for rank in loaded.summary.placement] == [0, 1]
    assert loaded.summary.attempts[-1].ending == "finished"
    assert loaded.summary.timings["samples_per_second"] > 0


@pytest.mark.thorough
def test_a_model_that_cannot_be_written_is_not_lost(small: Any, whole: Any, tmp_path: Path) -> None:
    arguments = {"validation": 0.2, "lr_scaling": "linear", "warmup_epochs": 3.0, "epochs": 4}
    run = tmp_path / "run"
    run.mkdir()
    (run / "model").write_text("in the way")  # as a full disk, it takes no files
    with pytest.raises(CheckpointError, match="training.*model"):
        train(small, run, **arguments)
    (run / "model").unlink()
    assert train(small, run, **arguments).summary.history == whole.summary.history
    assert_same_weights(run, Path(whole.summary.run_dir))


@pytest.mark.thorough
def test_a_resumed_run_equals_an_uninterrupted_one(small: Any, whole: Any, tmp_path: Path) -> None:
    arguments = {"validation": 0.2, "lr_scaling": "linear", "warmup_epochs": 3.0}
    first = train(small, tmp_path / "run", epochs=2, **arguments)
    resumed = train(small, tmp_path / "run", epochs=4, resume="required", **arguments)
    assert first.summary.history == whole.summary.history[:2]
    assert resumed.summary.history == whole.summary.history
    assert_same_weights(tmp_path / "run", Path(whole.summary.run_dir))

    # Once more with the same number of epochs: nothing is left to train but the metrics to write,
    # as where the disk was full after the last checkpoint.
    metrics = tmp_path / "run" / "metrics.jsonl"
    metrics.write_text("".join(metrics.read_text().splitlines(keepends=True)[:-1]))
    again = train(small, tmp_path / "run", epochs=4, **arguments)
    assert again.summary.history == whole.summary.history

    with pytest.raises(RunDirectoryError, match="resume='never'"):
        train(small, tmp_path / "run", epochs=5, resume="never")
    with pytest.raises(RunDirectoryError, match=" data"):
        train(small.filter("id > 3"), tmp_path / "run", epochs=5, **arguments)
    with pytest.raises(RunDirectoryError, match="model .*units.* 8 .*16"):
        train(small, tmp_path / "run", model_fn=lambda: digits_model(8), epochs=5, **arguments)


@pytest.mark.parametrize(
    ("broken", "error", "message"),
    [
        ("shape", ModelError, r"\(63,\).*column 'image'.*\(64,\)"),
        ("uncompiled", ModelError, "compiled"),
        ("horovod", ModelError, "DistributedOptimizer.*plain Keras optimizer"),
        ("predictions", InvalidInputError, r"prediction_col.*outputs"),
    ],
)
def test_what_only_the_model_shows_is_told_on_the_driver(
    small: Any, tmp_path: Path, broken: str, error: type, message: str
) -> None:
    def model_fn() -> Any:
        import keras

        model = keras.Sequential(
            [keras.layers.Input((63 if broken == "shape" else 64,)), keras.layers.Dense(10)]
        )
        optimizer = keras.optimizers.SGD(0.1)
        if broken == "horovod":
            import horovod.tensorflow.keras as hvd

            optimizer = hvd.DistributedOptimizer(optimizer)
        if broken != "uncompiled":
            model.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        return model

    settings = {"prediction_col": ["shape", "colour"]} if broken == "predictions" else {}
    with pytest.raises(error, match=message):
        train(small, tmp_path / "run", model_fn=model_fn, **settings)
    assert (
        len(list(tmp_path.glob("run/data/*"))) == 1
    )  # for the next call, with a model that is right
    assert list(tmp_path.glob("run/checkpoints/*")) == []


def two_headed() -> Any:
    """A model with two inputs and two outputs, all by name."""
    import keras

    pixels = keras.Input((8, 8, 1), name="pixels")
    mean = keras.Input((1,), name="mean")
    hidden = keras.layers.Flatten()(keras.layers.Conv2D(8, 3, activation="relu")(pixels))
    hidden = keras.layers.concatenate([hidden, mean])
    digit = keras.layers.Dense(10, activation="softmax", name="digit_out")(hidden)
    brightness = keras.layers.Dense(1, name="brightness_out")(hidden)
    model = keras.Model([pixels, mean], [digit, brightness])
    model.compile(
        keras.optimizers.Adam(0.01),
        loss={"digit_out": "sparse_categorical_crossentropy", "brightness_out": "mse"},
        metrics={"digit_out": ["accuracy"]},
    )
    return model


@pytest.mark.thorough
def test_several_inputs_and_outputs_by_name(
    small: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from pyspark.sql import functions as F

    frame = small.withColumn(
        "m", F.aggregate("image", F.lit(0.0), lambda a, x: a + x.cast("double")) / 64
    ).withColumn("w", F.lit(2.0))
    transformer = train(
        frame,
        tmp_path / "run",
        model_fn=two_headed,
        feature_cols={"mean": "m", "pixels": "image"},
        label_cols={"brightness_out": "w", "digit_out": "digit"},
        data=DataOptions(shapes={"image": (8, 8, 1)}),
        launch=LaunchOptions(mpi=MpiOptions(algorithm="ring")),
        sync=Allreduce(compression="fp16"),
        epochs=3,
    )
    assert "digit_out_accuracy" in transformer.summary.history[-1]
    assert transformer.summary.history[-1]["loss"] < transformer.summary.history[0]["loss"]
    row = transformer.transform(frame).first()
    assert len(row.digit_out) == 10
    assert isinstance(row.brightness_out, float)
    assert "m" in row
    monkeypatch.delattr("pyspark.sql.functions.arrow_udf")
    through_pandas = transformer.transform(frame).first()
    np.testing.assert_allclose(through_pandas.digit_out, row.digit_out, atol=1e-6)
    assert through_pandas.brightness_out == pytest.approx(row.brightness_out, abs=1e-6)


@pytest.mark.thorough
def test_early_stopping_and_weights(small: Any, tmp_path: Path) -> None:
    def callbacks() -> list[Any]:
        import keras

        return [keras.callbacks.EarlyStopping(monitor="loss", patience=0, min_delta=1e9)]

    frame = small.selectExpr("*", "cast(digit < 5 as double) as weight")
    transformer = train(
        frame, tmp_path / "run", epochs=9, callbacks=callbacks, sample_weight_col="weight"
    )
    assert len(transformer.summary.history) == 2  # stopped on all ranks after the second
    # Digits from 5 on weighed nothing: the model never predicts them.
    rows = transformer.transform(frame).collect()
    assert np.mean([np.argmax(row.prediction) < 5 for row in rows]) > 0.95


def test_files_of_callbacks_are_written_by_one_rank(small: Any, tmp_path: Path) -> None:
    import csv

    folder = str(tmp_path)

    def callbacks() -> list[Any]:
        import horovod.tensorflow as hvd
        import keras

        Path(folder, f"ran-on-{hvd.rank()}").touch()
        return [
            # Lines of a second rank would be in it, too: what is appended overwrites nothing.
            keras.callbacks.CSVLogger(f"{folder}/log.csv", append=True),
            keras.callbacks.CSVLogger(f"{folder}/of-rank-{hvd.rank()}.csv"),
            keras.callbacks.ModelCheckpoint(f"{folder}/of-rank-{hvd.rank()}.keras"),
        ]

    def logged() -> list[dict[str, float]]:
        with Path(folder, "log.csv").open() as file:
            return [{k: float(v) for k, v in line.items()} for line in csv.DictReader(file)]

    transformer = train(small, tmp_path / "run", epochs=2, validation=0.2, callbacks=callbacks)
    expected = [{"epoch": n, **logs} for n, logs in enumerate(transformer.summary.history)]
    assert logged() == expected
    names = {path.name for path in tmp_path.iterdir()} - {"run"}
    assert names == {"ran-on-0", "ran-on-1", "log.csv", "of-rank-0.csv", "of-rank-0.keras"}
    assert Path(folder, "of-rank-0.csv").read_text() == Path(folder, "log.csv").read_text()
    # A resumed run continues its files.
    longer = train(small, tmp_path / "run", epochs=3, validation=0.2, callbacks=callbacks)
    assert logged() == [*expected, {"epoch": 2, **longer.summary.history[2]}]
    assert Path(folder, "of-rank-0.csv").read_text() == Path(folder, "log.csv").read_text()


@pytest.mark.thorough
def test_a_model_file_is_trained_further(small: Any, tmp_path: Path) -> None:
    import keras

    start = digits_model(rate=0.0)  # which leaves the weights that are trained as they are
    start.save(tmp_path / "start.keras")
    (tmp_path / "start.json").write_text(digits_model().to_json())
    train(small, tmp_path / "keras", model_fn=str(tmp_path / "start.keras"), epochs=1)
    ended = keras.saving.load_model(tmp_path / "keras" / "model" / "model.keras")
    assert len(start.trainable_variables) == 6
    for ours, theirs in zip(ended.trainable_variables, start.trainable_variables, strict=True):
        np.testing.assert_array_equal(ours, theirs)
    # A description has no weights to begin with.
    described = train(small, tmp_path / "json", model_fn=str(tmp_path / "start.json"), epochs=2)
    assert described.summary.history[1]["loss"] < described.summary.history[0]["loss"] * 0.8
    assert len(described.transform(small).first().prediction) == 10


@pytest.mark.thorough
def test_an_error_in_the_training_names_rank_and_keeps_checkpoints(
    small: Any, tmp_path: Path
) -> None:
    from horovod_spark_runner import RankFailedError

    def callbacks() -> list[Any]:
        import keras

        class Bomb(keras.callbacks.Callback):
            def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
                if epoch == 2:  # the first checkpoint is whole when the second one begins
                    raise ValueError("boom in epoch 2")

        return [Bomb()]

    with pytest.raises(RankFailedError, match="ValueError: boom in epoch 2"):
        train(small, tmp_path / "run", callbacks=callbacks, epochs=3)
    report = tmp_path / "run" / "report.html"
    assert "boom in epoch 2" in report.read_text()
    resumed = train(small, tmp_path / "run", resume="required", epochs=3)
    assert len(resumed.summary.history) == 3
    assert resumed.summary.attempts[-1].first_step > 0
    assert ">attempts<" in report.read_text()
    calls = RunDirectory(str(tmp_path / "run")).read_calls()
    assert [call["ending"] for call in calls] == ["RankFailedError", "finished"]


def brighten(image: np.ndarray, generator: np.random.Generator | None) -> np.ndarray:
    """Vary training images; scale all of them to 0…1."""
    shift = 0 if generator is None else generator.uniform(-0.05, 0.05)
    return (image / 255.0 + shift).astype(np.float32)


def small_convnet() -> Any:
    import keras

    layers = [
        keras.layers.Input((8, 8, 1)),
        keras.layers.Flatten(),
        keras.layers.Dense(32, activation="relu"),
        keras.layers.Dense(10, activation="softmax"),
    ]
    model = keras.Sequential(layers)
    model.compile(
        keras.optimizers.Adam(0.01), "sparse_categorical_crossentropy", metrics=["accuracy"]
    )
    return model


@pytest.mark.thorough
def test_png_files_are_trained_on_from_parquet_and_predicted(
    spark: Any, digits: Any, tmp_path: Path
) -> None:
    import io

    from PIL import Image

    rows = []
    for image, digit in zip(digits[0][:600], digits[1][:600], strict=True):
        buffer = io.BytesIO()
        Image.fromarray((image.reshape(8, 8) * 255).astype(np.uint8)).save(buffer, "PNG")
        rows.append((buffer.getvalue(), int(digit)))
    folder = str(tmp_path / "a b'c é#")
    spark.createDataFrame(rows, "png binary, digit int").repartition(3).write.parquet(folder)
    transforms = {"png": brighten}
    trained = train(
        folder,
        tmp_path / "run",
        model_fn=small_convnet,
        feature_cols=["png"],
        data=DataOptions(
            shapes={"png": (8, 8, 1)}, dtypes={"png": "float32"}, transforms=transforms
        ),
        validation=spark.read.parquet(folder),
        epochs=4,
    )
    assert trained.summary.history[-1]["accuracy"] > 0.85
    assert not list(tmp_path.glob("run/data/data-*"))  # the files were read as they are
    frame = spark.read.parquet(folder)
    # Rows of validation are not varied.
    validated = trained.summary.history[-1]["val_loss"]
    assert trained.evaluate(frame)["loss"] == pytest.approx(validated, rel=1e-4)
    predicted = trained.transform(frame).collect()
    assert np.mean([np.argmax(row.prediction) == row.digit for row in predicted]) > 0.85
    loaded = TFTransformer.from_run(str(tmp_path / "run"), transforms=transforms)
    # The one row is alone in its batch, whose sums some processors add up in another order.
    again = loaded.transform(frame).first().prediction
    np.testing.assert_allclose(again, predicted[0].prediction, rtol=1e-5)
    with pytest.raises(DataError, match="transforms.*'png'"):
        TFTransformer.from_run(str(tmp_path / "run"))
    with pytest.raises(DataError, match="'png'.*scalar"):
        loaded.transform(frame.withColumn("png", frame.digit))


@pytest.mark.thorough
def test_a_failed_run_and_later_runs_use_the_same_data(small: Any, tmp_path: Path) -> None:
    from horovod_spark_runner import RankFailedError

    def callbacks() -> list[Any]:
        raise ValueError("boom")

    with pytest.raises(RankFailedError, match="boom"):
        train(small, tmp_path / "run", callbacks=callbacks, validation=0.2)
    kept = {path.name for path in tmp_path.glob("run/data/data-*")}
    assert len(kept) == 2
    cache = tmp_path / "cache"
    for number in range(2):
        train(
            small,
            tmp_path / f"run{number}",
            epochs=1,
            data=DataOptions(data_dir=str(cache)),
            validation=0.2,
        )
        found = {path.name for path in cache.glob("data-*")}
        assert len(found) == 2
        kept = found if number == 0 else kept
    assert kept == found
