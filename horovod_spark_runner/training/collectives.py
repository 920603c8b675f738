"""Sums over the ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import horovod.tensorflow as hvd
import tensorflow as tf


def sum_over_ranks(tensors: Sequence[Any], name: str) -> list[Any]:
    """Return each tensor's sum over all ranks; every rank must call it with the same shapes.

    One grouped allreduce per type: Horovod fuses a group, and takes one type in a group only.

    Args:
        tensors: dense tensors or variables.
        name: the same on all ranks, and different for every call within one step.
    """
    groups: dict[Any, list[int]] = {}
    values = [tf.convert_to_tensor(tensor) for tensor in tensors]
    for place, value in enumerate(values):
        groups.setdefault(value.dtype, []).append(place)
    result: list[Any] = [None] * len(values)
    for dtype, places in groups.items():
        summed = hvd.grouped_allreduce(
            [values[place] for place in places],
            op=hvd.Sum,
            name=f"{name}.{dtype.name}",
            ignore_name_scope=True,
        )
        for place, value in zip(places, summed, strict=True):
            result[place] = value
    return result
