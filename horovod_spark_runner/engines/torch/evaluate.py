"""A trained PyTorch module and its metrics, evaluated on parts of the rows."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from ...checkpoint.files import LogValue
from ...errors import HorovodSparkError, InvalidInputError, ModelError, on_one_line
from ...frameworks import TORCH
from ...storage.arrays import Arrays
from ...training.sample_rows import repeat_rows
from ...training.trained_model import Recipe, with_model_fn
from ...training.trainee import EvaluationRequest
from .binding import TorchBatch, check_columns, target_of, to_tensor, to_tensors
from .loading import make_predictor, task_device, unsteady
from .losses import SUM
from .metrics import Metrics, Results, asks_accuracy, training_results
from .model import build_model, output_leaves, to_numpy
from .torch_model import TorchModel

# How far rounding may be off, relative to the value.
_TOLERANCE = 1e-4


class TorchEvaluator:
    """PyTorch implementation of `Evaluator`.

    Losses and metrics are sums over rows and what these are divided by, in float64.

    Args:
        recipe: how the module is made.
        request: what is asked of it.

    Raises:
        ModelError: the model cannot be evaluated exactly; the message names the metric or loss.
        InvalidInputError: a metric is not known, or does not fit the model.
    """

    def __init__(self, recipe: Recipe, request: EvaluationRequest) -> None:
        if recipe.batch_size is not None:
            raise ModelError(
                f"the program takes batches of exactly {recipe.batch_size} rows, and rows that "
                "fill the last one would count; export it for any number of rows"
            )
        self._called = make_predictor(recipe, task_device())
        targets = request.targets
        check_columns(targets.outputs.slots, {column.name: column for column in targets.columns})
        self._binding, self._weight = targets.outputs, targets.weight
        losses, metrics, model = None, list[Metrics](), None
        if request.compiled or asks_accuracy(request.metrics or ()):
            model = _trained_by(recipe, needed=request.compiled)
        if model is not None and request.compiled:
            _check_compiled(model)
            losses, compiled = training_results(model, targets.outputs, self._called.device)
            metrics.append(compiled)
        if request.metrics is not None:
            if self._weight is not None:
                raise InvalidInputError(
                    "metrics of PyTorch models do not weigh rows, as sample_weight_col "
                    "asks; give sample_weight_col=False, or metrics of Spark's, 'spark:…'"
                )
            loss = None if model is None else model.loss  # which tells classes
            metrics.append(_requested_metrics(request.metrics, self._called.device, loss))
        self._results = Results(losses, metrics, torch.device("cpu"))
        self._untried = True
        self._try(recipe, request)

    def _try(self, recipe: Recipe, request: EvaluationRequest) -> None:
        """Evaluate two rows, with labels of zeros, by which shapes show."""
        features = repeat_rows(recipe.sample_rows().inputs, 2)
        labels = {column.name: column.blank().repeat(2, 0) for column in request.targets.columns}
        try:
            self._add(self._tensors(features, labels))
        except HorovodSparkError:
            raise
        except Exception as error:  # a metric's or the user's own code may fail in any way
            raise InvalidInputError(
                f"{type(self._called.module).__name__} cannot be evaluated by what was asked for: "
                f"{type(error).__name__}: {on_one_line(error)}"
            ) from error
        self._results.reset()

    def begin(self) -> None:
        self._untried = True
        self._results.reset()

    def update(self, features: Arrays, labels: Arrays) -> np.ndarray:
        batch = self._tensors(features, labels)
        if self._untried and batch.rows > 1:
            self._untried = False
            self._check_parts(batch, features)
        return self._add(batch)

    def take_sums(self) -> list[np.ndarray]:
        sums = [one.numpy() for one in self._results.variables]
        self._results.reset()
        return sums

    def results(self, sums: Sequence[np.ndarray]) -> dict[str, LogValue]:
        return self._results.merge([[part] for part in sums])

    def _tensors(self, features: Arrays, labels: Arrays) -> TorchBatch:
        device = self._called.device
        # A module may change its inputs, with which it is compared.
        inputs = [value.clone() for value in self._called.feed.values(features, device)]
        weights = None
        if self._weight is not None:
            weights = to_tensor(labels[self._weight], device).reshape(-1)
        return TorchBatch(
            inputs, to_tensors(labels, self._binding.slots, device), weights, len(inputs[0])
        )

    def _add(self, batch: TorchBatch) -> np.ndarray:
        """Add rows to the results; return the first output."""
        terms = []
        with torch.inference_mode():
            outputs = self._called([value.clone() for value in batch.inputs])
            if self._results.losses is not None:
                terms = self._results.losses.terms(
                    outputs, batch.labels, batch.inputs, batch.weights
                )
            summed = [term.name for term in terms if term.kind == SUM]
            if summed:
                raise ModelError(
                    f"loss {summed[0]!r} is a sum over the rows of a batch: its value depends on "
                    "how many are in one, so that it has no exact value over all rows; ask for "
                    "metrics instead, metrics=[…] without 'compiled'"
                )
            target = target_of(self._binding, batch.labels, batch.inputs)
            self._results.add(outputs, target, terms, 1.0)
            return to_numpy(next(output_leaves(outputs))[1])

    def _check_parts(self, batch: TorchBatch, features: Arrays) -> None:
        """Check that no value depends on which rows are in a batch together.

        Raises:
            ModelError: one does; the message names it.
        """
        every = list(range(batch.rows))
        if len(every) == 2:  # too few for parts of unequal size
            every *= 2
        before = [one.numpy() for one in self._results.variables]

        def after(*parts: list[int]) -> dict[str, float]:
            self._results.sums.reset()
            for part in parts:
                self._add(_rows_of(batch, part))
            return self._results.sums.results()

        cut = len(every) // 3
        whole, apart = after(every), after(every[:cut], every[cut:])
        for variable, value in zip(self._results.variables, before, strict=True):
            variable.assign(value)
        for name, mean in whole.items():
            if np.isclose(
                mean, apart.get(name, np.nan), rtol=_TOLERANCE, atol=1e-6, equal_nan=True
            ):
                continue
            if why := unsteady(self._called, features):
                raise ModelError(
                    f"{name!r} has no exact value over all rows: "
                    f"{type(self._called.module).__name__} {why}, in evaluation mode as well"
                )
            raise ModelError(
                f"{name!r} is not a mean over rows: its value depends on which rows are in a batch "
                "together, so it has no exact value over all rows. Return one value per row, "
                "or a pair of a sum and what it is divided by; or ask for other metrics, "
                "metrics=[…] without 'compiled'"
            )


def _trained_by(recipe: Recipe, *, needed: bool) -> TorchModel | None:
    """Return the `TorchModel` of a model's training, ``None`` where it is unknown.

    Raises:
        ModelError: it is ``needed``.
    """
    source = recipe.parts.source
    if source is None or source.function is None:
        if not needed:
            return None
        raise ModelError(
            "what the module was trained with is not known, as code is not kept in storage: give "
            f"the function that returns the TorchModel, {with_model_fn(TORCH)}, or ask for metrics "
            "without 'compiled', metrics=['accuracy', …]"
        )
    try:
        return build_model(source)[0]
    except ModelError:  # it gives a module alone
        if needed:
            raise
        return None


def _check_compiled(model: TorchModel) -> None:
    """Check that a model says what to evaluate it by."""
    if model.loss is None and not model.metrics:
        raise ModelError(
            "the TorchModel has a train_step and no loss or metrics to evaluate by; ask for some, "
            "metrics=[…]"
        )


def _requested_metrics(metrics: object, device: torch.device, loss: object) -> Metrics:
    try:
        return Metrics(metrics, device, loss)  # type: ignore[arg-type]
    except ModelError as error:  # there, a metric is a part of the model
        raise InvalidInputError(str(error)) from error


def _rows_of(batch: TorchBatch, rows: list[int]) -> TorchBatch:
    return TorchBatch(
        [value[rows] for value in batch.inputs],
        [value[rows] for value in batch.labels],
        None if batch.weights is None else batch.weights[rows],
        len(rows),
    )
