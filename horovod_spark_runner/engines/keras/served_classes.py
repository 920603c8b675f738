"""Columns of classes in a SavedModel's graph, of the values that `transform` gives."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from ...training.class_columns import CLASS, PROBABILITY, TOLERANCE, ClassColumn
from ...training.spec import OutputSpec


def class_values(column: ClassColumn, spec: OutputSpec, given: Any) -> Any:
    """Return a column of classes, of doubles as Spark's are.

    What cannot be probabilities or scores of classes is an error of the call.

    Args:
        column: what is made.
        spec: the output it is made of.
        given: what the model gives for it.
    """
    rows = tf.shape(given)[0]
    values = tf.cast(tf.reshape(given, [rows, spec.shape[0] if spec.shape else 1]), tf.float64)
    make = _of_two if values.shape[1] == 1 else _of_several
    classes = make(column, spec, values)
    if column.holds == CLASS:
        return tf.cast(tf.argmax(classes, axis=1), tf.float64)
    return classes


def _of_two(column: ClassColumn, spec: OutputSpec, value: Any) -> Any:
    """Return what an output, which is about class 1, says of both classes."""
    if not column.scores:
        value = _checked(column, spec, value, (value >= 0) & (value <= 1))
        return tf.concat([1.0 - value, value], axis=1)
    value = _checked(column, spec, value, tf.math.logical_not(tf.math.is_nan(value)))
    if column.holds == PROBABILITY:
        share = 1.0 / (1.0 + tf.exp(-value))
        return tf.concat([1.0 - share, share], axis=1)
    return tf.concat([-value, value], axis=1)


def _of_several(column: ClassColumn, spec: OutputSpec, values: Any) -> Any:
    """Return what an output says of each class."""
    if not column.scores:
        tolerance = TOLERANCE[spec.dtype]
        low = tf.reduce_min(values, axis=1) >= -tolerance
        near = tf.abs(tf.reduce_sum(values, axis=1) - 1.0) <= tolerance
        return _checked(column, spec, values, low & near)
    values = _checked(column, spec, values, tf.math.logical_not(tf.math.is_nan(values)))
    if column.holds != PROBABILITY:
        return values
    powers = tf.exp(values - tf.reduce_max(values, axis=1, keepdims=True))
    return powers / tf.reduce_sum(powers, axis=1, keepdims=True)


def _checked(column: ClassColumn, spec: OutputSpec, values: Any, right: Any) -> Any:
    """Return ``values``; the call fails where some are not right."""
    what = "has scores that are no numbers" if column.scores else "is no probabilities"
    told = f"output {spec.name!r} of the model {what}:"
    with tf.control_dependencies([tf.debugging.Assert(tf.reduce_all(right), [told, values])]):
        return tf.identity(values)
