"""Horovod's TensorFlow functions for Keras 3: its variables as arguments, and gradients."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import horovod.tensorflow as hvd
import keras
import tensorflow as tf
from horovod.common.util import split_list
from tensorflow.python.ops.control_flow_util import GraphOrParentsInXlaContext

Function = Callable[..., Any]

# What takes tensors of the user's.
COLLECTIVES = (
    "allgather", "allreduce", "alltoall", "broadcast", "broadcast_", "grouped_allgather",
    "grouped_allreduce", "grouped_reducescatter", "reducescatter",
)  # fmt: skip
_broadcast_in_graph = hvd.broadcast_variables


def install() -> None:
    """Replace functions of Horovod's TensorFlow modules by those for Keras 3."""
    replaced = {name: _takes_keras_variables(getattr(hvd, name)) for name in COLLECTIVES}
    replaced["broadcast_variables"] = broadcast_variables
    replaced["_make_allreduce_grads_fn"] = make_allreduce_grads_fn
    for module in (hvd.mpi_ops, hvd.functions, hvd.elastic, hvd):
        for name in replaced.keys() & vars(module).keys():
            setattr(module, name, replaced[name])
    tape = hvd._DistributedGradientTape
    tape.register_local_source = _takes_keras_variables(tape.register_local_source)
    tape.gradient = _takes_nested_sources(tape.gradient)


def tensorflow_variables(nest: Any) -> Any:
    """Return a nested structure with the TensorFlow variables behind Keras 3 variables."""
    return tf.nest.map_structure(
        lambda leaf: leaf.value if isinstance(leaf, keras.Variable) else leaf, nest
    )


def trainable_weights(layer: keras.layers.Layer) -> list[keras.Variable]:
    """Return the weights of a layer whose gradients stay each rank's.

    Raises:
        ValueError: it has none yet.
    """
    if not layer.built:
        raise ValueError(f"local layer {layer.name!r} has no weights yet: build the model first")
    return list(layer.trainable_weights)


def _takes_keras_variables(function: Function) -> Function:
    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        check_compilable()
        args, kwargs = tensorflow_variables((args, kwargs))
        return function(*args, **kwargs)

    return wrapper


def _takes_nested_sources(gradient: Function) -> Function:
    @functools.wraps(gradient)
    def wrapper(tape: Any, target: Any, sources: Any, *args: Any, **kwargs: Any) -> Any:
        flat = tf.nest.flatten(tensorflow_variables(sources))
        return tf.nest.pack_sequence_as(sources, gradient(tape, target, flat, *args, **kwargs))

    return wrapper


def broadcast_variables(
    variables: Iterable[Any],
    root_rank: int,
    process_set: Any = hvd.global_process_set,
    inplace: bool = False,
) -> Any:
    """Give variables the values that they have on one rank.

    Ranks find each other's variables by their places in the list: Keras numbers the names of layers
    by how many a process has made.
    """
    variables = tensorflow_variables(list(variables))
    if inplace or not tf.executing_eagerly():
        return _broadcast_in_graph(variables, root_rank, process_set, inplace)
    values = [tf.convert_to_tensor(variable) for variable in variables]
    for variable, value in zip(
        variables, _broadcast_values(values, root_rank, process_set), strict=True
    ):
        variable.assign(value)
    return None


def _values_of(values: list[tf.Tensor], root_rank: int, process_set: Any) -> list[tf.Tensor]:
    options = {"process_set": process_set, "ignore_name_scope": True}
    return [
        hvd.broadcast(value, root_rank, name=f"broadcast_variable_{number}", **options)
        for number, value in enumerate(values)
    ]


_broadcast_values = tf.function(_values_of, autograph=False)


def make_allreduce_grads_fn(
    name: str,
    device_dense: str,
    device_sparse: str,
    compression: Any,
    sparse_as_dense: bool,
    op: Any,
    gradient_predivide_factor: float,
    groups: int | Sequence[Sequence[Any]] | None,
    process_set: Any,
) -> Function:
    """Return a function of gradients and variables that gives the gradients of all ranks.

    The arguments are those of Horovod's ``DistributedOptimizer``.
    """
    factor = gradient_predivide_factor if op == hvd.Average else 1.0
    dense, sparse = _reductions(
        name, device_dense, device_sparse, compression, op, factor, process_set
    )

    def allreduce_grads(
        grads: Sequence[Any], variables: Sequence[Any] = (), use_generic_names: bool = False
    ) -> list[Any]:
        if process_set.size() == 1 or not process_set.included():
            return list(grads)
        check_compilable()
        reduced = list(grads)
        if sparse_as_dense:
            reduced = [
                tf.convert_to_tensor(g) if isinstance(g, tf.IndexedSlices) else g for g in reduced
            ]
        slices = [n for n, g in enumerate(reduced) if isinstance(g, tf.IndexedSlices)]
        tensors = [n for n, g in enumerate(reduced) if g is not None and n not in slices]
        grouped = _group(tensors, variables, groups)
        results = dense([[reduced[n] for n in group] for group in grouped], use_generic_names)
        for group, result in zip(grouped, results, strict=True):
            for number, gradient in zip(group, result, strict=True):
                reduced[number] = gradient
        gathered = sparse([reduced[n] for n in slices], use_generic_names)
        for number, gradient in zip(slices, gathered, strict=True):
            reduced[number] = gradient
        return reduced

    return allreduce_grads


def check_compilable() -> None:
    """Refuse a collective within a function that XLA compiles.

    Raises:
        ValueError: it is within one.
    """
    if not tf.executing_eagerly() and GraphOrParentsInXlaContext(tf.compat.v1.get_default_graph()):
        raise ValueError(
            "XLA cannot compile Horovod's operations: use jit_compile=False in model.compile() and "
            "tf.function()"
        )


def _group(
    numbers: list[int], variables: Sequence[Any], groups: int | Sequence[Sequence[Any]] | None
) -> list[list[int]]:
    """Return which gradients, by their numbers, are reduced together."""
    if groups is None:
        return [[number] for number in numbers]
    if isinstance(groups, int):
        return [group for group in split_list(numbers, groups) if group]
    refs = {tensorflow_variables(variables[number]).ref(): number for number in numbers}
    wanted = [
        [refs.pop(variable.ref()) for variable in group if variable.ref() in refs]
        for group in tensorflow_variables(list(groups))
    ]
    return [group for group in wanted if group] + [[number] for number in refs.values()]


@functools.lru_cache(maxsize=64)  # a loop in eager mode makes a tape in each of its steps
def _reductions(
    name: str,
    device_dense: str,
    device_sparse: str,
    compression: Any,
    op: Any,
    predivide_factor: float,
    process_set: Any,
) -> tuple[Function, Function]:
    """Return compiled functions for groups of dense gradients and for sparse ones."""

    def names(generic: bool, number: int, kind: str) -> dict[str, Any]:
        # Names that depend on no graph: ranks find each other's gradients by them.
        if not generic:
            return {}
        return {"name": f"{name}_{kind}_{number}", "ignore_name_scope": True}

    def dense(groups: list[list[tf.Tensor]], generic: bool) -> list[list[tf.Tensor]]:
        with tf.name_scope(f"{name}_Allreduce"):
            options = {
                "device_dense": device_dense, "compression": compression, "op": op,
                "prescale_factor": 1.0 / predivide_factor, "postscale_factor": predivide_factor,
                "process_set": process_set,
            }  # fmt: skip
            return [
                hvd.grouped_allreduce(group, **options, **names(generic, number, "group"))
                if len(group) > 1
                else [hvd.allreduce(group[0], **options, **names(generic, number, "grad"))]
                for number, group in enumerate(groups)
            ]

    def sparse(slices: list[tf.IndexedSlices], generic: bool) -> list[tf.IndexedSlices]:
        if slices and op not in (hvd.Average, hvd.Sum):
            raise NotImplementedError(
                "sparse gradients are reduced by op=Average and op=Sum only; set "
                "sparse_as_dense=True"
            )
        ranks = process_set.size() if op == hvd.Average else 1
        with tf.name_scope(f"{name}_Allgather"), tf.device(device_sparse):
            gathered = []
            for number, one in enumerate(slices):
                values, indices = (
                    hvd.allgather(part, process_set=process_set, **names(generic, number, kind))
                    for kind, part in (("values", one.values), ("indices", one.indices))
                )
                gathered.append(
                    tf.IndexedSlices(
                        values / tf.cast(ranks, values.dtype), indices, one.dense_shape
                    )
                )
            return gathered

    return tf.function(dense, autograph=False), tf.function(sparse, autograph=False)


install()
