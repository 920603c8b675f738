"""A model on a rank, as the training loop knows it. Knows no framework."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from ..checkpoint.config_diff import ModelChanges, diff_models
from ..checkpoint.files import LogValue, PlainLogs
from ..checkpoint.model_state import TrainingVariables, Variable
from ..checkpoint.run_directory import RunDirectory
from ..errors import ModelError
from ..storage.arrays import Arrays
from ..typed_json import JsonObject
from .epochs import Step
from .learning_rate import Rates
from .progress import Logs
from .spec import OutputSpec, WarmStart
from .traces import Tracer
from .trained_model import Targets


class Hooks:
    """The callbacks of a training on this rank; this one stands for none.

    They are called on all ranks, in the order of ``Model.fit``. A subclass overrides what its
    framework has.

    Attributes:
        watch_begin: whether one does something before a training step.
        watch_end: whether one does something after it.
        watch_test: whether one does something before or after a step of the evaluation.
        stop_training: true once one of this rank asks for the end of the training.
        stop_evaluating: true once one of this rank asks for the end of the evaluation.
        initial_epoch: whole epochs of what `train_begin` has restored; 0 if it has nothing.
        restored_first: whether callbacks get their state before `train_begin`, not after it.
        restored: the epoch, counted from 1, whose weights `train_end` has restored, and what
            restored them; empty if none, or unknown.
    """

    watch_begin = False
    watch_end = False
    watch_test = False
    stop_training: bool = False
    stop_evaluating: bool = False
    initial_epoch: int = 0
    restored_first = False
    restored: str = ""

    def train_begin(self) -> None:
        """Before the first step, of a resumed run as well."""

    def train_end(self, logs: Logs | None) -> None:
        """After the last step; the variables may be set here for the last time.

        Args:
            logs: those of the last epoch; ``None`` if no epoch was left to train.
        """

    def epoch_begin(self, epoch: int) -> None:
        """Before the first step of an epoch, counted from 0."""

    def epoch_end(self, epoch: int, logs: Logs) -> dict[str, object]:
        """End an epoch and its evaluation; return the logs with additions by callbacks."""
        return dict(logs)

    def train_step_begin(self, number: int) -> None:
        """Before a step, by its number in the epoch; only if `watch_begin`."""

    def train_step_end(self, number: int, logs: Logs | None) -> None:
        """After a step; only if `watch_end`, and ``logs`` are those of all ranks then."""

    def test_begin(self) -> None:
        """Before an evaluation."""

    def test_end(self, logs: Logs) -> None:
        """After an evaluation."""

    def test_step_begin(self, number: int) -> None:
        """Before a step of the evaluation; only if `watch_test`."""

    def test_step_end(self, number: int, logs: Logs | None) -> None:
        """After a step of the evaluation; only if `watch_test`."""

    # -- their state in checkpoints ------------------------------------------------------------

    def snapshot(self) -> None:
        """Record the callbacks' attributes just after `train_begin`: only changes are state."""

    def restore_history(self, history: Sequence[PlainLogs]) -> None:
        """Restore the history of earlier attempts."""

    def capture(self) -> tuple[JsonObject, Arrays]:
        """Return the callbacks' state, as JSON and the arrays it refers to."""
        return {}, {}

    def restore(self, state: JsonObject, arrays: Arrays) -> None:
        """Restore the callbacks' state from `capture`."""


class Trainee(ABC):
    """A model on this rank, its optimizers and its metrics, all variables made.

    What an engine has to write is abstract: a step, the results of an epoch, what the model is and
    how it is saved. What a framework may lack has a default here. All ranks call the same methods
    in the same order, so these may use collectives.

    Attributes:
        columns: the columns that the arrays of a batch must hold.
        variables: what the ranks share and checkpoints hold.
    """

    columns: Sequence[str]
    variables: TrainingVariables

    # -- to be written -------------------------------------------------------------------------

    @abstractmethod
    def train_step(
        self, step: Step, requests: Sequence[bool], last: bool
    ) -> tuple[Logs | None, Sequence[float] | None]:
        """Train on this rank's part of a global batch, together with all other ranks.

        The gradients go through the synchroniser's ``gradients`` as a mean over this rank's rows,
        weighted by ``step.fraction``. A rank without rows takes part, too.

        Args:
            step: the batch, and this rank's part of the global batch's rows.
            requests: booleans that travel with the gradients.
            last: whether it is the last step of the epoch.

        Returns:
            The step's logs by name, ``None`` if it has none, and the sums over the ranks of what
            was ``requests``; ``None`` where the synchroniser carries nothing.
        """

    @abstractmethod
    def test_step(self, step: Step, last: bool) -> Logs | None:
        """Update the metrics with this rank's part of a global batch; return the step's logs."""

    @abstractmethod
    def reset_metrics(self) -> None:
        """Begin new sums, before an epoch and before an evaluation."""

    @abstractmethod
    def results(self, kind: str, logs: Logs | None, fraction: float) -> dict[str, object]:
        """Return the results of an epoch over the rows of all ranks.

        Args:
            kind: ``"train"`` or ``"test"``.
            logs: those of the last step.
            fraction: this rank's part of the last step's rows.
        """

    @abstractmethod
    def describe(self) -> JsonObject:
        """Return the properties that identify the model, as JSON; see `compare`."""

    @abstractmethod
    def save(self, directory: RunDirectory) -> Any:
        """Write the trained model, on rank 0.

        Returns:
            What the driver has to know besides, to be pickled; see `Engine.parts`.

        Raises:
            CheckpointError: it cannot be written.
        """

    # -- what a framework may lack -------------------------------------------------------------

    @property
    def has_complete_logs(self) -> bool:
        """True if the logs of the first step have the names of all results."""
        return True

    @property
    def steps_per_execution(self) -> int:
        """Steps from one call of the hooks of steps to the next."""
        return 1

    def hooks(self, *, steps: int, resumed: bool) -> Hooks:
        """Return the callbacks that were given.

        Args:
            steps: steps of an epoch.
            resumed: whether the run continues an earlier one.
        """
        return Hooks()

    def rates(self, scaling: str) -> Rates:
        """Return the learning rates, for the requested ``lr_scaling``.

        Raises:
            ModelError: they cannot be scaled.
        """
        raise ModelError(f"lr_scaling={scaling!r}: this model has no learning rate to scale")

    def compare(
        self, then: Mapping[str, Any], now: Mapping[str, object], *, in_epoch: bool
    ) -> ModelChanges:
        """Compare two results of `describe`: a checkpoint's, empty if there is none, and this one.

        Args:
            then: that of the checkpoint.
            now: that of this call's model.
            in_epoch: whether the checkpoint was taken within an epoch, whose sums are continued.
        """
        return ModelChanges(diff_models(then, now), record=dict(now))

    def outputs(self) -> Sequence[OutputSpec] | None:
        """Return the model's outputs in prediction; ``None`` if they are not determined yet."""
        return None

    def exchange_seconds(self) -> float | None:
        """Return the seconds that all steps so far have spent exchanging, and waiting for others.

        ``None`` where they cannot be separated from computing: then accounts hold both as
        one.
        """
        return None

    def tracer(self) -> Tracer | None:
        """Return the tracer of this rank's steps; ``None`` if the framework has none."""
        return None

    def learning_rates(self) -> dict[str, float]:
        """Return the learning rates of the step that was trained last, by names to show them."""
        return {}

    def load_initial_weights(self, start: WarmStart) -> None:
        """Load initial weights, on rank 0.

        Raises:
            ModelError: they do not fit.
        """
        raise ModelError(
            f"initial_weights={start.origin!r}: this model takes none; load them in model_fn"
        )

    def variables_were_set(self) -> None:
        """Recompute values derived from the variables."""

    def separate_random_streams(self, rank: int) -> None:
        """Give the framework's own generators a separate stream on this rank."""

    def generators(self) -> dict[str, Variable]:
        """Return the states of the framework's own random generators, by name."""
        return {}

    def metric_variables(self) -> Sequence[Variable]:
        """Return the sums of metrics with which an epoch resumes; sums over rows, on each rank."""
        return []

    def metric_merges(self) -> list[str]:
        """Return how each of `metric_variables` is merged over all ranks.

        ``"sum"``, ``"mean"``, ``"first"`` where rank 0's stands for all, or ``"join"`` where arrays
        of any length are put one after the other.
        """
        return ["sum"] * len(self.metric_variables())

    def metric_names(self) -> list[str]:
        """Return the names of the metrics, for messages."""
        return []

    def make_metrics(self) -> None:
        """Create metrics that are otherwise created at first use, before sums are restored."""

    @property
    def is_tried_alone(self) -> bool:
        """Whether `probe` is called where there is one rank, too."""
        return False

    def probe(self, step: Step) -> Sequence[str]:
        """Check, before a step, that several ranks can compute it exactly; leave no trace.

        Args:
            step: one with the same few rows on all ranks.

        Returns:
            Warnings of what several ranks compute differently from one process.

        Raises:
            ModelError: several ranks cannot compute the step exactly.
        """
        return ()

    def finish(self) -> None:
        """Bring the variables to their last values, after the last step."""


@dataclass(frozen=True)
class EvaluationRequest:
    """Evaluation requested of a model.

    Attributes:
        targets: the labels of its outputs.
        compiled: whether its own loss and metrics are requested.
        metrics: others, from `Engine.portable_metrics`; ``None`` for none.
    """

    targets: Targets
    compiled: bool = True
    metrics: object = field(default=None, repr=False)


class Evaluator(Protocol):
    """A model with the sums of its metrics, in a Python worker of Spark's."""

    def begin(self) -> None:
        """Begin with other rows."""
        ...

    def update(self, features: Arrays, labels: Arrays) -> np.ndarray:
        """Add rows.

        Args:
            features: the feature columns.
            labels: the columns of `EvaluationRequest.targets`.

        Returns:
            The model's first output for each row.

        Raises:
            ModelError: the rows show that a result would not be exact.
        """
        ...

    def take_sums(self) -> list[np.ndarray]:
        """Return the sums of the rows since the last call, for `merged_sums`."""
        ...

    def results(self, sums: Sequence[np.ndarray]) -> dict[str, LogValue]:
        """Return the results that follow from the `merged_sums` of all rows, by name.

        Numbers, and lists of numbers where a metric gives several.
        """
        ...


def merged_sums(parts: Sequence[Sequence[np.ndarray]]) -> list[np.ndarray]:
    """Merge the results of several calls of `Evaluator.take_sums`. Pure.

    Numbers are added up; arrays of bytes are put one after the other.
    """
    return [
        np.concatenate(arrays) if arrays[0].dtype == np.uint8 else np.sum(arrays, axis=0)
        for arrays in zip(*parts, strict=True)
    ]
