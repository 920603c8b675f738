"""Batch normalization over the rows of all ranks, for Keras 3."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf
from horovod.tensorflow.mpi_ops import Average, _allreduce, size


def _average_and_gradient(moments: tf.Tensor) -> tuple[tf.Tensor, Any]:
    # Named without the layer's name, which may have another number on each rank.
    def gradient(upstream: tf.Tensor) -> tf.Tensor:
        return _allreduce(upstream, "moments_gradient", Average, ignore_name_scope=True)

    return _allreduce(moments, "moments", Average, ignore_name_scope=True), gradient


_average = tf.custom_gradient(_average_and_gradient)


class SyncBatchNormalization(keras.layers.BatchNormalization):  # type: ignore[misc]
    """Batch normalization by the moments of all ranks' rows; ranks count alike.

    Args:
        fused: must be false, as Keras 2 had it.
        kwargs: of Keras' ``BatchNormalization``.
    """

    def __init__(self, fused: bool = False, **kwargs: Any) -> None:
        if fused is not False:
            raise ValueError(f"SyncBatchNormalization cannot be fused={fused!r}")
        super().__init__(**kwargs)

    def _moments(self, inputs: Any, mask: Any) -> tuple[Any, Any]:
        if mask is not None:
            raise ValueError(
                f"layer {self.name!r}: SyncBatchNormalization takes no mask, as ranks count alike"
            )
        mean, variance = super()._moments(inputs, mask)
        if size() == 1:
            return mean, variance
        mean, square = tf.unstack(_average(tf.stack([mean, variance + tf.square(mean)])))
        return mean, square - tf.square(mean)
