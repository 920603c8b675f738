"""Predicting with PyTorch modules on Spark's workers gives what they give in one process."""

from __future__ import annotations

import json
import re
import subprocess
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pyspark.ml import PipelineModel
from torch import Tensor, nn

from horovod_spark_runner import (
    DataError,
    InvalidInputError,
    ModelError,
    RunDirectoryError,
    TFTransformer,
    TorchModel,
    TorchTransformer,
)
from horovod_spark_runner.data.manifest import Column
from tests.absent import without

from .models import TwoHeads, digits_model, digits_net
from .runs import save_run

pytestmark = pytest.mark.spark

X, N = Column("x", "float32", (3,)), Column("n", "int32")


class Summing(nn.Module):
    """Computed by hand: the sum of x and n. In training it would drop and normalise."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(3, 1, bias=False)
        nn.init.ones_(self.body.weight)
        self.norm = nn.BatchNorm1d(1, eps=0.0)
        self.drop = nn.Dropout(0.9)

    def forward(self, x: Tensor, n: Tensor) -> Tensor:
        total: Tensor = self.drop(self.norm(self.body(x)))[:, 0] + n
        return total


class Doubling(nn.Module):
    """Changes its input in place; gives a tuple."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        x.mul_(2)
        return x.sum(1), {"whole": x * self.weight, "class": x.argmax(1)}


class Choosing(nn.Module):
    """Python decides by the values, which torch.export cannot hold."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(3, 1)

    def forward(self, x: Tensor) -> Tensor:
        if float(x.sum()) > 1e6:
            x = -x
        made: Tensor = self.body(x)
        return made


def rows(count: int) -> list[tuple[int, list[float], int]]:
    return [(i, [float(i), 1.0, -float(i)], i % 5) for i in range(count)]


@pytest.fixture(scope="module")
def frame(spark: Any) -> Any:
    return spark.createDataFrame(rows(20), "id int, x array<float>, n int").repartition(2).cache()


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> str:
    place = tmp_path_factory.mktemp("run")
    save_run(place, Summing().train(), [X, N])
    return str(place)


def check(predicted: Any, name: str = "prediction", count: int = 20) -> None:
    found = predicted.collect()
    assert len(found) == count
    for row in found:
        assert row[name] == pytest.approx(sum(row.x) + row.n)


@pytest.mark.thorough
def test_uneven_batches_of_several_inputs_and_outputs(
    digits_df: Any, digits: tuple[np.ndarray, np.ndarray], tmp_path: Path
) -> None:
    """In three partitions of one DataFrame, by 100 rows: as the module in one process."""
    images, labels = digits
    module = TwoHeads()
    save_run(tmp_path, module, [Column("image", "float32", (64,)), Column("group", "int32")])
    transformer = TorchTransformer.from_run(tmp_path, trusted=True, predict_batch_size=100)
    assert transformer.output_names == ["number", "kind"]
    by_column = transformer.copy().setFeatureCols({"image": "image", "group": "g"})
    given = digits_df.selectExpr("*", "digit % 7 as g").withColumn("x", digits_df.id * 2)
    with torch.inference_mode():
        group = torch.from_numpy(labels.astype(np.int32) % 7)
        expected = module.eval()(torch.from_numpy(images.astype(np.float32)), group)
    found = by_column.transform(given).collect()
    assert len(found) == len(images)
    for row in found:
        assert row.x == 2 * row.id
        assert row.number == pytest.approx(expected["number"][row.id].item(), abs=1e-5)
        np.testing.assert_allclose(row.kind, expected["kind"][row.id], atol=1e-5)


@pytest.mark.thorough
def test_a_module_that_changes_its_inputs_does_not_change_rows(frame: Any, tmp_path: Path) -> None:
    save_run(tmp_path / "run", Doubling(), [X])
    transformer = TorchTransformer.from_run(tmp_path / "run", trusted=True, predict_batch_size=3)
    assert transformer.output_names == ["output_0", "1_whole", "1_class"]
    frame.write.parquet(str(tmp_path / "rows"))
    scored = transformer.predict_files(tmp_path / "rows", tmp_path / "scored")
    assert scored == 20
    written = frame.sparkSession.read.parquet(str(tmp_path / "scored"))
    for found in (transformer.transform(frame).collect(), written.collect()):
        assert sorted(row.id for row in found) == list(range(20))
        for row in found:
            assert list(row.x) == [row.id, 1.0, -row.id]
            assert row.output_0 == 2.0
            assert list(row["1_whole"]) == [2.0 * row.id, 2.0, -2.0 * row.id]
            assert row["1_class"] == (0 if row.id else 1)


@pytest.mark.thorough
def test_a_stream_is_predicted_on(run: str, frame: Any, spark: Any, tmp_path: Path) -> None:
    frame.write.parquet(str(tmp_path / "rows"))
    stream = spark.readStream.schema(frame.schema).parquet(str(tmp_path / "rows"))
    predicted = TorchTransformer.from_run(run, trusted=True, prediction_col="p").transform(stream)
    writer = predicted.writeStream.format("memory").queryName("predicted_by_torch")
    assert writer.trigger(availableNow=True).start().awaitTermination(120)
    check(spark.table("predicted_by_torch"), "p")


@pytest.mark.thorough
def test_rows_without_values(run: str, frame: Any) -> None:
    from pyspark.sql import functions as F

    holes = frame.withColumn("x", F.when(frame.id % 4 > 0, frame.x))
    with pytest.raises(Exception, match="'x'.*null.*row"):
        TorchTransformer.from_run(run, trusted=True).transform(holes).collect()
    skipping = TorchTransformer.from_run(
        run, trusted=True, handle_invalid="skip", predict_batch_size=4
    )
    check(skipping.transform(holes), count=15)
    keeping = TorchTransformer.from_run(run, trusted=True, handle_invalid="keep").transform(holes)
    assert {row.id for row in keeping.collect() if row.prediction is None} == {0, 4, 8, 12, 16}
    with pytest.raises(DataError, match="column 'n'"):
        TorchTransformer.from_run(run, trusted=True).transform(frame.drop("n"))


def test_classes_and_their_probabilities(
    digits_df: Any, digits: tuple[np.ndarray, np.ndarray], tmp_path: Path
) -> None:
    module = nn.Sequential(digits_net(), nn.Softmax(1))
    save_run(tmp_path, module, [Column("image", "float32", (64,))])
    transformer = TorchTransformer.from_run(tmp_path, trusted=True, probability_col="p")
    row = transformer.transform(digits_df.filter("id = 17")).first()
    with torch.inference_mode():
        expected = module(torch.from_numpy(digits[0][17:18].astype(np.float32)))[0]
    np.testing.assert_allclose(row.p.toArray(), expected, atol=1e-6)
    assert row.prediction == float(expected.argmax())


@pytest.mark.mpi
def test_users_of_pytorch_only_do_not_need_tensorflow(
    spark: Any, run: str, python: str, tmp_path: Path
) -> None:
    """Which is nowhere: on the driver, in Spark's workers, on the ranks."""
    pipeline = PipelineModel([TorchTransformer.from_run(run, trusted=True, prediction_col="p")])
    pipeline.write().save(str(tmp_path / "saved"))
    places = [str(tmp_path / name) for name in ("saved", "again", "run")]
    told = subprocess.run(
        [python, "-m", "tests.torch.load_stage", *places],
        capture_output=True,
        text=True,
        check=False,
        env=without("tensorflow", "tensorflow-cpu", "keras"),
    )
    assert told.returncode == 0, told.stderr[-3000:]
    found = json.loads(told.stdout.splitlines()[-1])
    assert found == {
        "predicted": [10.0, 10.0],
        "before": [],
        "driver": [],
        "in worker": False,
        "loss": 1.0,
        "trained": ["loss"],
        "its prediction": True,
    }


@pytest.mark.thorough
def test_a_module_that_needs_its_function(
    frame: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    module = Choosing()
    save_run(tmp_path / "run", module, [X])
    with pytest.raises(RunDirectoryError, match=r"(?s)program.*from_run\(run_dir, model"):
        TorchTransformer.from_run(tmp_path / "run")
    with pytest.raises(RunDirectoryError, match="TorchTransformer"):
        TFTransformer.from_run(tmp_path / "run")
    given = TorchTransformer.from_run(tmp_path / "run", model_fn=Choosing)
    expected = {i: module(torch.tensor([x])).item() for i, x, _ in rows(20)}

    def check_all(transformer: TorchTransformer) -> None:
        for row in transformer.transform(frame).collect():
            assert row.prediction == pytest.approx(expected[row.id], abs=1e-5)

    check_all(given)
    given.save(str(tmp_path / "stage"))
    assert "TorchTransformer.read().modelFn(" in caplog.text
    with pytest.raises(RunDirectoryError, match=r"TorchTransformer\.loading\("):
        TorchTransformer.load(str(tmp_path / "stage"))
    with TorchTransformer.loading(model_fn=Choosing):
        check_all(TorchTransformer.load(str(tmp_path / "stage")))
    other = TorchTransformer.from_run(tmp_path / "run", model_fn=lambda: nn.Linear(3, 1))
    with pytest.raises(ModelError, match="Linear.*'body.weight'"):
        other.transform(frame)


@pytest.mark.thorough
def test_modules_that_were_trained_elsewhere(frame: Any, tmp_path: Path) -> None:
    module = Summing()
    example = (torch.zeros(2, 3), np.zeros(2, np.int32))
    made = TorchTransformer.from_module(module, example=example)
    check(made.transform(frame))
    assert isinstance(made.getModel(), Summing)
    assert not made.hasSummary
    named = TorchTransformer.from_module(
        module, {"n": "m", "x": "v"}, example={"x": example[0], "n": example[1]}
    )
    other = frame.withColumnsRenamed({"x": "v", "n": "m"})
    check(named.transform(other).withColumnsRenamed({"v": "x", "m": "n"}))
    made.save(str(tmp_path / "stage"))
    loaded = TorchTransformer.read().modelFn(Summing).load(str(tmp_path / "stage"))
    check(loaded.transform(frame))
    refused: list[tuple[Any, Any, str]] = [
        (Summing, example, "from_module.*torch.nn.Module"),
        (module, example[0], "'n'|n.*feature_cols|x, n"),
        (module, (torch.zeros(2, 7), example[1]), "Summing.*'x'.*float32"),
        (module, (torch.zeros(()), example[1]), "example"),
    ]
    for given, rows_given, message in refused:
        with pytest.raises(ModelError, match=message):
            TorchTransformer.from_module(given, example=rows_given)


@pytest.mark.thorough
def test_files_that_others_have_written(frame: Any, tmp_path: Path) -> None:
    module, batch = Summing().eval(), torch.export.Dim.DYNAMIC
    example = (torch.zeros(2, 3), torch.zeros(2, dtype=torch.int32))
    place = tmp_path / "summing.pt2"
    for kwargs in ({}, {"n": example[1]}):
        program = torch.export.export(
            module,
            example[: 2 - len(kwargs)],
            kwargs,
            dynamic_shapes={"x": {0: batch}, "n": {0: batch}},
        )
        torch.export.save(program, place)
        read = TorchTransformer.from_exported(place, trusted=True)
        check(read.transform(frame))
    read.save(str(tmp_path / "stage"))
    with pytest.raises(RunDirectoryError, match=r"code.*give trusted=True"):
        TorchTransformer.load(str(tmp_path / "stage"))
    stage = TorchTransformer.read().trusted().load(str(tmp_path / "stage"))
    check(stage.transform(frame))
    with pytest.raises(RunDirectoryError, match="no weights.*trusted=True"):
        TorchTransformer.read().modelFn(Summing).load(str(tmp_path / "stage"))
    fixed = torch.export.export(module, (torch.zeros(6, 3), torch.zeros(6, dtype=torch.int32)))
    torch.export.save(fixed, place)
    check(TorchTransformer.from_exported(place, trusted=True).transform(frame))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.jit.save(torch.jit.script(module), tmp_path / "summing.pt")
    script = TorchTransformer.from_torchscript(tmp_path / "summing.pt", ["x", "n"], example=example)
    check(script.transform(frame))
    with pytest.raises(ModelError, match="torch.export.load cannot read"):
        TorchTransformer.from_exported(tmp_path / "summing.pt", trusted=True)
    module.train()
    for dropped, said in (
        (0.5, "same"),
        (0.0, "rows"),
    ):
        module.drop.p, module.norm.eps = dropped, 1e-5
        program = torch.export.export(module, example, dynamic_shapes=({0: batch}, {0: batch}))
        torch.export.save(program, place)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            traced = torch.jit.trace(module, example, check_trace=False)  # type: ignore[no-untyped-call]
        torch.jit.save(traced, tmp_path / "traced.pt")
        with pytest.raises(ModelError, match=f"{said}.*eval.*torch.export.export"):
            TorchTransformer.from_exported(place, trusted=True)
        with pytest.raises(ModelError, match=f"{said}.*eval.*torch.jit.script"):
            TorchTransformer.from_torchscript(tmp_path / "traced.pt", example=example)
    with pytest.raises(ModelError, match="exist"):
        TorchTransformer.from_exported(tmp_path / "nothing.pt2", trusted=True)


def test_exports_give_what_the_module_gives(
    digits_df: Any, digits: tuple[np.ndarray, np.ndarray], tmp_path: Path
) -> None:
    images, labels = digits
    columns = [Column("image", "float32", (64,)), Column("group", "int32")]
    module = TwoHeads()
    save_run(tmp_path / "run", module, columns)
    transformer = TorchTransformer.from_run(tmp_path / "run", trusted=True, prediction_col="p")
    transformer.setFeatureCols({"image": "image", "group": "g"})
    image, group = images[:50].astype(np.float32), labels[:50].astype(np.int32) % 7
    with torch.inference_mode():
        expected = module.eval()(torch.from_numpy(image), torch.from_numpy(group))
    transformer.export(tmp_path / "model.pt2")
    program = torch.export.load(tmp_path / "model.pt2").module()
    found = program(image=torch.from_numpy(image), g=torch.from_numpy(group))
    assert list(found) == ["p_number", "p_kind"]
    for name in ("number", "kind"):
        torch.testing.assert_close(found[f"p_{name}"], expected[name])
    transformer.export(tmp_path / "model.onnx", format="onnx")
    import onnxruntime

    session = onnxruntime.InferenceSession(tmp_path / "model.onnx")
    scored = session.run(["p_number", "p_kind"], {"image": image, "g": group})
    for value, name in zip(scored, ("number", "kind"), strict=True):
        np.testing.assert_allclose(value, expected[name], atol=1e-5)
    given = digits_df.selectExpr("*", "digit % 7 as g").filter("id < 50")
    read = TorchTransformer.from_exported(tmp_path / "model.pt2", trusted=True)
    for row in read.transform(given).collect():
        assert row.p_number == pytest.approx(expected["number"][row.id].item(), abs=1e-5)
    with pytest.raises(RunDirectoryError, match="mode='overwrite'"):
        transformer.export(tmp_path / "model.pt2")
    refused: list[tuple[dict[str, str], type[Exception], str]] = [
        ({"format": "saved_model"}, InvalidInputError, "'torch_export'.*'onnx'"),
        ({"format": "onnx"}, InvalidInputError, "file.*.onnx"),
    ]
    for how, error, message in refused:
        with pytest.raises(error, match=message):
            transformer.export(tmp_path / "other", **how)
    with pytest.raises(ModelError, match="'a b'.*PyTorch"):
        transformer.setFeatureCols({"image": "a b", "group": "g"}).export(tmp_path / "b.pt2")
    save_run(tmp_path / "choosing", Choosing(), [X])
    choosing = TorchTransformer.from_run(tmp_path / "choosing", model_fn=Choosing)
    with pytest.raises(ModelError, match="torch.export.*Choosing"):
        choosing.export(tmp_path / "choosing.pt2")
    assert not (tmp_path / "choosing.pt2").exists()


# -- evaluation ------------------------------------------------------------------------------------


class Drawing(nn.Module):
    """Draws in evaluation mode as well."""

    def forward(self, image: Tensor) -> Tensor:
        return nn.functional.dropout(image[:, :10], 0.5)


def wrong_share(outputs: Tensor, labels: Tensor) -> Tensor:
    return (outputs.argmax(1) != labels).double()


def summed(outputs: Tensor, labels: Tensor) -> tuple[Tensor, int]:
    """The mean of the largest outputs, as a sum and what it is divided by."""
    return outputs.amax(1).double().sum(), len(outputs)


def spread(outputs: Tensor, labels: Tensor) -> Tensor:
    return outputs.amax() - outputs.amin()


def weighted_model() -> TorchModel:
    """A loss that is divided by the weights of the classes, and a metric."""
    loss = nn.CrossEntropyLoss(weight=torch.arange(1.0, 11.0))
    return digits_model(loss=loss)


def ignoring_model() -> TorchModel:
    return digits_model(loss=nn.CrossEntropyLoss(ignore_index=3))


@pytest.mark.thorough
def test_evaluation_equals_one_process(
    digits_df: Any,
    digits: tuple[np.ndarray, np.ndarray],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    images, labels = (torch.from_numpy(np.asarray(one)) for one in digits)
    module = digits_net()
    with torch.inference_mode():
        outputs, kinds = module(images.float()), labels.long()
    label = Column("digit", "int32")
    save_run(tmp_path, module, [Column("image", "float32", (64,))], labels=[label])
    frame = digits_df.withColumn("w", digits_df.id % 3).unionAll(
        digits_df.withColumn("w", digits_df.id).filter("false")
    )
    entropy = nn.functional.cross_entropy
    transformer = TorchTransformer.from_run(
        tmp_path, model_fn=weighted_model, predict_batch_size=100
    )
    right = (outputs.argmax(1) == kinds).double().mean().item()
    found = transformer.evaluate(frame)
    weight = torch.arange(1.0, 11.0)
    assert found == {
        "loss": pytest.approx(entropy(outputs, kinds, weight=weight).item(), rel=1e-6),
        "accuracy": pytest.approx(right),
    }
    plain = TorchTransformer.from_run(tmp_path, model_fn=digits_model, predict_batch_size=64)
    by_rows = torch.arange(len(kinds)) % 3
    each = entropy(outputs, kinds, reduction="none")
    assert plain.evaluate(frame, sample_weight_col="w")["loss"] == pytest.approx(
        (each * by_rows).mean().item(), rel=1e-6
    )
    given = plain.evaluate(frame, ["compiled", wrong_share, summed, "spark:f1"])
    assert given["wrong_share"] == pytest.approx(1 - right)
    assert given["summed"] == pytest.approx(outputs.amax(1).mean().item(), rel=1e-6)
    assert given["loss"] == pytest.approx(each.mean().item(), rel=1e-6)
    assert 0 < given["spark:f1"] < 1
    alone = TorchTransformer.from_run(tmp_path, trusted=True)
    assert alone.evaluate(frame, {"share": wrong_share}) == {"share": pytest.approx(1 - right)}
    # "accuracy" leaves out what the loss does, where code tells the loss.
    ignoring = TorchTransformer.from_run(tmp_path, model_fn=ignoring_model)
    counted = kinds != 3
    expected = (outputs.argmax(1) == kinds)[counted].double().mean().item()
    for asked, value in ((ignoring, expected), (alone, right)):
        assert asked.evaluate(frame, metrics=["accuracy"]) == {"accuracy": pytest.approx(value)}
    refused: list[tuple[TorchTransformer, Any, dict[str, Any], str]] = [
        (alone, None, {}, "module.*trained"),
        (plain, [spread], {}, "'spread'.*mean.*rows"),
        (plain, ["auc"], {}, "'auc'.*accuracy.*mae.*mse"),
        (plain, [3], {}, r"3\b.*metric"),
        (plain, ["compiled", "accuracy"], {}, "metrics.*'accuracy'"),
        (plain, ["mae"], {"sample_weight_col": "w"}, "weigh"),
    ]
    for asked, metrics, how, message in refused:
        with pytest.raises((InvalidInputError, ModelError), match=message):
            asked.evaluate(frame, metrics, **how)
    beside = nn.Sequential(module, nn.Softmax(0))
    given = TorchTransformer.from_module(beside, ["image"], example=torch.zeros(2, 64))
    assert re.search("Sequential.*outputs.*rows", caplog.text)
    with pytest.raises(ModelError, match="'summed'.*Sequential"):
        given.evaluate(frame, [summed], label_cols=["digit"])
    drawn = TorchTransformer.from_module(Drawing(), ["image"], example=torch.rand(2, 64))
    with pytest.raises(ModelError, match="'summed'.*Drawing.*same rows"):
        drawn.evaluate(frame, [summed], label_cols=["digit"])
