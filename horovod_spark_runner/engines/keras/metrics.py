"""Metrics that merge over ranks and tasks into those of one process.

Keras metrics keep sums (a total and a count, a confusion matrix, …), which Keras itself adds up
over replicas. Adding them up over the ranks before asking for the result gives each metric of the
whole epoch, weighted by samples, instead of a mean of means.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import keras
import tensorflow as tf

from ...errors import ModelError
from ...training.progress import Logs, flat
from .exchange import Part, Scope, in_condition, world_rank, world_size
from .model import Nest, classes_with, replaced
from .private import loss_module

SUM, MEAN, FIRST = "sum", "mean", "first"
# A method as its class holds it.
_Update = Callable[..., object]
_Reduce = Callable[..., tf.Tensor]


def epoch_logs(
    model: keras.Model, logs: Logs | None, names: set[str], fraction: float
) -> dict[str, object]:
    """Return the logs of an epoch over all ranks, as ``Model.fit`` makes them.

    Those are the results of the model's metrics, or, where a step of the model's own returns logs
    under other names, the logs of the last step. Every rank must call it; the metrics keep the sums
    of all ranks until they are reset.

    Args:
        model: the model.
        logs: what its last step returned on this rank.
        names: the names under which it did, before nested logs were taken apart.
        fraction: this rank's part of the last step's rows.
    """
    results = model.get_metrics_result()
    own = logs if isinstance(logs, Mapping) and names != set(results) else None
    if world_size() == 1:
        return flat(results if own is None else own)
    part = Part(world_size(), tf.constant(fraction, tf.float64))
    shared = _SharedLogs(model, own, part)
    _assign(shared.variables, shared.merged)
    results = model.get_metrics_result()
    return flat(results) if own is None else shared.over_ranks(_values(results))


def _values(logs: Logs) -> dict[str, object]:
    """Return ``logs`` as they are now: a metric may give its very variables."""
    return {
        name: value if (number := _number(value)) is None else tf.identity(number)
        for name, value in flat(logs).items()
    }


class StepMetrics:
    """The metrics of a model through one step; may be traced.

    Args:
        model: the model, before the step.
        part: this rank's part of the step.
    """

    def __init__(self, model: keras.Model, part: Part) -> None:
        self._model = model
        self._part = part
        self._before: list[tuple[keras.Variable, tf.Tensor]] = []
        self._inside = False
        if not part.equal and part.size > 1:
            self._before = [
                (v, tf.identity(tf.convert_to_tensor(v))) for v in metric_variables(model)
            ]

    @contextlib.contextmanager
    def results_of_all(self, scope: Scope, wanted: tf.Variable) -> Iterator[None]:
        """Make the model's metrics return their results over all ranks within a step.

        What a step of the user's own logs may be computed from them.

        Args:
            scope: of the step.
            wanted: whether the step's logs are used; the same on all ranks.
        """
        with contextlib.ExitStack() as stack:
            for cls in classes_with(keras.metrics.Metric, "result"):
                wrap = functools.partial(self._result_of_all, scope=scope, wanted=wanted)
                stack.enter_context(replaced(cls, "result", wrap))
            yield

    def _result_of_all(
        self, original: Callable[[keras.metrics.Metric], Nest], scope: Scope, wanted: tf.Variable
    ) -> Callable[[keras.metrics.Metric], Nest]:
        @functools.wraps(original)
        def result(metric: keras.metrics.Metric) -> Nest:
            is_model_metric = any(metric is other for other in self._model.metrics)
            # Ranks may decide differently within a condition, and wait for each other for ever.
            if self._inside or not is_model_metric or not metric.variables or in_condition(scope):
                return original(metric)

            def local_result() -> Nest:
                # A metric may be made of others, whose results are patched as well.
                self._inside = True
                try:
                    return tf.nest.map_structure(
                        lambda value: tf.identity(tf.convert_to_tensor(value)), original(metric)
                    )
                finally:
                    self._inside = False

            def global_result() -> Nest:
                self._take_back(metric.variables)
                summed = self._part.sum(_terms(metric.variables), name)
                with _assigned(metric.variables, _merged(metric.variables, summed)):
                    return local_result()

            name = scope.name("results")
            return tf.cond(wanted, global_result, local_result)

        return result

    def _take_back(self, variables: Sequence[keras.Variable]) -> None:
        """Undo the contribution of a placeholder row to some of the variables."""
        for variable, before in self._before:
            if any(variable is chosen for chosen in variables):
                value = tf.convert_to_tensor(variable)
                variable.assign(tf.where(self._part.present(tf.float32) > 0, value, before))

    def finish(self, logs: Logs | None, *, share: bool) -> Logs | None:
        """Undo the contribution of a placeholder row; return the step's logs.

        Args:
            logs: what the step returned.
            share: whether they are to be those of all ranks; every rank must say the same.
        """
        self._take_back([variable for variable, _ in self._before])
        if not share or self._part.size == 1 or not isinstance(logs, Mapping):
            return logs
        shared = _SharedLogs(self._model, logs, self._part)
        with _assigned(shared.variables, shared.merged):
            results = _values(self._model.get_metrics_result())
        return shared.over_ranks(results)


class _SharedLogs:
    """A model's metrics and a step's logs over all ranks, by one sum for all of them.

    Where every rank logged the result of a metric, that is the metric's over all ranks; what else
    was logged is taken for a mean over the step's rows. Every rank must make one.

    Args:
        model: the model.
        logs: what the step returned on this rank.
        part: this rank's part of the step.

    Attributes:
        variables: in which the metrics keep their sums.
        merged: their values over all ranks.
    """

    def __init__(self, model: keras.Model, logs: Logs | None, part: Part) -> None:
        self._logs = flat(logs) if isinstance(logs, Mapping) else {}
        self._part = part
        self.variables = metric_variables(model)
        local = _values(model.get_metrics_result())
        numbered = {name: _number(value) for name, value in self._logs.items()}
        self._values = {name: number for name, number in numbered.items() if number is not None}
        self._metric_names = [name for name in self._values if name in local]
        other = [
            tf.reduce_any(tf.not_equal(value, tf.cast(local[name], value.dtype)))
            for name, value in self._values.items()
            if name in local
        ]
        merges = _terms(self.variables)
        means = [part.term(value) for value in self._values.values()]
        # A rank without rows has logged the results of its filler row.
        flags = [tf.cast(flag, tf.float32) * part.present(tf.float32) for flag in other]
        summed = iter(part.sum([*merges, *means, *flags], "logs"))
        self.merged = _merged(self.variables, [next(summed) for _ in merges])
        self._means = {name: part.total(next(summed)) for name in self._values}
        self._others = dict(zip(self._metric_names, summed, strict=True))

    def over_ranks(self, results: Logs) -> dict[str, object]:
        """Return the step's logs, given the metrics' results of the assigned values."""
        means = dict(self._means)
        for name, count in self._others.items():
            result = tf.cast(results[name], means[name].dtype)
            means[name] = tf.where(count > 0, means[name], result)
        return {**self._logs, **means}


def _number(value: object) -> tf.Tensor | None:
    """Return a logged value as a float tensor; ``None`` if it is something else."""
    try:
        number = tf.convert_to_tensor(value)
    except (TypeError, ValueError):
        return None
    if number.dtype.is_integer:
        return tf.cast(number, tf.float32)
    return number if number.dtype.is_floating else None


@contextlib.contextmanager
def _assigned(variables: Sequence[keras.Variable], values: Sequence[tf.Tensor]) -> Iterator[None]:
    """Assign variables other values, temporarily."""
    before = [tf.identity(tf.convert_to_tensor(v)) for v in variables]
    _assign(variables, values)
    yield
    _assign(variables, before)


def _assign(variables: Sequence[keras.Variable], values: Sequence[tf.Tensor]) -> None:
    for variable, value in zip(variables, values, strict=True):
        variable.assign(value)


def _terms(variables: Sequence[keras.Variable]) -> list[tf.Tensor]:
    """Return this rank's terms of the sums that `_merged` takes."""
    first = world_rank() == 0
    terms = []
    for variable in variables:
        value = tf.convert_to_tensor(variable)
        keep = first or merge_of(variable) != FIRST
        terms.append(value if keep else tf.zeros_like(value))
    return terms


def _merged(variables: Sequence[keras.Variable], summed: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """Return the values over all ranks, combined by each variable's aggregation.

    Args:
        variables: of metrics.
        summed: the sums of all ranks' `_terms`.
    """
    return [
        value / tf.cast(world_size(), value.dtype) if merge_of(variable) == MEAN else value
        for variable, value in zip(variables, summed, strict=True)
    ]


def metric_variables(model: keras.Model) -> list[keras.Variable]:
    """Return the variables in which the model's metrics keep their sums."""
    return variables_of(model.metrics)


def variables_of(metrics: Iterable[keras.metrics.Metric]) -> list[keras.Variable]:
    """Return the variables of some metrics, each once."""
    variables = {id(v): v for metric in metrics for v in metric.variables}
    return list(variables.values())


def merge_of(variable: keras.Variable) -> str:
    """Return how a metric's variable is merged over all processes.

    ``"sum"``, ``"mean"``, or ``"first"`` where one process's stands for all.
    """
    aggregation = variable.aggregation
    return aggregation if aggregation in (SUM, MEAN) else FIRST


@contextlib.contextmanager
def counting_means(rows: Callable[[], tf.Tensor], *, exact: bool = False) -> Iterator[None]:
    """Make Keras' means weigh one number for a whole batch by the batch's rows.

    Args:
        rows: returns how many, or a part of all.
        exact: refuse what would be no mean over rows.

    Raises:
        ModelError: rows have weights, but a metric's function gives one number for all of them.
    """

    def wrap(original: _Update) -> _Update:
        @functools.wraps(original)
        def update_state(
            metric: keras.metrics.Metric, values: Nest, sample_weight: Nest = None
        ) -> object:
            whole = tf.convert_to_tensor(values).shape.rank == 0
            if whole and sample_weight is None:
                sample_weight = rows()
            elif whole and exact and tf.convert_to_tensor(sample_weight).shape.rank != 0:
                raise ModelError(
                    f"metric {metric.name!r} gives one number for a whole batch, in which the "
                    "weights of its rows cannot count; let its function return a number per row, "
                    "or evaluate without weights"
                )
            return original(metric, values, sample_weight)

        return update_state

    with replaced(keras.metrics.Mean, "update_state", wrap):
        yield


def reduced_by(wrap: Callable[[_Reduce], _Reduce]) -> contextlib.AbstractContextManager[None]:
    """Replace the function by which Keras' losses are reduced to a number.

    It is called with the values, and ``sample_weight``, ``mask``, ``reduction`` and ``dtype`` by
    name. The mask is that of the predictions and of the loss itself (``ignore_class``).

    Args:
        wrap: makes it of Keras' own.
    """
    return replaced(loss_module, "reduce_weighted_values", wrap)
