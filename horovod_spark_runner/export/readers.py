"""Readers of Spark ML's fitted stages. A stage without one is refused by name."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import ModelError
from .columns import VECTOR, kind_of, vector_size
from .onnx_builder import DENSE_SIZE
from .stages import (
    Binarizer,
    Bucketizer,
    Imputer,
    IndexToString,
    Interaction,
    MinMaxScaler,
    Normalizer,
    OneHotEncoder,
    PolynomialExpansion,
    Projection,
    Scaler,
    Stage,
    StringIndexer,
    VectorAssembler,
    VectorSlicer,
)

if TYPE_CHECKING:
    from pyspark.sql import DataFrame
    from pyspark.sql.types import StructField

_NO_NUMBERS = np.zeros(0)


def _string_indexer(fitted: Fitted) -> Stage:
    inputs, outputs = fitted.columns
    there = set(fitted.after.columns)
    labels = tuple(_as_text(one) for one in fitted.stage.labelsArray)
    # Spark passes over columns that are not there, as a label's when it is scored.
    present = [n for n, name in enumerate(outputs) if name in there]
    for number in present:
        fitted.kind(inputs[number])
    return StringIndexer(
        tuple(inputs[n] for n in present),
        tuple(outputs[n] for n in present),
        tuple(labels[n] for n in present),
        fitted.get("handleInvalid"),
    )


def _index_to_string(fitted: Fitted) -> Stage:
    labels = fitted.get("labels")
    if not labels:
        metadata = fitted.field(fitted.input).metadata.get("ml_attr", {})
        labels = metadata.get("vals")
        if not labels:
            raise fitted.refused(
                f"it has no labels, and column {fitted.input!r} does not tell them; set its labels"
            )
    return IndexToString(*fitted.columns, _as_text(labels))


def _one_hot_encoder(fitted: Fitted) -> Stage:
    inputs, outputs = fitted.columns
    sizes = tuple(int(size) for size in fitted.stage.categorySizes)
    keep = (fitted.get("dropLast"), fitted.get("handleInvalid"))
    return OneHotEncoder(inputs, outputs, sizes, *keep)


def _vector_assembler(fitted: Fitted) -> Stage:
    return VectorAssembler(*fitted.columns, fitted.get("handleInvalid"))


def _inverse(values: np.ndarray, zero: float) -> np.ndarray:
    """Return 1 / value, and ``zero`` for 0, as Spark computes it."""
    return np.where(values == 0, zero, 1.0 / np.where(values == 0, 1.0, values))


def _standard_scaler(fitted: Fitted) -> Stage:
    model = fitted.stage
    factors = _inverse(fitted.finite(model.std), 0.0)
    shift = fitted.finite(model.mean)
    return Scaler(
        *fitted.columns,
        len(shift),
        shift if fitted.get("withMean") else _NO_NUMBERS,
        factors if fitted.get("withStd") else _NO_NUMBERS,
    )


def _max_abs_scaler(fitted: Fitted) -> Stage:
    factors = _inverse(fitted.finite(fitted.stage.maxAbs), 1.0)
    return Scaler(*fitted.columns, len(factors), _NO_NUMBERS, factors)


def _robust_scaler(fitted: Fitted) -> Stage:
    factors = _inverse(fitted.finite(fitted.stage.range), 0.0)
    shift = fitted.finite(fitted.stage.median)
    return Scaler(
        *fitted.columns,
        len(shift),
        shift if fitted.get("withCentering") else _NO_NUMBERS,
        factors if fitted.get("withScaling") else _NO_NUMBERS,
    )


def _min_max_scaler(fitted: Fitted) -> Stage:
    lows, highs = fitted.finite(fitted.stage.originalMin), fitted.finite(fitted.stage.originalMax)
    lower, upper = fitted.get("min"), fitted.get("max")
    spread = highs - lows
    factors = np.where(spread != 0, (upper - lower) / np.where(spread != 0, spread, 1.0), 0.0)
    middle = (lower + upper) / 2
    return MinMaxScaler(*fitted.columns, lows, factors, lower, middle)


def _normalizer(fitted: Fitted) -> Stage:
    return Normalizer(*fitted.columns, float(fitted.get("p")))


def _imputer(fitted: Fitted) -> Stage:
    inputs, outputs = fitted.columns
    row = fitted.stage.surrogateDF.first()
    surrogates = tuple(float(row[name]) for name in inputs)
    return Imputer(inputs, outputs, surrogates, float(fitted.get("missingValue")))


def _bucketizer(fitted: Fitted) -> Stage:
    inputs, outputs = fitted.columns
    several = fitted.stage.isSet("inputCols")
    splits = fitted.get("splitsArray") if several else [fitted.get("splits")]
    bounds = tuple(tuple(float(value) for value in one) for one in splits)
    return Bucketizer(inputs, outputs, bounds, fitted.get("handleInvalid"))


def _binarizer(fitted: Fitted) -> Stage:
    inputs, outputs = fitted.columns
    several = fitted.stage.isSet("thresholds")
    thresholds = fitted.get("thresholds") if several else [fitted.get("threshold")] * len(inputs)
    return Binarizer(inputs, outputs, tuple(float(value) for value in thresholds))


def _vector_slicer(fitted: Fitted) -> Stage:
    names = list(fitted.get("names") or ())
    places = [int(place) for place in fitted.get("indices") or ()]
    if names:
        attributes = fitted.attributes(fitted.input) or []
        by_name = {str(one["name"]): int(one["idx"]) for one in attributes if "name" in one}
        missing = [name for name in names if name not in by_name]
        if missing:
            raise fitted.refused(f"column {fitted.input!r} tells no place of {missing}")
        places += [by_name[name] for name in names]
    return VectorSlicer(*fitted.columns, np.array(places, np.int64))


def _elementwise_product(fitted: Fitted) -> Stage:
    factors = fitted.finite(fitted.get("scalingVec"))
    return Scaler(*fitted.columns, len(factors), _NO_NUMBERS, factors)


def _idf(fitted: Fitted) -> Stage:
    factors = fitted.finite(fitted.stage.idf)
    return Scaler(*fitted.columns, len(factors), _NO_NUMBERS, factors)


def _pca(fitted: Fitted) -> Stage:
    return Projection(*fitted.columns, np.array(fitted.stage.pc.toArray(), np.float64))


def _dct(fitted: Fitted) -> Stage:
    size = vector_size(fitted.before, fitted.field(fitted.input))
    if not 0 < size <= DENSE_SIZE:
        raise fitted.refused(f"vectors of {size} elements; up to {DENSE_SIZE} are transformed")
    place = np.arange(size)
    waves = np.cos(np.pi * (2 * place[:, None] + 1) * place / (2 * size)) * math.sqrt(2 / size)
    waves[:, 0] /= math.sqrt(2)
    matrix = waves.T if fitted.get("inverse") else waves
    return Projection(*fitted.columns, np.ascontiguousarray(matrix))


def _polynomial_expansion(fitted: Fitted) -> Stage:
    return PolynomialExpansion(*fitted.columns, int(fitted.get("degree")))


def _interaction(fitted: Fitted) -> Stage:
    inputs, outputs = fitted.columns
    categories = []
    for name in inputs:
        if fitted.kind(name) == VECTOR:
            attributes = fitted.attributes(name)
            if attributes is None:
                raise fitted.refused(
                    f"column {name!r} does not tell the attributes of its elements"
                )
        else:
            attributes = [fitted.field(name).metadata.get("ml_attr", {})]
        counts = tuple(_categories(fitted, name, one) for one in attributes)
        if len(counts) > 1 and any(counts):
            raise fitted.refused(
                f"column {name!r} holds vectors with categories, of which Spark passes over 0 in "
                "rows that it stores without their zeros; give the categories' own columns"
            )
        categories.append(counts)
    return Interaction(inputs, outputs, tuple(categories))


def _categories(fitted: Fitted, name: str, attribute: dict[str, object]) -> int:
    """Return how many categories an element is one of; 0 for a number, as a single one is."""
    if attribute.get("type") != "nominal":
        return 0
    values, count = attribute.get("vals"), attribute.get("num_vals")
    count = len(values) if isinstance(values, list) else count
    if not isinstance(count, int):
        raise fitted.refused(f"column {name!r} does not tell how many categories it has")
    return count if count > 1 else 0


# Spark ML's class, by its name in `pyspark.ml.feature`.
READERS: dict[str, Callable[[Fitted], Stage]] = {
    "Binarizer": _binarizer,
    "Bucketizer": _bucketizer,
    "DCT": _dct,
    "ElementwiseProduct": _elementwise_product,
    "IDFModel": _idf,
    "ImputerModel": _imputer,
    "IndexToString": _index_to_string,
    "Interaction": _interaction,
    "MaxAbsScalerModel": _max_abs_scaler,
    "MinMaxScalerModel": _min_max_scaler,
    "Normalizer": _normalizer,
    "OneHotEncoderModel": _one_hot_encoder,
    "PCAModel": _pca,
    "PolynomialExpansion": _polynomial_expansion,
    "RobustScalerModel": _robust_scaler,
    "StandardScalerModel": _standard_scaler,
    "StringIndexerModel": _string_indexer,
    "VectorAssembler": _vector_assembler,
    "VectorSlicer": _vector_slicer,
}
# Why ONNX cannot hold the others.
WITHOUT = {
    "CountVectorizerModel": "ONNX has no lists of words",
    "FeatureHasher": "ONNX has no Murmur hash",
    "HashingTF": "ONNX has no Murmur hash",
    "NGram": "ONNX has no lists of words",
    "RegexTokenizer": "ONNX has no regular expressions that split text",
    "StopWordsRemover": "ONNX has no lists of words",
    "Tokenizer": "ONNX has no lists of words, and no lower case as Java's",
}


@dataclass(frozen=True)
class Fitted:
    """A fitted stage, and the rows before and after it.

    Attributes:
        stage: the stage.
        before: the DataFrame it was given.
        after: the one it gives.
    """

    stage: Any
    before: DataFrame
    after: DataFrame

    @property
    def name(self) -> str:
        """Name in messages."""
        return f"stage {type(self.stage).__name__} ({self.stage.uid})"

    def get(self, param: str) -> Any:
        """Return a Param's value; ``None`` if it has none."""
        stage = self.stage
        if not stage.hasParam(param) or not stage.isDefined(param):
            return None
        return stage.getOrDefault(param)

    @property
    def columns(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """The input columns and the output columns."""
        inputs, outputs = (
            tuple(self.get(f"{end}Cols"))
            if self.stage.hasParam(f"{end}Cols") and self.stage.isSet(f"{end}Cols")
            else (str(self.get(f"{end}Col")),)
            for end in ("input", "output")
        )
        return inputs, outputs

    @property
    def input(self) -> str:
        """The only input column."""
        return self.columns[0][0]

    def refused(self, reason: str) -> ModelError:
        """Return the error of a stage that cannot be exported, with the reason."""
        return ModelError(f"{self.name} cannot be exported: {reason}")

    def field(self, name: str) -> StructField:
        """Return the schema field of a column before the stage.

        Raises:
            ModelError: it is not there under exactly this name.
        """
        for field in self.before.schema.fields:
            if field.name == name:
                return field
        raise self.refused(
            f"it takes column {name!r}, and there is {sorted(self.before.columns)} (upper and "
            "lower case count)"
        )

    def kind(self, name: str) -> str:
        """Return the kind of a column before the stage; see `Input`.

        Raises:
            ModelError: an ONNX file does not take its type.
        """
        kind = kind_of(self.field(name))
        if kind is None:
            type_name = self.field(name).dataType.simpleString()
            raise self.refused(
                f"column {name!r} is of type {type_name}, which an ONNX file does not take"
            )
        return kind

    def finite(self, values: object) -> np.ndarray:
        """Return fitted numbers as an array.

        Raises:
            ModelError: some are not finite: what Spark does with them depends on how it holds a
                row's zeros.
        """
        array = np.asarray(values.toArray() if hasattr(values, "toArray") else values, np.float64)
        if not np.isfinite(array).all():
            raise self.refused(
                "it was fitted on values that are NaN or infinite, and what Spark makes of zeros "
                "then depends on how it stores the row; impute such values, and fit it again"
            )
        return array

    def attributes(self, name: str) -> list[dict[str, Any]] | None:
        """Return the attributes of a vector's elements, in their order; ``None`` if unknown."""
        groups = self.field(name).metadata.get("ml_attr", {}).get("attrs")
        if groups is None:
            return None
        return sorted(
            ({**one, "type": kind} for kind, group in groups.items() for one in group),
            key=lambda one: int(one["idx"]),
        )


def _as_text(values: Sequence[object]) -> tuple[str, ...]:
    return tuple(str(value) for value in values)
