"""Values of integers that cannot be computed with: of labels, and of inputs that are indices."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from ..errors import ModelError


def check_classes(
    prefix: str, values: np.ndarray, classes: int | None, ignored: int | None
) -> None:
    """Check that labels are numbers of classes.

    Args:
        prefix: begins the message: the loss, what it takes, and the column that holds the values.
        values: the labels.
        classes: number of classes; ``None`` if it is not known.
        ignored: a label that does not count.

    Raises:
        ModelError: a label has a fraction, or is out of range.
    """
    if values.dtype.kind == "f":
        wrong = values[values != np.floor(values)]
        if wrong.size:
            raise ModelError(
                f"{prefix} fractions such as {wrong.flat[0]:g}; index the classes "
                "(pyspark.ml.feature.StringIndexer), or use a loss for floats, such as the mean "
                "squared error"
            )
    if classes is None:
        return
    wrong = outside(values, 0, classes - 1)
    wrong = wrong if ignored is None else wrong[wrong != ignored]
    if wrong.size:
        raise ModelError(
            f"{prefix} {wrong[0]:g}, and the output has {classes} classes, 0 to {classes - 1}; "
            "index them from 0 (pyspark.ml.feature.StringIndexer), or give the output as many "
            "numbers as there are classes"
        )


def outside(values: np.ndarray, low: float, high: float) -> np.ndarray:
    """Return the values below or above bounds, one after the other."""
    if not values.size or (values.min() >= low and values.max() <= high):
        return values.reshape(-1)[:0]
    return values[(values < low) | (values > high)]


def explain_index(failed: str, columns: Mapping[str, np.ndarray]) -> ModelError:
    """Return an error of a failed lookup, which names the columns of integers and their ranges.

    Args:
        failed: what the framework says of it.
        columns: the inputs' values, by name.
    """
    ranges = [
        f"{name} {values.min()} to {values.max()}"
        for name, values in columns.items()
        if values.dtype.kind in "iu" and values.size
    ]
    held = f": in this batch, the columns of integers hold {', '.join(ranges)}" if ranges else ""
    return ModelError(
        f"an index is out of range ({failed}){held}; an embedding needs more rows than its largest "
        "id"
    )
