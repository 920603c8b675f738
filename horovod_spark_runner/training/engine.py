"""Interface of a framework: write an `Engine` to train with another one.

An engine is the object ``ENGINE`` of a module, and is found by that module's dotted name, which
travels to the ranks in `ModelSource.engine`. The driver imports the module, too: it must import
its framework at use only. A model's function says its engine by an attribute ``horovod_engine``
with that name, or by a class that has this attribute and stands in its return annotation or in its
code, as `TorchModel` does; without one, it is Keras'.

On a rank, `Engine.trainee` gives a `Trainee`, which is where most of the work is: a step on a batch
whose gradients go through the synchroniser, metrics as sums that can be merged, and the variables
that are kept. The loop, checkpoints, the timing of callbacks, restarts, preemption and reports are
the project's own.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from ..checkpoint.run_directory import RunDirectory
from ..errors import InvalidInputError
from ..frameworks import KERAS
from ..storage.contents import Contents
from ..storage.filesystem import Location
from ..sync.synchroniser import Collectives, Synchroniser
from .detect_engine import detect_engine
from .onnx import ClassColumn
from .spec import Binding, ModelNames, ModelSource, TrainingSpec
from .trained_model import Model, Recipe, StoredModel
from .trainee import Evaluator, Question
from .warm_start import WeightsFormat

if TYPE_CHECKING:
    from mpi4py import MPI

    from .trainee import Trainee

# What models are exported to: TensorFlow's format, Keras' own, and the one of many runtimes.
SAVED_MODEL, KERAS_FILE, ONNX, TORCH_EXPORT = "saved_model", "keras", "onnx", "torch_export"
# How the names of those end that are one file.
SUFFIXES = {KERAS_FILE: ".keras", ONNX: ".onnx", TORCH_EXPORT: ".pt2"}
# What is in every SavedModel, a folder.
GRAPH_FILE = "saved_model.pb"


class Engine(Protocol):
    """One framework."""

    @property
    def modules(self) -> Sequence[str]:
        """Modules that ranks import while they connect; they must not call MPI or a GPU."""
        ...

    @property
    def weights_formats(self) -> Sequence[WeightsFormat]:
        """Formats of initial weights besides runs, for `Trainee.load_initial_weights`."""
        ...

    @property
    def export_formats(self) -> Sequence[str]:
        """Export formats of models."""
        ...

    # -- on the driver -------------------------------------------------------------------------

    def source(self, model: object, custom_objects: Mapping[str, object] | None) -> ModelSource:
        """Return the source for ``run_training``'s ``model_fn``.

        Raises:
            ModelError: this is no way to make a model.
            InvalidInputError: ``custom_objects`` cannot be used.
        """
        ...

    def check_callbacks(self, callbacks: object) -> None:
        """Check as much of ``callbacks`` as shows without the framework.

        Raises:
            InvalidInputError: they are none of this framework.
        """
        ...

    def names(self, source: ModelSource) -> ModelNames:
        """Return the names of the model's inputs and outputs. In a Spark Python worker.

        Called where ``run_training`` gets no ``feature_cols``.

        Raises:
            ModelError: ``source`` gives no model.
        """
        ...

    # -- on the ranks --------------------------------------------------------------------------

    def begin(self, seed: int, environment: Mapping[str, str]) -> None:
        """Make the framework ready on this rank, which has joined MPI, and seed its generators.

        Raises:
            EnvironmentProblem: an environment variable makes it another than what is trained here.
        """
        ...

    def collectives(self) -> Collectives:
        """Return sums of the framework's tensors over all ranks."""
        ...

    def trainee(self, spec: TrainingSpec, world: MPI.Comm, synchroniser: Synchroniser) -> Trainee:
        """Return the model on this rank, built from ``spec.model``.

        Raises:
            ModelError: it cannot be trained here, or not on these columns.
            InvalidInputError: callbacks cannot be used.
        """
        ...

    # -- the trained model ---------------------------------------------------------------------

    def adopt(
        self,
        directory: RunDirectory,
        model: Any,
        inputs: Binding | None,
        custom_objects: Mapping[str, object],
        signature: str = "",
    ) -> Any:
        """Write a model that was trained elsewhere as a training leaves it. On the driver.

        Args:
            directory: a directory without a model.
            model: the model, or the path or URL of its file.
            inputs: the columns of its inputs; ``None`` for the names by convention.
            custom_objects: the user's own classes and functions by name.
            signature: what to call of a format that offers several things to call, or the name of
                a format; ``""`` for the engine's own.

        Returns:
            What `Trainee.save` does.

        Raises:
            ModelError: it cannot be predicted with.
        """
        ...

    def parts(
        self,
        model: StoredModel,
        source: ModelSource | None,
        saved: Any,
        custom_objects: Mapping[str, object],
    ) -> Any:
        """Return the parts that a trained model is rebuilt from: `Recipe.parts`. On the driver.

        Args:
            model: its files.
            source: builds it; ``None`` if what is stored has to do.
            saved: what `Trainee.save` returned; ``None`` for an earlier run's model.
            custom_objects: the user's own classes and functions by name.

        Raises:
            RunDirectoryError: a file is damaged, or something of the user's is needed.
        """
        ...

    def load(self, recipe: Recipe) -> Model:
        """Return the function from feature columns to the outputs. In a Python worker of Spark's.

        It is called with any number of rows, or with exactly `Recipe.batch_size`.

        Raises:
            ModelError: what was built is not the model that was trained.
        """
        ...

    def model(self, recipe: Recipe) -> Any:
        """Return the framework's own model, with its weights, to be used on the driver.

        Raises:
            ModelError: what was built is not the model that was trained.
        """
        ...

    def held(self, parts: Any) -> Mapping[str, bytes | Contents]:
        """Return the files, by name, that `Recipe.own` holds.

        They suffice to make the model again from storage; none if what it was made from does not.
        """
        ...

    def check_export(self, format: str, names: Sequence[str], transformed: Collection[str]) -> None:
        """Check as much of an export as shows without the model. On the driver.

        Args:
            format: what to export to.
            names: what the feature columns are called there.
            transformed: feature columns that were trained with a transform.

        Raises:
            InvalidInputError: there is no such format.
            ModelError: a column cannot be an input there.
        """
        ...

    def export(
        self,
        recipe: Recipe,
        format: str,
        columns: Sequence[str],
        outputs: Sequence[str],
        target: Location,
        classes: Sequence[ClassColumn] = (),
    ) -> None:
        """Write the model in a format that other programs read. On the driver.

        Args:
            recipe: the model.
            format: what to export to.
            columns: what the feature columns are called there, in their order.
            outputs: what its outputs are called there, in their order.
            target: the place, a folder or file that is replaced.
            classes: columns of classes, in place of the outputs they are made of.

        Raises:
            ModelError: the format cannot hold the model.
            InvalidInputError: there is no such format, or it has no columns of classes.
            EnvironmentProblem: a package that the format needs is not installed.
            OSError: storage fails.
        """
        ...

    def describe_outputs(self, recipe: Recipe) -> tuple[list[dict[str, object]], str]:
        """Return the fields of each `OutputSpec` of the model, or none and why.

        Asked in a Python worker of Spark's, for a model that another function builds than the one
        that was trained.

        Raises:
            ModelError: it is not the model that was trained.
        """
        ...

    # -- its evaluation ------------------------------------------------------------------------

    def portable_metrics(self, metrics: object) -> object:
        """Return ``metrics`` of `TFTransformer.evaluate` in a form that can be pickled.

        On the driver, where the framework is loaded only if it made a metric that was given.

        Raises:
            InvalidInputError: something is no metric.
        """
        ...

    def evaluator(self, recipe: Recipe, question: Question) -> Evaluator:
        """Return the model's evaluator. In a Spark Python worker.

        Raises:
            ModelError: the model cannot be evaluated exactly; the message names the metric or loss.
            InvalidInputError: a metric is not known, or does not fit the model.
        """
        ...


def engine_of(model: object, default: str = KERAS) -> str:
    """Return the name of the engine for ``run_training``'s ``model_fn``.

    Args:
        model: what makes the model.
        default: the engine where nothing tells another.

    Raises:
        InvalidInputError: its ``horovod_engine`` is no name.
    """
    name = getattr(model, "horovod_engine", None)
    function = model
    while name is None and isinstance(function, functools.partial):
        function = function.func
        name = getattr(function, "horovod_engine", None)
    if name is None:
        name = detect_engine(model) or default
    if not isinstance(name, str):
        raise InvalidInputError(
            f"horovod_engine must be the dotted name of an engine's module, got {name!r}"
        )
    return name


def check_format(format: object, formats: Sequence[str]) -> None:
    """Check that ``format`` is one of those an engine exports to.

    Raises:
        InvalidInputError: it is not.
    """
    if format not in formats:
        listed = ", ".join(map(repr, formats)) or "none for a model of this engine"
        raise InvalidInputError(f"there is no format {format!r} to export to; there is {listed}")


def engine_named(name: str) -> Engine:
    """Return the engine of the module ``name``.

    Raises:
        InvalidInputError: there is no such module, or it has no engine.
    """
    try:
        engine: Engine = importlib.import_module(name).ENGINE
    except (ImportError, AttributeError) as error:
        raise InvalidInputError(f"engine {name!r} cannot be had: {error}") from error
    return engine
