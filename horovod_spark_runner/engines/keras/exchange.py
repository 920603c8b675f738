"""Sums and means of tensors over the ranks, by Horovod, within steps that may be traced.

Spark's Python workers, which have no Horovod, load this module; so it is imported at use.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from ...sync import allreduce
from ...sync.synchroniser import Compression, Traffic

# Types that MPI has no sum for; they are added up as float32.
_NARROW = (tf.bfloat16,)
_CONDITIONAL_GRAPHS = ("CondBranchFuncGraph", "WhileBodyFuncGraph", "WhileCondFuncGraph")
_VARIABLE_NAME = "horovod_spark_runner"


def world_size() -> int:
    """Return the number of ranks."""
    return int(_horovod().size())


def world_rank() -> int:
    """Return this rank's number."""
    return int(_horovod().rank())


def _horovod() -> Any:
    import horovod.tensorflow as hvd

    return hvd


class Part:
    """This rank's part of a global batch.

    Args:
        size: number of ranks.
        fraction: scalar tensor: its rows over those of the global batch; ``None`` where all ranks
            have equally many.
        replayed: sums over ranks by the names of the collectives, in place of sending anything;
            those that are not there are added, as what this rank alone gives.
    """

    def __init__(
        self,
        size: int,
        fraction: tf.Tensor | None = None,
        replayed: dict[str, list[tf.Tensor]] | None = None,
    ) -> None:
        self.size = size
        self._fraction = fraction
        self._replayed = replayed

    @property
    def equal(self) -> bool:
        """True if all ranks have the same number of rows."""
        return self._fraction is None

    def fraction(self, dtype: tf.DType) -> tf.Tensor:
        """Return the fraction as a tensor of ``dtype``."""
        if self._fraction is None:
            return tf.constant(1.0 / self.size, dtype)
        return tf.cast(self._fraction, dtype)

    def term(self, tensor: tf.Tensor) -> tf.Tensor:
        """Return this rank's term of a mean over the rows of all ranks (`total` ends it)."""
        if self._fraction is None:
            return tensor
        # 0 · NaN is 0 here: a rank without rows does not count, whatever its filler row gives.
        return tf.math.multiply_no_nan(tensor, tf.cast(self._fraction, tensor.dtype))

    def total(self, summed: tf.Tensor) -> tf.Tensor:
        """Return the mean, given the sum of all ranks' terms."""
        return summed / tf.cast(self.size, summed.dtype) if self._fraction is None else summed

    def present(self, dtype: tf.DType) -> tf.Tensor:
        """Return 1 if this rank has rows, else 0."""
        if self._fraction is None:
            return tf.constant(1.0, dtype)
        return tf.cast(self._fraction > 0, dtype)

    def sum(self, tensors: Sequence[tf.Tensor], name: str) -> list[tf.Tensor]:
        """Return each tensor's sum over all ranks; see `sum_over_ranks`."""
        if self._replayed is None:
            return sum_over_ranks(tensors, name)
        return self._replayed.setdefault(name, [*map(tf.convert_to_tensor, tensors)])


def sum_over_ranks(tensors: Sequence[tf.Tensor], name: str) -> list[tf.Tensor]:
    """Return each tensor's sum over all ranks; every rank must call it with the same shapes.

    Horovod fuses a group, and takes one type in a group only. In a compiled step, where it pays, a
    group leaves as soon as its tensors are there, while others are still computed. One is on its
    way at a time, so that sums are made in the same order whenever a step is repeated.

    Args:
        tensors: dense tensors or variables, in the order in which a forward pass uses what they
            are for.
        name: the same on all ranks, and different for every call within one step.
    """
    values = [tf.convert_to_tensor(tensor) for tensor in tensors]
    if world_size() == 1:
        return values
    hvd = _horovod()
    result: list[tf.Tensor] = [None] * len(values)
    before: list[tf.Tensor] = []
    for group, indices in _groups(values).items():
        dtype = _summed_as(values[indices[0]])
        parts = [tf.cast(values[index], dtype) for index in indices]
        with tf.control_dependencies(before):
            before = hvd.grouped_allreduce(
                parts, op=hvd.Sum, name=f"{name}.{group}", ignore_name_scope=True
            )
        for index, value in zip(indices, before, strict=True):
            result[index] = tf.cast(value, values[index].dtype)
    return result


def _groups(values: Sequence[tf.Tensor]) -> dict[str, list[int]]:
    """Return the numbers of the tensors that are added up together, by a name for each group."""
    by_type: dict[tf.DType, list[int]] = {}
    for index, value in enumerate(values):
        by_type.setdefault(_summed_as(value), []).append(index)
    groups = {}
    for dtype, indices in by_type.items():
        least = allreduce.BUCKET_BYTES if _may_leave_early() else sys.maxsize
        # Of shapes that only the step knows are counts and the like, which are small.
        sizes = [(values[index].shape.num_elements() or 0) * dtype.size for index in indices]
        for number, bucket in enumerate(allreduce.in_buckets(sizes, least)):
            name = f"{dtype.name}.{number}" if number else dtype.name
            groups[name] = [indices[one] for one in sorted(bucket)]
    return groups


def _may_leave_early() -> bool:
    """Return whether sending tensors early pays while others are computed.

    Not where all are there, nor where the ranks of one host compute and add up on the same cores:
    there is nothing to wait for meanwhile (benchmarks/overlap.py).
    """
    if tf.executing_eagerly():
        return False
    return _horovod().local_size() < world_size() or bool(tf.config.list_logical_devices("GPU"))


def differentiable_sum(tensor: tf.Tensor, part: Part, name: str) -> tf.Tensor:
    """Return the differentiable sum over all ranks that have rows, for use inside a loss.

    The gradients of all ranks are averaged by `Part` afterwards; so the one that comes back to a
    rank is the sum of all ranks' by their fractions, over the rank's own.
    """

    def summed(value: tf.Tensor) -> tuple[tf.Tensor, Callable[[tf.Tensor], tf.Tensor]]:
        present = part.present(value.dtype)

        def gradient(upstream: tf.Tensor) -> tf.Tensor:
            fraction = part.fraction(upstream.dtype)
            (total,) = part.sum([upstream * fraction], f"{name}.gradient")
            return tf.math.divide_no_nan(total, fraction) * part.present(upstream.dtype)

        return part.sum([value * present], name)[0], gradient

    return tf.custom_gradient(summed)(tensor)


class TensorCollectives:
    """Sums of tensors, as `horovod_spark_runner.sync` needs them."""

    def __init__(self) -> None:
        # A variable: only compiled steps know how often they have run.
        with tf.device("CPU"):
            self._counted = runner_variable([0.0, 0.0], tf.float64)

    @property
    def size(self) -> int:
        """The number of ranks."""
        return world_size()

    def sum(self, tensors: Sequence[tf.Tensor], name: str) -> list[tf.Tensor]:
        """Return `sum_over_ranks`."""
        return sum_over_ranks(tensors, name)

    def compression(self, name: str) -> Compression:
        """Return Horovod's own compression of that name."""
        algorithm: Compression = getattr(_horovod().Compression, name)
        return algorithm

    def on_host(
        self,
        function: Callable[[Sequence[np.ndarray]], list[np.ndarray]],
        tensors: Sequence[tf.Tensor],
    ) -> list[tf.Tensor]:
        """Apply a function of arrays to tensors, on the host and in each step."""
        widened = [_wide(tensor) for tensor in tensors]
        kinds = [tensor.dtype for tensor in widened]

        def called(*arrays: np.ndarray) -> list[np.ndarray]:
            made = function(arrays)
            return [m.astype(a.dtype, copy=False) for m, a in zip(made, arrays, strict=True)]

        # Stateful: called in every step, and several in the order of the step.
        made = tf.numpy_function(called, widened, kinds, stateful=True)
        result = []
        for tensor, output in zip(tensors, made, strict=True):
            output.set_shape(tensor.shape)
            result.append(tf.cast(output, tensor.dtype))
        return result

    def nbytes(self, tensors: Sequence[tf.Tensor]) -> int:
        """Return how many bytes of tensors are added up."""
        return sum(tensor.shape.num_elements() * _summed_as(tensor).size for tensor in tensors)

    def count(self, sent: float, whole: float) -> None:
        """Count the bytes sent each time a step reaches this point."""
        self._counted.assign_add([sent, whole])

    def counted(self) -> Traffic:
        """Return the counted bytes, summed over all steps so far."""
        return Traffic(*self._counted.numpy().tolist())


def _summed_as(tensor: tf.Tensor) -> tf.DType:
    return tf.float32 if tensor.dtype in _NARROW else tensor.dtype


def _wide(tensor: tf.Tensor) -> tf.Tensor:
    """Return a tensor of single precision at least."""
    dense = tf.convert_to_tensor(tensor)
    return tf.cast(dense, tf.float32) if dense.dtype.size < 4 else dense


def runner_variable(value: object, dtype: tf.DType | None = None) -> tf.Variable:
    """Return a variable of ours, which steps use besides the model's."""
    return tf.Variable(value, trainable=False, dtype=dtype, name=_VARIABLE_NAME)


def is_runner_variable(variable: tf.Variable) -> bool:
    """Return whether `runner_variable` created the variable."""
    return bool(variable.name.partition(":")[0] == _VARIABLE_NAME)


class Scope:
    """A step while it runs or is traced: names for its collectives, and their scopes.

    A function of the user's own with ``@tf.function`` on it is traced once and used again in other
    steps. So names are given once only, and it is noted that there is such a function.
    """

    def __init__(self) -> None:
        self.nested = False
        self._number = 0
        self.graph: tf.Graph | None = None

    def enter(self) -> None:
        """Begin a step."""
        self.graph = _current_graph()
        if self.graph is None:  # what runs eagerly may use the names of the step before
            self._number = 0

    @property
    def outermost(self) -> bool:
        """True if this is the step itself, not a function within it."""
        return _current_graph() is self.graph

    def note(self) -> None:
        """Record that operations here depend on this rank's rows."""
        self.nested = self.nested or not self.outermost

    def name(self, kind: str) -> str:
        """Return a name for a collective."""
        self.note()
        self._number += 1
        return f"{kind}.{self._number}"


def _current_graph() -> tf.Graph | None:
    """Return the graph that is being traced; ``None`` while TensorFlow runs eagerly."""
    return None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()


def in_condition(scope: Scope) -> bool:
    """Return whether the current trace, within the step, is inside a condition or loop."""
    graph = _current_graph()
    while graph is not None and graph is not scope.graph:
        if type(graph).__name__ in _CONDITIONAL_GRAPHS:
            return True
        graph = getattr(graph, "outer_graph", None)
    return False


class Stopwatch:
    """Adds up, inside compiled steps, the time from when some tensors are there to others.

    It waits for no tensor that the step would not wait for, and nothing of the step waits for it.
    On a GPU it knows nothing: there a tensor counts as there once its making is queued.
    """

    def __init__(self) -> None:
        self._runs = world_size() > 1 and not tf.config.list_logical_devices("GPU")
        self._seconds = runner_variable(0.0, tf.float64)

    def begin(self, tensors: Sequence[tf.Tensor | None]) -> tf.Tensor | None:
        """Return the time at which all ``tensors`` are computed, for `end`."""
        return self._moment(tensors) if self._runs else None

    def end(self, start: tf.Tensor | None, tensors: Sequence[tf.Tensor | None]) -> None:
        """Add up the time from a moment until all of ``tensors`` are there."""
        if start is not None:
            self._seconds.assign_add(self._moment(tensors) - start)

    @property
    def seconds(self) -> float | None:
        """Sum over all steps so far; ``None`` where it is unknown."""
        if not self._runs:
            return 0.0 if world_size() == 1 else None
        return float(self._seconds.numpy())

    def _moment(self, tensors: Sequence[tf.Tensor | None]) -> tf.Tensor:
        with tf.control_dependencies([tensor for tensor in tensors if tensor is not None]):
            return tf.timestamp()
