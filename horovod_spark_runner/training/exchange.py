"""The gradient exchange: what makes N ranks train one model.

Horovod's own Keras optimizer silently does nothing under Keras 3. Here every optimizer of the
model gets an ``apply`` that first adds the gradients of all ranks up with one grouped allreduce,
inside the compiled step, and then goes on as before: clipping, loss scaling, gradient
accumulation and moving averages see the reduced gradients, as in a single process.

Each rank's gradient is the mean over its own rows, so it counts by the rows it stands for: the
sum of ``rows · gradient`` over the ranks, divided by the sum of the rows, is the gradient of the
global batch, also when the last one is partial and spread unevenly.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import horovod.tensorflow as hvd
import tensorflow as tf

from ..config import AllreduceOptions
from .collectives import sum_over_ranks
from .model import find_optimizers


class GradientExchange:
    """Connects a model's optimizers to the other ranks.

    Args:
        model: a compiled model; its optimizers are changed in place until `detach`.
        options: compression of what is sent.
    """

    def __init__(self, model: Any, options: AllreduceOptions) -> None:
        self._model = model
        self._compression = (
            hvd.Compression.fp16 if options.compression == "fp16" else hvd.Compression.none
        )
        self._optimizers = find_optimizers(model)
        self._stateful = _statistics(model)
        self._control: Any = None
        self._equal = False
        self._reduced: Any = None
        self._calls = 0

    def attach(self) -> None:
        """Make the optimizers reduce gradients before they apply them."""
        for optimizer in self._optimizers:
            original = optimizer.apply
            # An attribute of the object, not another class: a saved model is a plain Keras model.
            optimizer.apply = _Apply(self, original)

    def detach(self) -> None:
        """Give the optimizers their own ``apply`` back."""
        for optimizer in self._optimizers:
            vars(optimizer).pop("apply", None)

    def step(self, data: Any, control: Any) -> tuple[Any, Any]:
        """Run the model's ``train_step`` as part of the world; may be traced.

        Args:
            data: what ``train_step`` takes.
            control: float32 vector: what this rank's part counts for relative to a full batch,
                then what it asks of all, 1 for each request and 0 else.

        Returns:
            The step's logs, and how many ranks made each request.
        """
        return self._step(data, control, equal=False)

    def equal_step(self, data: Any, control: Any) -> tuple[Any, Any]:
        """Run a `step` where every rank's part is known to count 1."""
        return self._step(data, control, equal=True)

    def _step(self, data: Any, control: Any, *, equal: bool) -> tuple[Any, Any]:
        self._control = control
        self._equal = equal
        self._reduced = None
        self._calls = 0
        logs = self._model.train_step(data)
        if self._reduced is None:  # train_step applied no gradients
            self._reduced = sum_over_ranks([self._control], "control")[0]
        self._average_statistics()
        return logs, self._reduced[1:]

    def reduce(self, gradients: Sequence[Any]) -> list[Any]:
        """Return the gradients of the global batch; ``None`` entries stay."""
        present = [i for i, gradient in enumerate(gradients) if gradient is not None]
        scaled = [self._scale(tf.convert_to_tensor(gradients[i])) for i in present]
        packed, contexts = [], []
        for tensor in scaled:
            small, context = self._compression.compress(tensor)
            packed.append(small)
            contexts.append(context)
        summed = sum_over_ranks([*packed, self._control], f"gradients.{self._calls}")
        self._calls += 1
        self._reduced = summed[-1]
        result: list[Any] = [None] * len(gradients)
        for i, tensor, context in zip(present, summed, contexts, strict=False):
            result[i] = self._unscale(self._compression.decompress(tensor, context))
        return result

    def _scale(self, tensor: Any) -> Any:
        if self._equal:
            return tensor
        # 0 · NaN is 0 here: a rank without rows has no say, whatever its stand-in row gives.
        return tf.math.multiply_no_nan(tensor, tf.cast(self._control[0], tensor.dtype))

    def _unscale(self, tensor: Any) -> Any:
        total = tf.cast(hvd.size() if self._equal else self._reduced[0], tensor.dtype)
        return tensor / total

    def _average_statistics(self) -> None:
        """Average what training changes besides weights, such as batch normalisation's moments."""
        if not self._stateful:
            return
        values = [self._scale(tf.convert_to_tensor(v)) for v in self._stateful]
        summed = sum_over_ranks(values, "statistics")
        for variable, value in zip(self._stateful, summed, strict=True):
            variable.assign(self._unscale(value))


class _Apply:
    """An optimizer's ``apply`` behind the exchange."""

    def __init__(self, exchange: GradientExchange, original: Any) -> None:
        self._exchange = exchange
        self._original = original

    def __call__(self, grads: Any, trainable_variables: Any = None) -> Any:
        return self._original(self._exchange.reduce(list(grads)), trainable_variables)


def _statistics(model: Any) -> list[Any]:
    """Return the float variables that layers change while they are trained.

    Those of frozen layers do not change and need not be sent.
    """
    found: dict[int, Any] = {}
    # Keras has no public way to reach layers inside layers.
    for layer in model._flatten_layers(include_self=True, recursive=True):
        if layer.trainable:
            for variable in layer._non_trainable_variables:
                if tf.as_dtype(variable.dtype).is_floating:
                    found[id(variable)] = variable
    return list(found.values())


def broadcast(variables: Sequence[Any]) -> None:
    """Give ``variables`` of every rank the values they have on rank 0."""
    values = [tf.convert_to_tensor(variable) for variable in variables]
    for number, (variable, value) in enumerate(zip(variables, values, strict=True)):
        variable.assign(hvd.broadcast(value, root_rank=0, name=f"broadcast.{number}"))
