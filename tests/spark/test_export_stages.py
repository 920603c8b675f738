"""Every stage that can be exported gives what Spark's gives, on rows that are meant to be hard."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from horovod_spark_runner import ModelError, export_pipeline
from horovod_spark_runner.export.columns import Input, onnx_inputs
from horovod_spark_runner.export.onnx_model import STATE
from horovod_spark_runner.export.verification import is_same
from horovod_spark_runner.training.onnx import OnnxSession

pytestmark = pytest.mark.spark

Rows = Mapping[str, Sequence[Any]]

ROW = "row number"
NAN, INF = float("nan"), float("inf")
NUMBERS = [0.0, -0.0, 1.0, -1.5, 2.5, 1e300, -1e-300, 0.1, INF, -INF, NAN, None]
TEXTS = ["a", "b", "", " ", "a", "Ä", "b c", "A", "nan", "1", None, "\U0001f600 x"]
FINITE = [
    [0.0, 1.0, -2.0, 0.5],
    [3.0, 1.0, 7.25, 0.5],
    [-1.0, 1.0, 0.0, 0.5],
    [0.1, 1.0, 1e-3, 0.5],
]
VECTORS = [*FINITE, [0.0, 0.0, 0.0, 0.0], [-0.0, 5.0, -0.0, 0.0], [1e300, -1e300, 1e-300, 2.0]]
HOSTILE = [*VECTORS, [NAN, 1.0, 2.0, 0.0], [INF, -INF, 0.0, 1.0], [NAN, NAN, INF, 0.0], None]


class Compared:
    """A fitted pipeline beside its export.

    Args:
        spark: the session.
        place: where to export to.
    """

    def __init__(self, spark: Any, place: Path) -> None:
        self.spark = spark
        self.place = place

    def frame(self, columns: Rows, schema: str) -> Any:
        rows = [tuple(row) for row in zip(*columns.values(), strict=True)]
        return self.of_rows(rows, list(columns), schema)

    def of_rows(self, rows: list[Any], names: list[str], schema: str) -> Any:
        from pyspark.ml.linalg import Vectors, VectorUDT
        from pyspark.sql.types import StructField, StructType, _parse_datatype_string

        fields, made = [], [list(row) for row in rows]
        for number, (name, kind) in enumerate(zip(names, schema.split(), strict=True)):
            if kind == "vector":
                for row in made:
                    row[number] = None if row[number] is None else Vectors.dense(row[number])
            data_type = VectorUDT() if kind == "vector" else _parse_datatype_string(kind)
            fields.append(StructField(name, data_type))
        return self.spark.createDataFrame([tuple(row) for row in made], StructType(fields))

    def apart(self, columns: Rows, schema: str) -> Any:
        """Return the rows, each numbered, and in a partition of its own."""
        from pyspark.sql import functions as F

        rows = list(zip(*columns.values(), strict=True))
        numbered = [(number, *row) for number, row in enumerate(rows)]
        local = self.of_rows(numbered, [ROW, *columns], f"bigint {schema}")
        places = self.spark.range(0, len(rows), 1, len(rows)).withColumnRenamed("id", ROW)
        return places.join(F.broadcast(local), ROW)

    def _each(self, fitted: Any, frame: Any, outputs: Sequence[str], count: int) -> list[Any]:
        """Return what Spark makes of each row alone: no row, one, or ``None`` for an error.

        Where some row fails, each partition is a job of its own: what is slow, planning and
        workers of Python's, is done once, or not at all.
        """
        from py4j.protocol import Py4JJavaError
        from pyspark.errors import PySparkException
        from pyspark.util import _load_from_socket

        def planned() -> Any:
            return fitted.transform(frame).select(ROW, *outputs)

        def alone(number: int) -> Any:
            try:
                run = rows.context._jvm.PythonRDD.runJob
                taken = run(rows.context._jsc.sc(), rows._jrdd, [number])
                with _load_from_socket(taken, rows._jrdd_deserializer) as stream:
                    return list(stream)
            except (PySparkException, Py4JJavaError):
                return None

        try:
            parts: list[Any] = [[] for _ in range(count)]
            for row in planned().collect():
                parts[row[0]].append(row)
        except (PySparkException, Py4JJavaError):  # some row fails: which?
            rows = planned().rdd  # anew: a plan remembers that it has failed
            parts = [alone(number) for number in range(count)]
        return [None if found is None else [row[1:] for row in found] for found in parts]

    def check(
        self,
        stages: Sequence[Any],
        columns: Rows,
        schema: str,
        outputs: Sequence[str],
        fit: Rows | None = None,
        tolerance: float = 0.0,
    ) -> None:
        """Check that Spark and the ONNX file agree on each row.

        Args:
            stages: what the pipeline is made of.
            columns: the hard rows.
            schema: Spark's types of them, and ``vector``.
            outputs: the columns to compare.
            fit: the rows to fit on, where those are others.
            tolerance: how far numbers may be apart; by default they are equal.
        """
        from pyspark.ml import Pipeline

        frame = self.frame(columns, schema)
        fitted = Pipeline(stages=list(stages)).fit(self.frame(fit or columns, schema))
        export_pipeline(fitted, self.place, frame, columns=outputs, mode="overwrite")
        session = OnnxSession(self.place.read_bytes())
        taken = [Input(**one) for one in session.facts["inputs"]]
        made = session(onnx_inputs(taken, columns))
        count = len(next(iter(columns.values())))
        found = self._each(fitted, self.apart(columns, schema), outputs, count)
        assert any(found)
        for number, theirs in enumerate(found):
            state = int(made[STATE][number])
            row = {name: values[number] for name, values in columns.items()}
            if theirs is None:
                assert state > 0, row
                assert "column '" in session.facts["errors"][state - 1]
            assert (theirs == []) == (state == -1), row
            if not theirs:
                continue
            assert state == 0, f"{row}: {session.facts['errors'][state - 1]}"
            for name, value in zip(outputs, theirs[0], strict=True):
                assert is_same(made[name][number], value, tolerance), (row, name)
        none = session(onnx_inputs(taken, {name: [] for name in columns}))
        assert all(len(column) == 0 for column in none.values())


@pytest.fixture
def compared(spark: Any, tmp_path: Path) -> Compared:
    return Compared(spark, tmp_path / "pipeline.onnx")


@pytest.mark.parametrize(
    "handle",
    ["keep", *(pytest.param(name, marks=pytest.mark.thorough) for name in ("error", "skip"))],
)
def test_string_indexer_and_one_hot_encoder(compared: Compared, handle: str) -> None:
    from pyspark.ml.feature import OneHotEncoder, StringIndexer

    count = len(TEXTS)
    columns: dict[str, Sequence[Any]] = {
        "text": TEXTS,
        "whole": [1, 2, 2, -3, 1, 5, None, 0, 2**40, 7, 1, 2],
        "real": NUMBERS[:count],
    }
    fit: dict[str, Sequence[Any]] = {
        "text": ["a", "b", "", "b", "A", "nan"],
        "whole": [1, 2, 2, -3, 1, 5],
        "real": [0.0, 0.1, 1e300, 0.1, -1.5, 2.5],
    }
    orders = {"error": "frequencyDesc", "skip": "alphabetAsc", "keep": "frequencyAsc"}
    outputs = ["t", "w", "r"]
    indexer = StringIndexer(
        inputCols=list(columns),
        outputCols=outputs,
        handleInvalid=handle,
        stringOrderType=orders[handle],
    )
    compared.check([indexer], columns, "string bigint double", outputs, fit)
    if handle == "error":
        return
    # Spark's encoder takes no empty label.
    fit["text"] = ["a", "b", "b c", "b", "A", "nan"]
    encoder = OneHotEncoder(inputCols=outputs, outputCols=["tv", "wv", "rv"])
    compared.check([indexer, encoder], columns, "string bigint double", ["tv", "wv", "rv"], fit)


@pytest.mark.thorough
@pytest.mark.parametrize("drop", [True, False])
@pytest.mark.parametrize("handle", ["error", "keep"])
def test_one_hot_encoder(compared: Compared, handle: str, drop: bool) -> None:
    from pyspark.ml.feature import OneHotEncoder

    places: Rows = {"x": [0.0, 1.0, 2.0, 3.0, -1.0, 1.5, NAN, None], "y": [0.0, 1.0] * 4}
    encoder = OneHotEncoder(
        inputCols=["x", "y"], outputCols=["xv", "yv"], handleInvalid=handle, dropLast=drop
    )
    fit = {"x": [0.0, 1.0, 2.0], "y": [0.0, 1.0, 1.0]}
    compared.check([encoder], places, "double double", ["xv", "yv"], fit)


@pytest.mark.thorough
def test_index_to_string(compared: Compared) -> None:
    from pyspark.ml.feature import IndexToString, StringIndexer

    given = IndexToString(inputCol="x", outputCol="label", labels=["a", "b", ""])
    columns = {"x": [0.0, 1.0, 2.0, 3.0, 1.5, -1.0, -0.5, NAN, None, INF]}
    compared.check([given], columns, "double", ["label"])
    stages = [
        StringIndexer(inputCol="text", outputCol="place"),
        IndexToString(inputCol="place", outputCol="again"),
    ]
    compared.check(stages, {"text": TEXTS}, "string", ["again"], {"text": ["a", "b", "", "Ä"]})


@pytest.mark.thorough
@pytest.mark.parametrize("handle", ["error", "skip", "keep"])
def test_vector_assembler(compared: Compared, handle: str) -> None:
    from pyspark.ml.feature import VectorAssembler, VectorSizeHint

    columns: dict[str, Sequence[Any]] = {
        "real": [*NUMBERS, 1.0, 1.0, 2.0],
        "short": [1, -1, None, 0, 5, 6, 7, 8, 9, 3, 2, 1, 0, 0, 1],
        "flag": [True, False] * 7 + [None],
        "small": [0.1, NAN, 0.1, None, 1e30, 3.0, INF, 0.0, -0.0, 1.0, 2.0, 1.0, 0.0, 0.1, 0.2],
        "vector": [*HOSTILE, *FINITE],
    }
    assembler = VectorAssembler(inputCols=list(columns), outputCol="v", handleInvalid=handle)
    schema = "double smallint boolean float vector"
    if handle == "keep":
        with pytest.raises(Exception, match="VectorSizeHint|first"):
            assembler.transform(compared.frame(columns, schema)).collect()
        frame = compared.frame(columns, schema)
        hint = VectorSizeHint(inputCol="vector", size=4, handleInvalid="optimistic")
        frame = hint.transform(frame)
        export_pipeline(assembler, compared.place, frame)
        session = OnnxSession(compared.place.read_bytes())
        taken = [Input(**one) for one in session.facts["inputs"]]
        made = session(onnx_inputs(taken, columns))["v"]
        rows = assembler.transform(frame).select("v").collect()
        assert all(is_same(one, row["v"], 0.0) for one, row in zip(made, rows, strict=True))
        return
    compared.check([assembler], columns, schema, ["v"])


@pytest.mark.thorough
@pytest.mark.parametrize("with_mean", [True, False])
def test_scalers(compared: Compared, with_mean: bool) -> None:
    from pyspark.ml.feature import MaxAbsScaler, MinMaxScaler, RobustScaler, StandardScaler

    ends = {"inputCol": "v"}
    stages = [
        StandardScaler(outputCol="s", withMean=with_mean, **ends),
        StandardScaler(outputCol="n", withStd=False, withMean=with_mean, **ends),
        MinMaxScaler(outputCol="m", min=-0.3, max=1.7, **ends),
        MaxAbsScaler(outputCol="a", **ends),
        RobustScaler(outputCol="r", withCentering=with_mean, **ends),
        RobustScaler(outputCol="c", withScaling=False, withCentering=with_mean, **ends),
    ]
    outputs = ["s", "n", "m", "a", "r", "c"]
    compared.check(stages, {"v": HOSTILE}, "vector", outputs, {"v": FINITE})


@pytest.mark.thorough
@pytest.mark.parametrize("p", [1.0, 2.0, 3.5, INF])
def test_normalizer(compared: Compared, p: float) -> None:
    from pyspark.ml.feature import Normalizer

    tolerance = 1e-12 if p == 3.5 else 0.0
    stage = Normalizer(inputCol="v", outputCol="n", p=p)
    compared.check([stage], {"v": HOSTILE}, "vector", ["n"], tolerance=tolerance)


@pytest.mark.thorough
@pytest.mark.parametrize("strategy", ["mean", "median", "mode"])
@pytest.mark.parametrize("missing", [NAN, -1.5])
def test_imputer(compared: Compared, strategy: str, missing: float) -> None:
    from pyspark.ml.feature import Imputer

    columns: dict[str, Sequence[Any]] = {
        "x": NUMBERS,
        "y": [0.1, NAN, None, -1.5, *[2.0] * 8],
        "n": [1, 2, None, 7, *[3] * 8],
    }
    fit: dict[str, Sequence[Any]] = {
        "x": [1.0, 2.5, None, 1.0],
        "y": [0.1, 0.7, 0.7, None],
        "n": [1, 2, 2, 7],
    }
    stage = Imputer(
        inputCols=list(columns),
        outputCols=["xi", "yi", "ni"],
        strategy=strategy,
        missingValue=missing,
    )
    compared.check([stage], columns, "double float int", ["xi", "yi", "ni"], fit)


def test_an_imputer_whose_outputs_are_named_as_its_inputs(compared: Compared) -> None:
    from pyspark.ml.feature import Imputer, VectorAssembler

    columns: dict[str, Sequence[Any]] = {"x": [1.0, NAN, 3.0], "y": [NAN, 20.0, 30.0]}
    swapped = Imputer(inputCols=["x", "y"], outputCols=["y", "x"])
    stages = [swapped, VectorAssembler(inputCols=["x", "y"], outputCol="xy")]
    compared.check(stages, columns, "double double", ["xy"])


@pytest.mark.thorough
@pytest.mark.parametrize("handle", ["error", "skip", "keep"])
def test_bucketizer_and_quantile_discretizer(compared: Compared, handle: str) -> None:
    from pyspark.ml.feature import Bucketizer, QuantileDiscretizer

    columns: dict[str, Sequence[Any]] = {
        "x": NUMBERS,
        "n": [1, 2, 3, 4, 5, 6] * 2,
        "z": [0.0, 1.5, -0.0, *[0.5] * 9],  # -0.0 is below 0.0
    }
    stages = [
        Bucketizer(
            inputCols=["x", "n", "z"],
            outputCols=["xb", "nb", "zb"],
            splitsArray=[[-INF, -1.0, 0.0, 0.1, 2.5, INF], [1.0, 3.0, 6.0], [0.0, 1.0, 2.0]],
            handleInvalid=handle,
        ),
        Bucketizer(inputCol="n", outputCol="b", splits=[1.0, 2.0, 5.0], handleInvalid=handle),
        QuantileDiscretizer(inputCol="n", outputCol="q", numBuckets=3, handleInvalid=handle),
    ]
    compared.check(stages[:1], columns, "double int double", ["xb", "nb", "zb"])
    compared.check(stages[1:], {"n": columns["n"]}, "int", ["b", "q"])


@pytest.mark.thorough
def test_binarizer_and_vector_slicer(compared: Compared) -> None:
    from pyspark.ml.feature import Binarizer, VectorAssembler, VectorSlicer

    stages = [
        Binarizer(inputCols=["x"], outputCols=["xb"], thresholds=[0.05]),
        Binarizer(inputCol="x", outputCol="xn", threshold=-1.6),
    ]
    compared.check(stages, {"x": NUMBERS}, "double", ["xb", "xn"])
    stages = [
        Binarizer(inputCol="v", outputCol="high", threshold=0.5),
        Binarizer(inputCol="v", outputCol="low", threshold=-0.5),
        VectorSlicer(inputCol="v", outputCol="slice", indices=[3, 0]),
    ]
    compared.check(stages, {"v": HOSTILE}, "vector", ["high", "low", "slice"])
    stages = [
        VectorAssembler(inputCols=["x", "y"], outputCol="v", handleInvalid="keep"),
        VectorSlicer(inputCol="v", outputCol="named", names=["y"], indices=[0]),
    ]
    columns = {"x": NUMBERS, "y": NUMBERS[::-1]}
    compared.check(stages, columns, "double double", ["named"])


@pytest.mark.thorough
def test_elements_together(compared: Compared) -> None:
    from pyspark.ml.feature import DCT, PCA, ElementwiseProduct, PolynomialExpansion
    from pyspark.ml.linalg import Vectors

    stages = [
        ElementwiseProduct(
            inputCol="v", outputCol="e", scalingVec=Vectors.dense([2.0, 0.0, -1.0, 0.1])
        ),
        PolynomialExpansion(inputCol="v", outputCol="p2", degree=2),
        PolynomialExpansion(inputCol="v", outputCol="p4", degree=4),
    ]
    compared.check(stages, {"v": HOSTILE}, "vector", ["e", "p2", "p4"])
    products = [
        PCA(inputCol="v", outputCol="c", k=2),
        DCT(inputCol="v", outputCol="d"),
        DCT(inputCol="d", outputCol="i", inverse=True),
    ]
    columns = {"v": [*VECTORS[:6], None]}
    compared.check(products, columns, "vector", ["c", "d", "i"], {"v": FINITE}, tolerance=1e-9)


@pytest.mark.thorough
def test_interaction(compared: Compared) -> None:
    from pyspark.ml import Pipeline
    from pyspark.ml.feature import Interaction, StringIndexer, VectorAssembler

    columns: dict[str, Sequence[Any]] = {
        "text": ["a", "b", "c", "a", "b", "c", "a", "b", "a"],
        "x": [1.0, -2.0, 0.0, NAN, INF, 1.0, 2.0, None, 0.5],
        "y": [0.0, 1.0, 2.0, 3.0, 0.0, NAN, -1.0, 1.0, INF],
        "n": [1, 2, 3, 4, 5, 6, 7, 8, 0],
        "same": ["s"] * 9,
    }
    stages = [
        StringIndexer(inputCol="text", outputCol="t"),
        StringIndexer(inputCol="same", outputCol="s"),  # one category is a number to Spark
        VectorAssembler(inputCols=["y", "n"], outputCol="v", handleInvalid="keep"),
        Interaction(inputCols=["t", "x", "v", "n"], outputCol="all"),
        Interaction(inputCols=["x", "n"], outputCol="two"),
        Interaction(inputCols=["s", "n"], outputCol="one"),
    ]
    schema = "string double double int string"
    compared.check(stages, columns, schema, ["all", "two", "one"])
    assembler = VectorAssembler(inputCols=["t", "n"], outputCol="v")
    vector = Interaction(inputCols=["v", "n"], outputCol="o")
    frame = compared.frame(columns, schema)
    fitted = Pipeline(stages=[stages[0], assembler, vector]).fit(frame)
    with pytest.raises(ModelError, match="Interaction.*'v'.*categor"):
        export_pipeline(fitted, compared.place, frame, mode="overwrite")


def test_what_cannot_be_exported_is_refused_before_anything_is_written(
    compared: Compared, spark: Any
) -> None:
    from pyspark.ml import Pipeline, feature
    from pyspark.ml.linalg import Vectors

    frame = compared.frame({"v": VECTORS, "x": [1.0] * 7, "t": ["a"] * 7}, "vector double string")
    infinite = Vectors.dense([INF, 1.0, 1.0, 1.0])
    refused = [
        (feature.SQLTransformer(statement="SELECT *, 1 AS one FROM __THIS__"), "SQLTransformer"),
        (feature.VectorSizeHint(inputCol="v", size=4), "VectorSizeHint"),
        (feature.ElementwiseProduct(inputCol="v", outputCol="e", scalingVec=infinite), "NaN.*inf"),
        (feature.StringIndexer(inputCol="T", outputCol="i"), "'T'.*case"),
        (feature.FeatureHasher(inputCols=["x"], outputCol="f"), "FeatureHasher.*Hashing"),
    ]
    text = r"layers inside the network, such as keras\.layers\.TextVectorization.*SavedModel"
    words = feature.Tokenizer(inputCol="t", outputCol="w")
    ends = {"inputCol": "w", "outputCol": "o"}
    refused += [
        (words, f"Tokenizer.*{text}"),
        (feature.RegexTokenizer(inputCol="t", outputCol="w"), f"RegexTokenizer.*{text}"),
    ]
    fitted = [(Pipeline(stages=[stage]).fit(frame), told) for stage, told in refused]
    listed = words.transform(frame)
    fitted += [
        (stage.fit(listed) if hasattr(stage, "fit") else stage, f"{type(stage).__name__}.*{text}")
        for stage in (
            feature.CountVectorizer(**ends),
            feature.HashingTF(**ends),
            feature.NGram(**ends),
            feature.StopWordsRemover(**ends),
        )
    ]
    for one, told in fitted:
        with pytest.raises(ModelError, match=told):
            export_pipeline(one, compared.place, listed)
        assert not compared.place.exists()
