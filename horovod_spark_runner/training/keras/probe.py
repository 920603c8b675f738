"""Whether what the user wrote can be computed over several ranks: tried on parts of a batch.

Keras's own metrics keep sums, and nearly all its losses are means over rows (sums are known).
What the user's own metrics, loss functions and layers compute is not known, so it is tried once,
before the first step, and so are Keras' few losses that are no means: the first batch of rank 0 is
cut in two. With the weights a model begins with, all rows may happen to be equally wrong, and a
layer of zeros predicts the same for each. So functions of labels and predictions are tried again
with each prediction put to the row after its own, and with predictions that differ from row to row.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import keras
import numpy as np
import tensorflow as tf
from numpy.typing import ArrayLike

from ...errors import ModelError
from ...launch.worker.reporting import notify
from ..parting import parting_shares
from .generators import nothing_drawn
from .losses import merged_mask, noting_masks
from .metric_state import SUM, counting_means, merge_of, metric_variables, variables_of
from .outputs import pick, unchanged
from .protocols import CompiledMetrics, Loss, Metric, Nest, OutputLoss

_RTOL, _ATOL = 1e-3, 1e-5

# Keras' own losses that are ratios over a whole batch, or compare its rows with each other.
_OF_WHOLE_BATCHES = (keras.losses.circle, keras.losses.dice, keras.losses.tversky)

# The values of a metric's variables.
State = list[np.ndarray]


class Probe:
    """Tries a model on a batch; leaves no trace in it.

    Args:
        model: the model, all its metrics and losses built.
        data: one batch, as its steps take it; of three rows or more, if all is to be exact.
        metrics: compiled metrics to try in place of the model's losses and metrics.
        exact: try also what is Keras' own, on parts of unequal size, with a number for a whole
            batch counted by its rows, and refuse what is neither a mean nor a sum.
    """

    def __init__(
        self,
        model: keras.Model,
        data: Nest,
        *,
        metrics: CompiledMetrics | None = None,
        exact: bool = False,
    ) -> None:
        self._model = model
        self._exact = exact
        self._alone = metrics is not None
        self._metrics: CompiledMetrics | None = metrics or getattr(model, "_compile_metrics", None)
        self._said: set[str] = set()
        self._x, self._y, _ = keras.utils.unpack_x_y_sample_weight(data)
        rows = len(keras.tree.flatten(self._x)[0])
        # Halves that are equally large are how ranks share a batch; over unequal parts, a metric
        # that counts batches instead of rows is found out.
        cut = rows // 3 if exact else rows // 2
        self._parts = [slice(0, cut), slice(cut, rows), slice(0, rows)]
        even = rows if exact else cut * 2
        self._metric_parts = [slice(0, cut), slice(cut, even), slice(0, even)]
        # Of halves that are equally large, a mean and half a sum are the same for equal rows only.
        self._share = cut / rows if rows else 0.0

    def run(self) -> None:
        """Check metrics and losses of the user's own.

        Raises:
            ModelError: a metric keeps something else than sums, or a loss is a sum over rows; if
                all is to be exact, also a loss or metric that is no mean over rows.
        """
        given = () if self._metrics is None else self._metrics.metrics
        metrics = [m for m in given if self._exact or _is_own_metric(m)]
        losses = [] if self._alone else self._losses()
        if self._share == 0.0 or not (metrics or losses or self._model.losses):
            return
        variables = [*metric_variables(self._model), *variables_of(given)]
        with nothing_drawn(), unchanged(self._model, variables):
            outputs, added = zip(*(self._call(part) for part in self._parts), strict=True)
            self._check_losses(losses, outputs)
            if not self._alone:
                self._check_added(added)
            if self._y is not None and _have_rows(outputs[-1], self._parts[-1].stop):
                displaced = self._displaced(outputs)
                self._check_losses(losses, displaced)
                for whole in (outputs[-1], displaced[-1]):
                    self._check_metrics(metrics, whole)
                varied = keras.tree.map_structure(_varied, displaced[-1])
                parts = [rows_of(varied, part) for part in self._parts]
                for loss in losses:
                    _where_it_can(self._check_losses, [loss], parts)
                _where_it_can(self._check_metrics, metrics, varied)

    def _losses(self) -> list[OutputLoss]:
        compiled = getattr(self._model, "_compile_loss", None)
        flat = getattr(compiled, "_flat_losses", None) or ()
        return [loss for loss in flat if self._exact or _is_to_be_tried(loss.loss)]

    def _call(self, part: slice) -> tuple[Nest, list[float]]:
        outputs = self._model(rows_of(self._x, part), training=False)
        return outputs, [float(np.mean(loss)) for loss in self._model.losses]

    def _displaced(self, outputs: Sequence[Nest]) -> list[Nest]:
        """Return the outputs of the parts with each row's where the row after it was."""
        whole = keras.tree.map_structure(
            lambda value: keras.ops.roll(value, 1, axis=0), outputs[-1]
        )
        return [rows_of(whole, part) for part in self._parts]

    def _check_metrics(self, own: Sequence[Metric], outputs: Nest) -> None:
        compiled = self._metrics
        if compiled is None or not own:
            return

        def update(part: slice) -> None:
            y, given = rows_of(self._y, part), rows_of(outputs, part)
            if not self._exact:
                compiled.update_state(y, given)
                return
            with counting_means(lambda: tf.constant(part.stop - part.start, tf.float32)):
                compiled.update_state(y, given)

        def state_after(*parts: slice) -> tuple[list[State], list[Nest]]:
            compiled.reset_state()
            for part in parts:
                update(part)
            states = [[np.array(v) for v in metric.variables] for metric in own]
            return states, [keras.tree.map_structure(np.array, m.result()) for m in own]

        first, second, all_rows = self._metric_parts
        (one, _), (other, _) = state_after(first), state_after(second)
        both, results = state_after(first, second)
        _, whole = state_after(all_rows)
        self._check_sums(own, one, other, both)
        for metric, in_turn, at_once in zip(own, results, whole, strict=True):
            pairs = zip(keras.tree.flatten(in_turn), keras.tree.flatten(at_once), strict=True)
            if not all(close(a, b) for a, b in pairs):
                self._say(f"metric {metric.name!r} of model {self._model.name!r}", "told")

    def _check_sums(
        self,
        own: Sequence[Metric],
        first: Sequence[State],
        second: Sequence[State],
        both: Sequence[State],
    ) -> None:
        advice = "Keep sums, or ask for other metrics by name, metrics=[…]"
        if not self._exact:
            advice = (
                "Keep sums, give the variable another aggregation ('mean', 'only_first_replica'), "
                "or train with num_workers=1"
            )
        for metric, one, other, whole in zip(own, first, second, both, strict=True):
            for variable, a, b, c in zip(metric.variables, one, other, whole, strict=True):
                if merge_of(variable) == SUM and not close(a + b, c):
                    raise ModelError(
                        f"metric {metric.name!r} ({type(metric).__name__}) cannot be computed over "
                        f"several processes: its variable {variable.name!r} is not a sum over rows "
                        f"(a maximum or a running value, say). {advice}"
                    )

    def _check_losses(self, own: Sequence[OutputLoss], outputs: Sequence[Nest]) -> None:
        for loss in own:
            values, counts = [], []
            for part, given in zip(self._parts, outputs, strict=True):
                y_true, y_pred = rows_of(self._y, part), given
                y_true, y_pred = (_only(pick(one, loss.path)) for one in (y_true, y_pred))
                with noting_masks(loss.loss) as masks:
                    values.append(float(np.sum(loss.loss(y_true, y_pred))))
                mask = merged_mask(y_pred, masks)
                if mask is not None:
                    counts.append(float(np.sum(mask)))
            share = self._share
            if counts:  # a mean over what is not masked, whose denominator is exchanged
                if self._exact or len(counts) < len(values) or not sum(counts[:2]):
                    continue
                share = counts[0] / sum(counts[:2])
            summed = loss.loss.reduction == "sum"
            self._judge(f"loss {loss.loss.name!r}", values, share, summed=summed)

    def _check_added(self, added: Sequence[Sequence[float]]) -> None:
        for number, values in enumerate(zip(*added, strict=False)):
            title = f"loss {number} that a layer adds (add_loss)"
            self._judge(title, list(values), self._share, summed=False)

    def _judge(self, title: str, values: Sequence[float], share: float, *, summed: bool) -> None:
        """Refuse a sum over rows, and warn of what is neither a sum nor a mean.

        Args:
            title: what it is.
            values: those of the two parts and of the whole.
            share: of the first part in a mean.
            summed: whether it is known to be a sum.
        """
        first, second, whole = values
        mean = share * first + (1 - share) * second
        if close(whole, first + second if summed else mean):
            return
        if close(whole, first + second):
            raise ModelError(
                f"{title} of model {self._model.name!r} is a sum over the rows of a batch, which "
                "depends on how many ranks share them; let it return the mean over rows, or the "
                "values of all rows (keras.losses.Loss with reduction='sum' is a sum that is known)"
            )
        self._say(f"{title} of model {self._model.name!r}", "trained")

    def _say(self, what: str, done: str) -> None:
        what = f"{what} is no mean over the rows of a batch"
        if self._exact:
            raise ModelError(
                f"{what}: its value depends on which rows are in a batch together, so that it has "
                "no exact value over all rows; ask for other metrics by name, metrics=[…]"
            )
        text = (
            f"{what}: every rank computes it from its own rows, and the mean of that is {done}, "
            "which is another number than that of the global batch"
        )
        if text not in self._said:
            self._said.add(text)
            notify(text, warn=True)


def _where_it_can(check: Callable[..., None], *arguments: object) -> None:
    """Check what takes the predictions: no model gives these, and what was written may say so."""
    try:
        check(*arguments)
    except ModelError:
        raise
    except Exception:
        return


def _varied(values: tf.Tensor) -> tf.Tensor:
    """Return predictions of which no two are equal, about as large; a probability stays one."""
    if not keras.backend.is_float_dtype(keras.backend.standardize_dtype(values.dtype)):
        return values
    shares = keras.ops.cast(parting_shares(np.shape(values)), values.dtype)
    return keras.ops.where(values == 0, shares, values * (1 - shares))


def _is_own(thing: object, method: str) -> bool:
    """Tell whether ``method`` of a Keras object is written by the user."""
    module = getattr(getattr(type(thing), method), "__module__", "")
    return not str(module).startswith("keras.")


def _only(value: Nest) -> Nest:
    """Return the tensor of a list of a single one, which Keras takes for that one."""
    leaves = keras.tree.flatten(value)
    return leaves[0] if len(leaves) == 1 else value


def _have_rows(values: Nest, rows: int) -> bool:
    return all(np.shape(value)[:1] == (rows,) for value in keras.tree.flatten(values))


def _is_own_function(function: object) -> bool:
    return not str(getattr(function, "__module__", "")).startswith("keras.")


def _is_own_metric(metric: keras.metrics.Metric) -> bool:
    function = getattr(metric, "_fn", None)  # of a MeanMetricWrapper
    return _is_own(metric, "update_state") or (function is not None and _is_own_function(function))


def _is_to_be_tried(loss: Loss) -> bool:
    function = getattr(loss, "fn", None)
    if function is None:
        return _is_own(loss, "call")
    return _is_own_function(function) or function in _OF_WHOLE_BATCHES


def rows_of(values: Nest, part: slice) -> Nest:
    """Return some rows of all arrays."""
    return keras.tree.map_structure(lambda value: value[part], values)


def close(value: ArrayLike, other: ArrayLike) -> bool:
    """Tell whether two results differ by no more than rounding."""
    return bool(np.allclose(value, other, rtol=_RTOL, atol=_ATOL, equal_nan=True))
