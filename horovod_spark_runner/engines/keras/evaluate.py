"""A trained Keras model and its metrics, evaluated on parts of the rows."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import cloudpickle
import keras
import numpy as np
import tensorflow as tf

from ...checkpoint.files import LogValue
from ...data.manifest import Manifest
from ...errors import InvalidInputError, ModelError, on_one_line
from ...storage.arrays import Arrays
from ...storage.contents import Contents
from ...training.progress import Logs, flat, plain
from ...training.sample_rows import repeat_rows
from ...training.spec import ModelSource
from ...training.trained_model import Recipe
from ...training.trainee import EvaluationRequest
from .binding import InputBinding, bind_outputs, needs_labels
from .engine import check_metric_names
from .loading import Graph, make_model, set_weights, weights_in
from .losses import LabelCheck
from .metrics import SUM, counting_means, merge_of, reduced_by, variables_of
from .model import (
    Nest,
    build_model,
    call_model,
    call_outputs,
    fresh_keras_state,
    output_leaves,
    replaced,
    unchanged,
    using_keras_state,
)
from .private import CompileMetrics
from .probe import State, check_merge, close, loss_title, results_of, rows_of, values_of
from .saved import LAMBDA, WITH_MODEL_FN, KerasParts, custom_parts, read_compile_config

_OTHERS = "or evaluate by other metrics only, metrics=[…] without 'compiled'"


def _make_compiled(recipe: Recipe) -> tuple[keras.Model, InputBinding]:
    """Return `make_model`, compiled as it was for its training.

    The archive says how, unless it names losses or metrics of the user's own, or the model's class
    compiles itself: these are built by their source, and given the weights.

    Raises:
        ModelError: it was not compiled, or what it was compiled with is not known here.
    """
    parts: KerasParts = recipe.parts
    model, bind = make_model(recipe)
    if parts.archive is not None:
        model = _compiled(model, parts.archive, recipe, bind)
    if not model.compiled:
        raise ModelError(
            f"model {model.name!r} is not compiled: its function must call model.compile(loss=…), "
            + _OTHERS
        )
    return model, bind


def _compiled(
    model: keras.Model, archive: Contents, recipe: Recipe, bind: InputBinding
) -> keras.Model:
    pickled = recipe.parts.compiled_by
    source: ModelSource = ModelSource() if pickled is None else cloudpickle.loads(pickled)
    config, objects = read_compile_config(archive), dict(source.custom_objects)
    custom_compile = type(model).compile is not keras.Model.compile
    parts = custom_parts(config)
    missing = [p for p in parts if p.name == LAMBDA or not {p.key, p.name} & objects.keys()]
    if not (custom_compile or missing) and config:
        objects.update({part.key: objects.get(part.key, objects.get(part.name)) for part in parts})
        model.compile(**keras.saving.deserialize_keras_object(config, custom_objects=objects))
        return model
    if source.function is not None or source.file is not None:
        built = build_model(source)
        set_weights(built, weights_in(model), recipe, bind)
        return built
    if missing:
        which = ", ".join(sorted({part.describe() for part in missing}))
        raise ModelError(
            f"model {model.name!r} was compiled with what is not Keras' own, and code is not kept "
            f"in storage: {which}. Give it, TFTransformer.from_run(run_dir, custom_objects={{…}}), "
            f"or the function that builds the model, {WITH_MODEL_FN}, {_OTHERS}"
        )
    what = f"{type(model).__name__} compiles itself" if custom_compile else "it is not known how"
    raise ModelError(
        f"model {model.name!r} cannot be compiled here, as {what}. Give the function that builds "
        f"it, {WITH_MODEL_FN}, {_OTHERS}"
    )


class KerasEvaluator:
    """Keras implementation of `Evaluator`.

    ``test_step`` updates the model's own metrics as ``Model.evaluate`` has it do. What they keep
    are sums over rows, which are taken out as float64 after every batch of Spark's: so no sum grows
    to where float32 loses rows.

    Args:
        recipe: how the model is made.
        request: the evaluation that is requested.

    Raises:
        ModelError: the model cannot be evaluated exactly; the message names the metric or loss.
        InvalidInputError: a metric is not known, or does not fit the model.
    """

    def __init__(self, recipe: Recipe, request: EvaluationRequest) -> None:
        self._state = recipe.parts.state
        self._compiled = request.compiled
        self._requested: keras.metrics.Metric | None = None
        self._check_labels: LabelCheck | None = None
        self._untried = True
        with fresh_keras_state():
            make = _make_compiled if request.compiled else make_model
            self._model, self._inputs = make(recipe)
            if isinstance(self._model, Graph):
                raise ModelError(
                    "a SavedModel is a graph, which Keras' metrics cannot be tried on; transform "
                    "the DataFrame, and give the predictions to an evaluator of "
                    "pyspark.ml.evaluation"
                )
            if request.compiled:
                _check_no_custom_metrics(self._model)
            # An archive is loaded without it.
            self._model.run_eagerly = recipe.parts.eager
            if recipe.batch_size is not None:
                raise ModelError(
                    f"model {self._model.name!r} takes batches of exactly {recipe.batch_size} "
                    "rows, and rows that fill the last one would count; build it with "
                    "keras.Input(shape=…) instead of batch_shape"
                )
            self._begin(recipe, request)

    def _begin(self, recipe: Recipe, request: EvaluationRequest) -> None:
        targets = request.targets
        features = repeat_rows(recipe.sample_rows().inputs, 1)
        labels = {column.name: column.blank() for column in targets.columns}
        self._weight = targets.weight
        with using_keras_state(self._state):
            outputs = call_outputs(self._model, _tensors(self._inputs(features)))
            manifest = Manifest("", (), targets.columns, (), "")
            self._labels = bind_outputs(self._model, targets.outputs, manifest, outputs)
            if self._compiled and needs_labels(self._model):
                names, weighted = targets.outputs.columns, self._weight is not None
                self._check_labels = LabelCheck(self._model, outputs, names, weighted=weighted)
            if request.metrics is not None:
                self._requested = self._compile(request.metrics, targets.outputs.slots)
            self._step = self._make_step(self._data(features, labels))
            self._check_names()
        self._variables = variables_of(self._metrics)
        self._check_mergeable()
        self._reset()
        self._initial = [np.array(variable, np.float64) for variable in self._variables]

    def _compile(self, portable: object, labels: Sequence[object]) -> keras.metrics.Metric:
        if not any(labels):
            raise InvalidInputError(
                "metrics compare outputs with labels, but the model was trained without label "
                "columns"
            )
        check_metric_names(portable)
        made = portable if isinstance(portable, (list, dict)) else [portable]
        names = getattr(self._model, "output_names", None)
        plain_ones, weighted = (None, made) if self._weight is not None else (made, None)
        compiled: keras.metrics.Metric = CompileMetrics(plain_ones, weighted, output_names=names)
        return compiled

    def _make_step(self, data: Nest) -> Callable[[Nest], tf.Tensor]:
        """Return the step, all variables made."""
        try:
            if self._model.run_eagerly:
                self._forward(data)
                return self._forward
            kind = tf.nest.map_structure(
                lambda t: tf.TensorSpec((None, *t.shape[1:]), t.dtype), data
            )
            step = tf.function(self._forward, autograph=False, input_signature=(kind,))
            step.get_concrete_function()
            return lambda values: step(values)
        except (InvalidInputError, NotImplementedError):
            raise
        except Exception as error:  # a metric's or the user's own code may fail in any way
            text = on_one_line(error)
            raise InvalidInputError(
                f"model {self._model.name!r} cannot be evaluated by the requested metrics: "
                f"{type(error).__name__}: {text}"
            ) from error

    def _forward(self, data: Nest) -> tf.Tensor:
        x, y, weight = keras.utils.unpack_x_y_sample_weight(data)
        seen: list[Nest] = []

        def rows() -> tf.Tensor:
            return tf.cast(tf.shape(keras.tree.flatten(x)[0])[0], tf.float32)

        # Keras adds up the losses of several outputs as one number for a batch, too.
        with counting_means(rows, exact=True):
            if self._compiled:
                with self._exact_losses(seen):
                    self._model.test_step(data)
            outputs = seen[-1] if seen else None
            if outputs is None or type(self._model).predict_step is not keras.Model.predict_step:
                outputs = call_model(self._model, x)
            if self._requested is not None:
                self._requested.update_state(y, seen[-1] if seen else outputs, weight)
        return output_leaves(outputs)[0][1]

    @contextlib.contextmanager
    def _exact_losses(self, seen: list[Nest]) -> Iterator[None]:
        """Refuse losses whose parts do not add up to the total; record the model's outputs.

        Args:
            seen: where to put what the model's metrics are computed from.
        """

        def noting(original: Callable[..., object]) -> Callable[..., object]:
            @functools.wraps(original)
            def compute_metrics(
                model: keras.Model, x: Nest, y: Nest, y_pred: Nest, sample_weight: Nest = None
            ) -> object:
                seen.append(y_pred)
                return original(model, x, y, y_pred, sample_weight)

            return compute_metrics

        with (
            replaced(type(self._model), "compute_metrics", noting),
            reduced_by(self._checking),
        ):
            yield

    def _checking(self, original: Callable[..., tf.Tensor]) -> Callable[..., tf.Tensor]:
        @functools.wraps(original)
        def reduce(values: tf.Tensor, **settings: Any) -> tf.Tensor:
            why = _depends_on_batch(**settings)
            if why:
                flat = getattr(self._model._compile_loss, "_flat_losses", None) or ()
                names = " or ".join(repr(output.loss.name) for output in flat)
                raise ModelError(
                    f"loss {names} of model {self._model.name!r} {why}: its value depends on "
                    "which rows are in a batch together, so that it has no exact value over all "
                    "rows; ask for metrics by name instead, metrics=[…] without 'compiled'"
                )
            return original(values, **settings)

        return reduce

    @property
    def _requested_metrics(self) -> list[keras.metrics.Metric]:
        return [] if self._requested is None else list(self._requested.metrics)

    @property
    def _metrics(self) -> list[keras.metrics.Metric]:
        metrics = self._requested_metrics
        for metric in self._model.metrics if self._compiled else ():
            metrics.extend(metric.metrics if isinstance(metric, CompileMetrics) else [metric])
        return metrics

    def _results(self) -> list[Logs]:
        """Return the results of the model's own metrics, and those of the requested ones."""
        results = [self._model.get_metrics_result()] if self._compiled else []
        return [*results, self._requested.result()] if self._requested is not None else results

    def _check_names(self) -> None:
        """Check that no two metrics have one name.

        Raises:
            InvalidInputError: two have.
        """
        names = [name for results in self._results() for name in flat(results)]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise InvalidInputError(
                f"several metrics are called {', '.join(map(repr, twice))}; give one of them "
                "another name, name=…"
            )

    def _check_mergeable(self) -> None:
        for metric in self._metrics:
            for variable in metric.variables:
                number = tf.as_dtype(variable.dtype)
                if merge_of(variable) != SUM or not (number.is_floating or number.is_integer):
                    raise ModelError(
                        f"metric {metric.name!r} ({type(metric).__name__}) cannot be evaluated in "
                        f"parts: its variable {variable.name!r} is not a sum over rows "
                        f"(aggregation {variable.aggregation!r}, type {variable.dtype}). Keep "
                        "sums, or request other metrics by name, metrics=[…]"
                    )

    def _reset(self) -> None:
        if self._compiled:
            self._model.reset_metrics()
        for metric in self._requested_metrics:
            metric.reset_state()

    def _data(self, features: Arrays, labels: Arrays) -> Nest:
        x, y = self._inputs(features), self._labels(labels)
        if self._check_labels is not None:
            self._check_labels(y)
        weight = None if self._weight is None else labels[self._weight]
        return _tensors(keras.utils.pack_x_y_sample_weight(x, y, weight))

    # -- what workers do -----------------------------------------------------------------------

    def begin(self) -> None:
        self._untried = True
        self._assign(self._initial)

    def update(self, features: Arrays, labels: Arrays) -> np.ndarray:
        with using_keras_state(self._state):
            data = self._data(features, labels)
            if self._untried and len(next(iter(features.values()))) > 1:
                self._untried = False
                self._probe(data)
            output: np.ndarray = self._step(data).numpy()
        return output

    def _probe(self, data: Nest) -> None:
        """Check that metrics and losses do not depend on which rows are in a batch together."""
        if len(keras.tree.flatten(data)[0]) == 2:  # too few for parts of unequal size
            data = tf.nest.map_structure(lambda value: tf.concat([value, value], 0), data)
        rows = len(keras.tree.flatten(data)[0])
        first, second = slice(0, rows // 3), slice(rows // 3, rows)

        def after(*parts: slice) -> tuple[list[State], dict[str, np.ndarray]]:
            self._assign(self._initial)
            for part in parts:
                self._step(rows_of(data, part))
            results = {name: np.asarray(value) for name, value in self._plain_results().items()}
            return [values_of(m.variables) for m in self._metrics], results

        with unchanged(self._model, self._variables):
            (_, whole), (_, again) = after(slice(0, rows)), after(slice(0, rows))
            states = [after()[0], after(first)[0]]
            results = results_of(self._metrics)
            states.append(after(second)[0])
            both, parts = after(first, second)
            for metric, result, *values in zip(self._metrics, results, *states, both, strict=True):
                advice = "Keep sums, or ask for other metrics by name, metrics=[…]"
                check_merge(metric, values, result, advice)
        for name, value in whole.items():
            # What is random shows nothing.
            if close(value, again[name]) and not close(value, parts[name]):
                title = loss_title(self._model) if name.endswith("loss") else f"metric {name!r}"
                raise ModelError(
                    f"{title} of model {self._model.name!r} is not a mean over the batch's rows, "
                    "so it has no exact value over all rows; keep it in a keras.metrics.Mean, or "
                    "request other metrics by name, metrics=[…]"
                )

    def take_sums(self) -> list[np.ndarray]:
        pairs = zip(self._variables, self._initial, strict=True)
        sums = [np.array(variable, np.float64) - initial for variable, initial in pairs]
        self._assign(self._initial)
        return sums

    def results(self, sums: Sequence[np.ndarray]) -> dict[str, LogValue]:
        with using_keras_state(self._state):
            self._assign([i + s for i, s in zip(self._initial, sums, strict=True)])
            results = self._plain_results()
            self._assign(self._initial)
        return results

    def _plain_results(self) -> dict[str, LogValue]:
        return {name: value for part in self._results() for name, value in plain(part).items()}

    def _assign(self, values: Sequence[np.ndarray]) -> None:
        for variable, value in zip(self._variables, values, strict=True):
            variable.assign(tf.cast(value, variable.dtype))


def _check_no_custom_metrics(model: keras.Model) -> None:
    """Check that Keras computes the results of a compiled model, not a custom method.

    Raises:
        ModelError: a custom method computes the results.
    """
    for name in ("test_step", "compute_metrics"):
        if getattr(type(model), name) is not getattr(keras.Model, name):
            raise ModelError(
                f"{name} of model {model.name!r} is custom, and its results are known to "
                "trainings only; ask for metrics, metrics=['accuracy', …]"
            )


def _tensors(values: Nest) -> Nest:
    return tf.nest.map_structure(tf.convert_to_tensor, values)


def _depends_on_batch(
    reduction: str | None, mask: object | None, sample_weight: object | None, **_: object
) -> str:
    """Return the reason why a loss is no mean over rows; ``""`` if it is one."""
    if reduction in (None, "none", "sum"):
        return f"has reduction={reduction!r}"
    if mask is not None:
        return "is a mean over what is not masked"
    if reduction == "mean_with_sample_weight" and sample_weight is not None:
        return "is a mean by sample weights (reduction='mean_with_sample_weight')"
    return ""
