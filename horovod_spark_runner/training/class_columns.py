"""Columns made of a model's outputs: as they are, vectors, or Spark's columns of classes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..errors import InvalidInputError

# What an added column holds.
PLAIN, VECTOR, CLASS, PROBABILITY, SCORES = "plain", "vector", "class", "probability", "scores"
# How far probabilities may be from a sum of 1, by the type that they are computed in.
TOLERANCE = {"float16": 2e-2, "bfloat16": 2e-2, "float32": 1e-3, "float64": 1e-3}


@dataclass(frozen=True)
class ClassColumn:
    """A column that is made of an output of classes.

    Attributes:
        name: its name.
        output: place of the output among the model's.
        holds: what is made of it: `CLASS`, `PROBABILITY` or `SCORES`.
        scores: whether the output is scores of classes, and not their probabilities.
    """

    name: str
    output: int
    holds: str
    scores: bool


def check_no_classes(format: str, classes: Sequence[ClassColumn]) -> None:
    """Check that a format which has none is asked for no columns of classes.

    Raises:
        InvalidInputError: it is asked for some.
    """
    if classes:
        names = ", ".join(repr(column.name) for column in classes)
        raise InvalidInputError(
            f"a {format!r} gives a model's outputs as they are, and probability_col and "
            f"raw_prediction_col ask for {names}, which are made of them: clear these two in a "
            "copy of the transformer, or export it as a pipeline, "
            "export_pipeline(PipelineModel([transformer]), path, frame, format='onnx')"
        )
