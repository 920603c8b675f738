"""Fitted stages of Spark ML as stages of a scorer. A stage that is not here is refused by name."""

from __future__ import annotations

import math
import re
from collections.abc import Callable

import numpy as np

from ..scoring.columns import DENSE_SIZE, VECTOR, Stage
from ..scoring.text import (
    CountVectorizer,
    FeatureHasher,
    HashingTF,
    NGram,
    RegexTokenizer,
    StopWordsRemover,
    Tokenizer,
    place_of,
)
from ..scoring.values import (
    Binarizer,
    Bucketizer,
    Imputer,
    IndexToString,
    OneHotEncoder,
    StringIndexer,
)
from ..scoring.vectors import (
    Interaction,
    MinMaxScaler,
    Normalizer,
    PolynomialExpansion,
    Projection,
    Scaler,
    VectorAssembler,
    VectorSlicer,
)
from .fitted import Fitted, as_text, vector_size

_NO_NUMBERS = np.zeros(0)
# Regular expressions that Java and Python read alike: classes and plain characters, repeated.
_ATOM = (
    r"(?:\\[sSdDwWtnr.\-,;:|/]|[A-Za-z0-9 ,;:_/!#%&='\"<>@~-]"
    r"|\[\^?(?:\\[sdwtnr.\-]|[^\\\[\]&^])+\])"
)
_PLAIN_PATTERN = re.compile(rf"(?:{_ATOM}[+*]?)+(?:\|(?:{_ATOM}[+*]?)+)*")
# Languages whose i and j Java gives other lower cases.
_OTHER_CASE = ("az", "lt", "tr")
_PROBES = ("a", "spark", "Ünïcödé", "0123456789", "")


def _string_indexer(fitted: Fitted) -> Stage:
    inputs, outputs = fitted.pairs
    there = set(fitted.after.columns)
    labels = tuple(as_text(one) for one in fitted.stage.labelsArray)
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
    return IndexToString(fitted.input, fitted.output, as_text(labels))


def _one_hot_encoder(fitted: Fitted) -> Stage:
    inputs, outputs = fitted.pairs
    sizes = tuple(int(size) for size in fitted.stage.categorySizes)
    keep = (fitted.get("dropLast"), fitted.get("handleInvalid"))
    return OneHotEncoder(inputs, outputs, sizes, *keep)


def _vector_assembler(fitted: Fitted) -> Stage:
    inputs = tuple(fitted.get("inputCols"))
    return VectorAssembler(inputs, fitted.output, fitted.get("handleInvalid"))


def _inverse(values: np.ndarray, zero: float) -> np.ndarray:
    """Return 1 / value, and ``zero`` for 0, as Spark computes it."""
    return np.where(values == 0, zero, 1.0 / np.where(values == 0, 1.0, values))


def _standard_scaler(fitted: Fitted) -> Stage:
    model = fitted.stage
    factors = _inverse(fitted.finite(model.std), 0.0)
    shift = fitted.finite(model.mean)
    return Scaler(
        fitted.input,
        fitted.output,
        len(shift),
        shift if fitted.get("withMean") else _NO_NUMBERS,
        factors if fitted.get("withStd") else _NO_NUMBERS,
    )


def _max_abs_scaler(fitted: Fitted) -> Stage:
    factors = _inverse(fitted.finite(fitted.stage.maxAbs), 1.0)
    return Scaler(fitted.input, fitted.output, len(factors), _NO_NUMBERS, factors)


def _robust_scaler(fitted: Fitted) -> Stage:
    factors = _inverse(fitted.finite(fitted.stage.range), 0.0)
    shift = fitted.finite(fitted.stage.median)
    return Scaler(
        fitted.input,
        fitted.output,
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
    return MinMaxScaler(fitted.input, fitted.output, lows, factors, lower, middle)


def _normalizer(fitted: Fitted) -> Stage:
    return Normalizer(fitted.input, fitted.output, float(fitted.get("p")))


def _imputer(fitted: Fitted) -> Stage:
    inputs, outputs = fitted.pairs
    row = fitted.stage.surrogateDF.first()
    surrogates = tuple(float(row[name]) for name in inputs)
    return Imputer(inputs, outputs, surrogates, float(fitted.get("missingValue")))


def _bucketizer(fitted: Fitted) -> Stage:
    inputs, outputs = fitted.pairs
    several = fitted.stage.isSet("inputCols")
    splits = fitted.get("splitsArray") if several else [fitted.get("splits")]
    bounds = tuple(tuple(float(value) for value in one) for one in splits)
    return Bucketizer(inputs, outputs, bounds, fitted.get("handleInvalid"))


def _binarizer(fitted: Fitted) -> Stage:
    inputs, outputs = fitted.pairs
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
    return VectorSlicer(fitted.input, fitted.output, np.array(places, np.int64))


def _elementwise_product(fitted: Fitted) -> Stage:
    factors = fitted.finite(fitted.get("scalingVec"))
    return Scaler(fitted.input, fitted.output, len(factors), _NO_NUMBERS, factors)


def _idf(fitted: Fitted) -> Stage:
    factors = fitted.finite(fitted.stage.idf)
    return Scaler(fitted.input, fitted.output, len(factors), _NO_NUMBERS, factors)


def _pca(fitted: Fitted) -> Stage:
    return Projection(fitted.input, fitted.output, np.array(fitted.stage.pc.toArray(), np.float64))


def _dct(fitted: Fitted) -> Stage:
    size = vector_size(fitted.before, fitted.field(fitted.input))
    if not 0 < size <= DENSE_SIZE:
        raise fitted.refused(f"vectors of {size} elements; up to {DENSE_SIZE} are transformed")
    place = np.arange(size)
    waves = np.cos(np.pi * (2 * place[:, None] + 1) * place / (2 * size)) * math.sqrt(2 / size)
    waves[:, 0] /= math.sqrt(2)
    matrix = waves.T if fitted.get("inverse") else waves
    return Projection(fitted.input, fitted.output, np.ascontiguousarray(matrix))


def _polynomial_expansion(fitted: Fitted) -> Stage:
    return PolynomialExpansion(fitted.input, fitted.output, int(fitted.get("degree")))


def _interaction(fitted: Fitted) -> Stage:
    inputs = tuple(fitted.get("inputCols"))
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
    return Interaction(inputs, fitted.output, tuple(categories))


def _categories(fitted: Fitted, name: str, attribute: dict[str, object]) -> int:
    """Return how many categories an element is one of; 0 for a number, as a single one is."""
    if attribute.get("type") != "nominal":
        return 0
    values, count = attribute.get("vals"), attribute.get("num_vals")
    count = len(values) if isinstance(values, list) else count
    if not isinstance(count, int):
        raise fitted.refused(f"column {name!r} does not tell how many categories it has")
    return count if count > 1 else 0


def _tokenizer(fitted: Fitted) -> Stage:
    return Tokenizer(fitted.input, fitted.output)


def _regex_tokenizer(fitted: Fitted) -> Stage:
    pattern = fitted.get("pattern")
    if not _PLAIN_PATTERN.fullmatch(pattern):
        raise fitted.refused(
            f"Java and Python may read its pattern {pattern!r} differently; only classes such as "
            "\\s, \\W and [a-z], and plain characters, with + or *, are taken"
        )
    if re.compile(pattern).fullmatch(""):
        raise fitted.refused(
            f"its pattern {pattern!r} matches the empty string, at which Java and Python split "
            "differently; use + in place of *"
        )
    return RegexTokenizer(
        fitted.input,
        fitted.output,
        pattern,
        fitted.get("gaps"),
        fitted.get("toLowercase"),
        int(fitted.get("minTokenLength")),
    )


def _stop_words_remover(fitted: Fitted) -> Stage:
    inputs, outputs = fitted.pairs
    sensitive, locale = fitted.get("caseSensitive"), str(fitted.get("locale"))
    if not sensitive and locale.partition("_")[0] in _OTHER_CASE:
        raise fitted.refused(
            f"in its locale {locale!r} letters have other lower cases than elsewhere; set another"
        )
    words = as_text(fitted.get("stopWords"))
    stop_words = words if sensitive else tuple(dict.fromkeys(word.lower() for word in words))
    return StopWordsRemover(inputs, outputs, stop_words, sensitive)


def _ngram(fitted: Fitted) -> Stage:
    return NGram(fitted.input, fitted.output, int(fitted.get("n")))


def _hashing_tf(fitted: Fitted) -> Stage:
    size = int(fitted.get("numFeatures"))
    if any(fitted.stage.indexOf(probe) != place_of(probe, size) for probe in _PROBES):
        raise fitted.refused("it hashes as Spark 2 did; make it anew with this Spark")
    return HashingTF(fitted.input, fitted.output, size, fitted.get("binary"))


def _feature_hasher(fitted: Fitted) -> Stage:
    inputs = tuple(fitted.get("inputCols"))
    categorical = [name for name in fitted.get("categoricalCols") or () if name in inputs]
    for name in inputs:
        if fitted.kind(name) in ("float", "double") and name in categorical:
            raise fitted.refused(
                f"its categorical column {name!r} holds real numbers, which it hashes as the text "
                "that Java makes of them; cast the column to a string or whole numbers"
            )
    return FeatureHasher(inputs, fitted.output, int(fitted.get("numFeatures")), tuple(categorical))


def _count_vectorizer(fitted: Fitted) -> Stage:
    return CountVectorizer(
        fitted.input,
        fitted.output,
        as_text(fitted.stage.vocabulary),
        float(fitted.get("minTF")),
        fitted.get("binary"),
    )


# Spark ML's class, by its name in `pyspark.ml.feature`.
READERS: dict[str, Callable[[Fitted], Stage]] = {
    "Binarizer": _binarizer,
    "Bucketizer": _bucketizer,
    "CountVectorizerModel": _count_vectorizer,
    "DCT": _dct,
    "ElementwiseProduct": _elementwise_product,
    "FeatureHasher": _feature_hasher,
    "HashingTF": _hashing_tf,
    "IDFModel": _idf,
    "ImputerModel": _imputer,
    "IndexToString": _index_to_string,
    "Interaction": _interaction,
    "MaxAbsScalerModel": _max_abs_scaler,
    "MinMaxScalerModel": _min_max_scaler,
    "NGram": _ngram,
    "Normalizer": _normalizer,
    "OneHotEncoderModel": _one_hot_encoder,
    "PCAModel": _pca,
    "PolynomialExpansion": _polynomial_expansion,
    "RegexTokenizer": _regex_tokenizer,
    "RobustScalerModel": _robust_scaler,
    "StandardScalerModel": _standard_scaler,
    "StopWordsRemover": _stop_words_remover,
    "StringIndexerModel": _string_indexer,
    "Tokenizer": _tokenizer,
    "VectorAssembler": _vector_assembler,
    "VectorSlicer": _vector_slicer,
}
