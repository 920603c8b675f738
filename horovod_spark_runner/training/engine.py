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

import contextlib
import functools
import importlib
import inspect
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from types import FunctionType, MethodType, ModuleType
from typing import TYPE_CHECKING, Any, Protocol

from ..checkpoint.run_directory import RunDirectory
from ..errors import InvalidInputError
from ..frameworks import KERAS, TORCH
from ..storage.contents import Contents
from ..storage.filesystem import Location
from ..sync.synchroniser import Collectives, Synchroniser
from .spec import Binding, ModelNames, ModelSource, TrainingSpec
from .trained_model import Model, Recipe, StoredModel
from .trainee import EvaluationRequest, Evaluator
from .warm_start import WeightsFormat

if TYPE_CHECKING:
    from mpi4py import MPI

    from .trainee import Trainee

# Export formats: TensorFlow's, Keras' own, and ONNX.
SAVED_MODEL, KERAS_FILE, ONNX, TORCH_EXPORT = "saved_model", "keras", "onnx", "torch_export"
# Suffixes of formats that are one file.
SUFFIXES = {KERAS_FILE: ".keras", ONNX: ".onnx", TORCH_EXPORT: ".pt2"}
# A file in every SavedModel, which is a folder.
GRAPH_FILE = "saved_model.pb"


class Engine(Protocol):
    """One framework."""

    @property
    def modules(self) -> Sequence[str]:
        """Modules that ranks import while they connect; they must not call MPI or a GPU."""
        ...

    @property
    def tries_apart(self) -> bool:
        """Whether rank 0 needs a side process, in which `Trainee.probe` tries the first step."""
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
        model: object,
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
        saved: object,
        custom_objects: Mapping[str, object],
        trusted: bool = False,
    ) -> Any:
        """Return the parts that a trained model is rebuilt from: `Recipe.parts`. On the driver.

        Args:
            model: its files.
            source: builds it; ``None`` if what is stored has to do.
            saved: what `Trainee.save` returned; ``None`` for an earlier run's model.
            custom_objects: the user's own classes and functions by name.
            trusted: whether code that the files hold may be run.

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

    def stored_files(self, parts: Any) -> Mapping[str, bytes | Contents]:
        """Return the files, by name, that `Recipe.parts` holds.

        They suffice to load the model from storage; empty if they do not.
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
    ) -> None:
        """Write the model in a format that other programs read. On the driver.

        Args:
            recipe: the model.
            format: what to export to.
            columns: what the feature columns are called there, in their order.
            outputs: what its outputs are called there, in their order.
            target: the place, a folder or file that is replaced.

        Raises:
            ModelError: the format cannot hold the model.
            InvalidInputError: there is no such format.
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

    def evaluator(self, recipe: Recipe, request: EvaluationRequest) -> Evaluator:
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
        name = _detect_engine(model) or default
    if not isinstance(name, str):
        raise InvalidInputError(
            f"horovod_engine must be the dotted name of an engine's module, got {name!r}"
        )
    return name


def check_format(format: object, formats: Sequence[str]) -> None:
    """Check that ``format`` is one of those an engine exports to.

    Raises:
        InvalidInputError: the engine does not export to ``format``.
    """
    if format not in formats:
        listed = ", ".join(map(repr, formats)) or "none"
        raise InvalidInputError(f"unknown export format {format!r}; this model has {listed}")


def engine_named(name: str) -> Engine:
    """Return the engine of the module ``name``.

    Raises:
        InvalidInputError: there is no such module, or it has no engine.
    """
    try:
        engine: Engine = importlib.import_module(name).ENGINE
    except (ImportError, AttributeError) as error:
        raise InvalidInputError(f"engine {name!r} cannot be imported: {error}") from error
    return engine


_PACKAGE = __name__.partition(".")[0]
_TORCH_MODULE = "torch.nn.modules.module.Module"
# PyTorch's engine refuses these, with what trains them.
LIGHTNING_MODULES = (
    "lightning.pytorch.core.module.LightningModule",
    "pytorch_lightning.core.module.LightningModule",
)


def _detect_engine(model: object) -> str | None:
    """Return the ``horovod_engine`` of the class that ``model`` returns, if that shows.

    A function's return annotation counts first, then the names in its code: classes, and functions
    by their annotation. A module of PyTorch's own is for that engine, which tells how it is to be
    given.
    """
    model = _unwrapped(model)
    if any(_name(cls) == _TORCH_MODULE for cls in _classes(model)):
        return TORCH
    function = _function(model)
    if function is None:
        return None
    code = function.__code__
    called = list(_named(function, [*code.co_names, *code.co_freevars]))
    annotations = [_annotated(each) for each in called if isinstance(each, FunctionType)]
    for thing in (_annotated(function), *called, *annotations):
        engine = getattr(thing, "horovod_engine", None) if isinstance(thing, type) else None
        if isinstance(engine, str):
            return engine
        if isinstance(thing, type) and any(
            _name(cls) in LIGHTNING_MODULES for cls in thing.__mro__
        ):
            return TORCH
    return None


def _name(cls: type) -> str:
    return f"{cls.__module__}.{cls.__name__}"


def _annotated(function: FunctionType) -> object:
    """Return the class of a function's return annotation."""
    annotation = function.__annotations__.get("return")
    if not isinstance(annotation, str):
        return annotation
    text = annotation.strip("'\"").rpartition(".")[2]
    return next((each for each in _named(function, [text]) if isinstance(each, type)), None)


def _unwrapped(model: object) -> object:
    """Return the function behind a ``functools.partial``."""
    while isinstance(model, functools.partial):
        model = model.func
    return model


def _classes(model: object) -> Sequence[type]:
    return (model if isinstance(model, type) else type(model)).__mro__


def _function(model: object) -> FunctionType | None:
    """Return the function of Python's that runs where ``model`` is called."""
    if isinstance(model, type) or not callable(model):
        return None
    function = model if isinstance(model, (FunctionType, MethodType)) else type(model).__call__
    function = inspect.unwrap(getattr(function, "__func__", function))
    return function if isinstance(function, FunctionType) else None


def _named(function: FunctionType, names: Sequence[str]) -> Iterator[object]:
    """Yield the objects behind ``names`` in ``function``, also as names of this package."""
    namespace: dict[str, object] = {**function.__globals__, **_closure(function)}
    modules = {thing.__name__ for n in names if isinstance(thing := namespace.get(n), ModuleType)}
    # `package.Name`, or imported within the function; nobody else's module is looked into.
    package = sys.modules[_PACKAGE] if _PACKAGE in {*names, *modules} else None
    for name in names:
        yield namespace.get(name)
        if package is not None and name in package.__all__:
            yield getattr(package, name)


def _closure(function: FunctionType) -> dict[str, object]:
    variables: dict[str, object] = {}
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        with contextlib.suppress(ValueError):  # not set yet
            variables[name] = cell.cell_contents
    return variables


# Besides the engine's modules: readers, the loop, and the writer of event files.
_MODULES = (
    "pyarrow.parquet",
    "horovod_spark_runner.training.loop",
    "tensorboard.summary.writer.record_writer",
)


def modules_for(engine: str) -> tuple[str, ...]:
    """Return the modules that a rank imports while Spark and mpirun still connect.

    Args:
        engine: the dotted name of the engine.
    """
    engine_modules = engine_named(engine).modules
    return (*engine_modules, *_MODULES)
