"""Types of the Keras objects used here; Keras has none."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol, TypeAlias, TypeVar

from ...checkpoint.model_state import Variable
from ...training.progress import Logs

if TYPE_CHECKING:
    import tensorflow as tf

# Tensors or arrays, alone or in tuples, lists and dictionaries within each other: what a model
# takes and gives. Only `keras.tree` and `tf.nest` look inside.
Nest: TypeAlias = object
# What leads to a value in such a nest, or in JSON.
Path: TypeAlias = tuple[str | int, ...]
# A method as its class holds it, and one that takes its place for a while.
Method = TypeVar("Method", bound=Callable[..., object])


class MetricVariable(Variable, Protocol):
    """Variable that holds a metric's sum."""

    @property
    def name(self) -> str: ...

    @property
    def aggregation(self) -> str: ...


class Metric(Protocol):
    """A metric, or the metrics that a model was compiled with."""

    @property
    def name(self) -> str: ...

    @property
    def variables(self) -> Sequence[MetricVariable]: ...

    def update_state(self, y_true: Nest, y_pred: Nest, sample_weight: Nest = None) -> object: ...

    def reset_state(self) -> None: ...

    def result(self) -> Nest: ...


class CompiledMetrics(Metric, Protocol):
    """The metrics that a model was compiled with; made with its first batch."""

    @property
    def metrics(self) -> Sequence[Metric]: ...

    def result(self) -> Logs: ...


class Loss(Protocol):
    """A loss."""

    @property
    def name(self) -> str: ...

    @property
    def reduction(self) -> str | None: ...

    call: Callable[..., Nest]

    def __call__(self, y_true: Nest, y_pred: Nest, sample_weight: Nest = None) -> tf.Tensor: ...
