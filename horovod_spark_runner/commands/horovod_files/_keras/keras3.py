"""Horovod's ``DistributedOptimizer`` and ``load_model`` for Keras 3."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import horovod.tensorflow as hvd
import keras as keras3
import tensorflow as tf
from horovod.tensorflow.keras3 import make_allreduce_grads_fn, tensorflow_variables

# Optimizers are numbered by their first steps, whose order is the same on all ranks.
_numbers = itertools.count()


class Reduction:
    """Reduction of an optimizer's gradients over the ranks.

    Args:
        name: name of its operations; ``None`` for one that no other optimizer has.
        factor: factor on the reduced gradients.
        scale_local_gradients: divide the gradients of local variables by the number of ranks.
        options: of `make_allreduce_grads_fn`.
    """

    def __init__(
        self, name: str | None, factor: int, scale_local_gradients: bool, options: Mapping[str, Any]
    ) -> None:
        self._name = name
        self._factor = factor
        self._scale_local_gradients = scale_local_gradients
        self._options = options
        self._local_variables: set[Any] = set()

    @functools.cached_property
    def _allreduce(self) -> Any:
        name = self._name or f"DistributedOptimizer_{next(_numbers)}"
        return make_allreduce_grads_fn(name, **self._options)

    def register_local_var(self, variable: Any) -> None:
        """Leave a variable's gradient as this rank computes it."""
        self._local_variables.add(tensorflow_variables(variable).ref())

    def reduce(self, grads: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        """Return the gradients to apply to variables."""
        variables = tensorflow_variables(list(variables))
        reduced = list(grads)
        local = [n for n, v in enumerate(variables) if v.ref() in self._local_variables]
        if self._scale_local_gradients:
            for number in local:
                reduced[number] = _scaled(grads[number], 1 / self._options["process_set"].size())
        shared = [n for n in range(len(reduced)) if n not in local]
        results = self._allreduce(
            [grads[n] for n in shared], [variables[n] for n in shared], use_generic_names=True
        )
        for number, gradient in zip(shared, results, strict=True):
            reduced[number] = gradient
        return [_scaled(gradient, self._factor) for gradient in reduced]


def _scaled(gradient: Any, factor: float) -> Any:
    if factor == 1:
        return gradient
    if isinstance(gradient, tf.IndexedSlices):
        values = gradient.values * tf.cast(factor, gradient.dtype)
        return tf.IndexedSlices(values, gradient.indices, gradient.dense_shape)
    return gradient * tf.cast(factor, gradient.dtype)


def create_distributed_optimizer(
    keras: Any,
    optimizer: Any,
    name: str | None,
    device_dense: str,
    device_sparse: str,
    compression: Any,
    sparse_as_dense: bool,
    gradient_predivide_factor: float,
    op: Any,
    backward_passes_per_step: int = 1,
    average_aggregated_gradients: bool = False,
    groups: Any = None,
    process_set: Any = hvd.global_process_set,
    scale_local_gradients: bool = True,
) -> Any:
    """Have a Keras optimizer apply the gradients of all ranks, and return it.

    It keeps its class, configuration and state, so that a model that is saved with it is loaded by
    Keras alone. Gradients are reduced where they are about to be clipped and applied; with
    ``backward_passes_per_step`` Keras accumulates those of the passes before.
    """
    if not isinstance(optimizer, keras3.optimizers.Optimizer):
        raise TypeError(
            f"{type(optimizer).__module__}.{type(optimizer).__name__} is no optimizer of Keras 3; "
            "use one of keras.optimizers"
        )
    if op != hvd.Average and gradient_predivide_factor != 1.0:
        raise ValueError("gradient_predivide_factor needs op=Average")
    factor = 1
    leaves = _leaves(optimizer)
    if backward_passes_per_step != 1:
        for leaf in leaves:
            _accumulate(leaf, backward_passes_per_step)
        factor = 1 if average_aggregated_gradients else backward_passes_per_step
    options = {
        "device_dense": device_dense, "device_sparse": device_sparse, "compression": compression,
        "sparse_as_dense": sparse_as_dense, "op": op, "groups": groups, "process_set": process_set,
        "gradient_predivide_factor": gradient_predivide_factor,
    }  # fmt: skip
    for number, leaf in enumerate(leaves):
        own_name = name and f"{name}_{number}"
        _apply_reduced(leaf, Reduction(own_name, factor, scale_local_gradients, options))
    # Beside the class, which other optimizers share.
    optimizer.__dict__["register_local_var"] = lambda variable: [
        leaf.__dict__[_REDUCTION].register_local_var(variable) for leaf in leaves
    ]
    return optimizer


_REDUCTION = "_horovod_reduction"


def _leaves(optimizer: Any) -> list[Any]:
    """Return the optimizers that update variables, of one that may hold others."""
    if isinstance(optimizer, keras3.optimizers.LossScaleOptimizer):
        return _leaves(optimizer.inner_optimizer)
    if not hasattr(optimizer, "optimizers"):
        return [optimizer]
    if not optimizer.optimizers:
        raise ValueError(
            f"{type(optimizer).__name__} {optimizer.name!r} has no optimizers yet: make each one "
            "that it is given a DistributedOptimizer"
        )
    return list(optimizer.optimizers)


def _accumulate(optimizer: Any, passes: int) -> None:
    """Have Keras accumulate gradients over backward passes."""
    if not isinstance(passes, int) or passes < 1:
        raise ValueError(f"backward_passes_per_step={passes!r} must be an integer of 1 or more")
    own = optimizer.gradient_accumulation_steps
    if own == passes:
        return
    if own or optimizer.built:
        reason = f"has gradient_accumulation_steps={own}" if own else "has been built already"
        raise ValueError(
            f"backward_passes_per_step={passes} cannot be set: {optimizer.name!r} {reason}; "
            "make a new optimizer without it"
        )
    optimizer.gradient_accumulation_steps = passes


def _apply_reduced(optimizer: Any, reduction: Reduction) -> None:
    """Reduce an optimizer's gradients before they are clipped and applied."""
    own = vars(optimizer)
    for method in ("_backend_apply_gradients", "_clip_gradients"):
        own.pop(method, None)  # of an earlier DistributedOptimizer of it
    apply, clip = optimizer._backend_apply_gradients, optimizer._clip_gradients
    applied: list[Any] = []

    def apply_and_note_variables(grads: Sequence[Any], variables: Sequence[Any]) -> None:
        applied[:] = variables
        apply(grads, variables)

    def reduce_and_clip(grads: Sequence[Any]) -> Any:
        return clip(reduction.reduce(grads, applied))

    own[_REDUCTION] = reduction
    own["_backend_apply_gradients"] = apply_and_note_variables
    own["_clip_gradients"] = reduce_and_clip


def is_distributed(optimizer: Any) -> bool:
    """Return whether an optimizer, or one that it holds, applies the gradients of all ranks."""
    if optimizer is None:
        return False
    held = [getattr(optimizer, "inner_optimizer", None), *getattr(optimizer, "optimizers", ())]
    return _REDUCTION in vars(optimizer) or any(map(is_distributed, held))


def load_model(
    keras: Any,
    wrap_optimizer: Any,
    filepath: Any,
    custom_optimizers: Sequence[type] | None,
    custom_objects: Mapping[str, Any] | None,
    legacy_opts: bool = False,
) -> Any:
    """Load a saved model whose optimizer applies the gradients of all ranks."""
    if legacy_opts:
        raise ValueError("legacy_opts=True: Keras 3 has no legacy optimizers")
    own = {cls.__name__: cls for cls in custom_optimizers or ()}
    model = keras3.models.load_model(filepath, custom_objects={**own, **(custom_objects or {})})
    if model.optimizer is not None and not is_distributed(model.optimizer):
        wrap_optimizer(lambda: model.optimizer)()
    return model


def install() -> None:
    """Have Keras' own classes respect what steps of such optimizers wait for: other ranks."""
    compiled = keras3.Model.jit_compile
    check_finite = keras3.optimizers.LossScaleOptimizer.check_finite

    def is_compiled(model: Any) -> bool:
        """XLA cannot compile Horovod's operations."""
        return not is_distributed(getattr(model, "optimizer", None)) and compiled.fget(model)

    def check_finite_on_all_ranks(optimizer: Any, grads: Sequence[Any]) -> Any:
        """All ranks apply their gradients, or none."""
        finite = check_finite(optimizer, grads)
        if not is_distributed(optimizer.inner_optimizer):
            return finite
        name = {"name": "finite_gradients", "ignore_name_scope": True}
        return hvd.allreduce(tf.cast(finite, tf.float32), op=hvd.Min, **name) > 0

    keras3.Model.jit_compile = property(is_compiled, compiled.fset)
    keras3.optimizers.LossScaleOptimizer.check_finite = check_finite_on_all_ranks


install()
