"""The engine of Keras models: `ENGINE`, model sources and metrics by name. Loads no framework.

Who gives an object of Keras' has loaded it.
"""

from __future__ import annotations

import difflib
import os
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ...checkpoint.run_directory import RunDirectory
from ...errors import EnvironmentProblem, InvalidInputError, ModelError, brief
from ...frameworks import quiet_imports
from ...storage.contents import Contents, read_entry
from ...storage.filesystem import Location
from ...sync.synchroniser import Collectives, Synchroniser
from ...training.engine import (
    GRAPH_FILE,
    KERAS_FILE,
    ONNX,
    SAVED_MODEL,
    Engine,
    check_format,
)
from ...training.spec import (
    Binding,
    ModelNames,
    ModelSource,
    TrainingSpec,
    check_model_fn,
    check_objects,
)
from ...training.trained_model import WEIGHTS_FILE, Model, Recipe, StoredModel
from ...training.trainee import EvaluationRequest, Evaluator
from ...training.warm_start import WeightsFormat
from ...typed_json import load_json
from .saved import (
    ARCHIVE_FILE,
    CONFIG_FILE,
    KIND,
    PACKED_FILE,
    KerasParts,
    SavedModel,
    check_exportable,
    check_transforms,
    keras_parts,
)

if TYPE_CHECKING:
    from mpi4py import MPI

    from .trainee import KerasTrainee

# Keras' settings in a new process.
_AT_FIRST = {
    "floatx": "float32",
    "dtype_policy": "float32",
    "image_data_format": "channels_last",
    "epsilon": 1e-7,
}
_NO_ARCHIVE = "model file %s is not a Keras archive (model.save('….keras'))"
# What Keras chooses a metric for by the shapes of labels and outputs.
_BY_SHAPE = ("accuracy", "acc", "crossentropy", "ce")


class _KerasEngine:
    """Keras implementation of `horovod_spark_runner.training.engine.Engine`."""

    tries_apart = False
    modules = (
        "tensorflow",
        "keras",
        "horovod.tensorflow",
        "horovod_spark_runner.engines.keras.trainee",
    )
    weights_formats = (
        WeightsFormat(KERAS_FILE, "a .keras or .weights.h5 file", (".keras", ".weights.h5")),
        WeightsFormat(SAVED_MODEL, "a SavedModel", marker=GRAPH_FILE),
    )
    export_formats = (SAVED_MODEL, KERAS_FILE, ONNX)

    def source(self, model: object, custom_objects: Mapping[str, object] | None) -> ModelSource:
        return _model_source(model, custom_objects)

    def check_callbacks(self, callbacks: object) -> None:
        _check_callback_argument(callbacks)

    def names(self, source: ModelSource) -> ModelNames:
        with quiet_imports():
            from .binding import names_of
        return names_of(source)

    def begin(self, seed: int, environment: Mapping[str, str]) -> None:
        for problem, advice in wrong_variables(environment):
            raise EnvironmentProblem(f"{problem}; {advice}")
        import horovod.tensorflow as hvd
        import keras
        import tensorflow as tf
        from mpi4py import MPI

        from ...sync.mpi import shares_gpu

        hvd.init()
        if shares_gpu(MPI.COMM_WORLD) and hvd.nccl_built():
            raise EnvironmentProblem(
                "several ranks share a GPU (share_gpus=True), but NCCL sums only over ranks with a "
                "GPU each; give each rank one, or install a Horovod without NCCL "
                "(horovod-spark-runner install-horovod)"
            )
        for device in tf.config.list_physical_devices("GPU"):
            tf.config.experimental.set_memory_growth(device, True)
        keras.utils.set_random_seed(seed)
        # That leaves this one as it comes, from noise: no two runs would be the same.
        tf.random.set_global_generator(tf.random.Generator.from_seed(seed + hvd.rank()))

    def collectives(self) -> Collectives:
        from .exchange import TensorCollectives

        return TensorCollectives()

    def trainee(
        self, spec: TrainingSpec, world: MPI.Comm, synchroniser: Synchroniser
    ) -> KerasTrainee:
        from .trainee import KerasTrainee

        return KerasTrainee(spec, world, synchroniser)

    def parts(
        self,
        model: StoredModel,
        source: ModelSource | None,
        saved: Any,
        custom_objects: Mapping[str, object],
        trusted: bool = False,
    ) -> KerasParts:
        return keras_parts(model, source, saved, custom_objects)

    def adopt(
        self,
        directory: RunDirectory,
        model: Any,
        inputs: Binding | None,
        custom_objects: Mapping[str, object],
        signature: str = "",
    ) -> SavedModel:
        with quiet_imports():
            from .artifact import adopt_graph, adopt_model
        if signature:
            return adopt_graph(directory, Location(model), inputs, signature)
        return adopt_model(directory, model, inputs, custom_objects)

    def load(self, recipe: Recipe) -> Model:
        with quiet_imports():
            from .loading import load_model
        return load_model(recipe)

    def model(self, recipe: Recipe) -> object:
        with quiet_imports():
            from .loading import made_model
        return made_model(recipe)

    def stored_files(self, parts: KerasParts) -> Mapping[str, Contents]:
        if parts.packed is not None:
            return {PACKED_FILE: parts.packed}
        if parts.archive is None:
            return {}
        weights = {} if parts.weights is None else {WEIGHTS_FILE: parts.weights}
        return {ARCHIVE_FILE: parts.archive, **weights}

    def check_export(self, format: str, names: Sequence[str], transformed: Collection[str]) -> None:
        check_format(format, self.export_formats)
        if format == SAVED_MODEL:
            check_exportable(names, transformed)
        elif format == ONNX:
            check_transforms(transformed, "an ONNX file")

    def export(
        self,
        recipe: Recipe,
        format: str,
        columns: Sequence[str],
        outputs: Sequence[str],
        target: Location,
    ) -> None:
        check_format(format, self.export_formats)
        with quiet_imports():
            from .export import export_keras, export_onnx, export_saved_model
        if format == KERAS_FILE:
            export_keras(recipe, target)
        elif format == ONNX:
            export_onnx(recipe, columns, outputs, target)
        else:
            export_saved_model(recipe, columns, outputs, target)

    def describe_outputs(self, recipe: Recipe) -> tuple[list[dict[str, object]], str]:
        with quiet_imports():
            from .loading import describe_outputs
        return describe_outputs(recipe)

    def portable_metrics(self, metrics: object) -> object:
        return portable_metrics(metrics)

    def evaluator(self, recipe: Recipe, request: EvaluationRequest) -> Evaluator:
        with quiet_imports():
            from .evaluate import KerasEvaluator
        return KerasEvaluator(recipe, request)


def wrong_variables(environment: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Yield invalid environment variables, and what to do about them. Pure."""
    if environment.get("TF_USE_LEGACY_KERAS", "").lower() in ("1", "true"):
        yield "TF_USE_LEGACY_KERAS is set: TensorFlow would use Keras 2", "unset it"
    backend = environment.get("KERAS_BACKEND") or "tensorflow"
    if backend != "tensorflow":
        yield (
            f"KERAS_BACKEND is {backend!r}: Keras would not use TensorFlow, as training needs",
            "unset it, or set it to tensorflow",
        )


ENGINE: Engine = _KerasEngine()


def _model_source(model: Any, custom_objects: Mapping[str, Any] | None = None) -> ModelSource:
    """Return the source for ``run_training``'s ``model_fn`` argument.

    Its `file` holds the bytes of a ``.keras`` file, or the text of ``model.to_json()``.

    Args:
        model: a function without required arguments, or the path or URL of a ``.keras`` or
            ``.json`` file.
        custom_objects: see `ModelSource`.

    Raises:
        ModelError: it is neither, or the file cannot be a Keras model.
        InvalidInputError: ``custom_objects`` is no dictionary by name.
    """
    custom_objects = check_objects(custom_objects)
    if isinstance(model, (str, os.PathLike)):
        return _file_source(Location(model), custom_objects)
    if _is_of_keras(model, "Model"):
        raise ModelError(
            f"model_fn is a {type(model).__name__} object; give the function that builds and "
            "compiles it, so that the model is made on the workers"
        )
    if not callable(model):
        raise ModelError(
            "model_fn must be a function that returns a compiled keras.Model, or the path of a "
            f".keras or .json file, got {brief(model)}"
        )
    check_model_fn(model)
    if (settings := _settings_of_this_process()) != _AT_FIRST:
        model = _UnderSettings(settings, model)
    return ModelSource(function=model, custom_objects=custom_objects)


class _UnderSettings:
    """A ``model_fn`` that is called under the settings of Keras that hold on the driver.

    Args:
        settings: of `keras_state`.
        function: what is called.
    """

    _before: Mapping[str, Any]  # while it is unpickled

    def __init__(
        self, settings: Mapping[str, Any], function: Callable[[], Any] | None = None
    ) -> None:
        self.settings, self.function = settings, function

    def __call__(self) -> Any:
        from .model import set_keras_state

        set_keras_state(self.settings)
        assert self.function is not None
        return self.function()

    def __reduce__(self) -> tuple[Any, ...]:
        # In this order: what the function has captured is made under the settings, too.
        return _begin_unpickling, (self.settings,), self.function

    def __setstate__(self, function: Callable[[], Any]) -> None:
        from .model import set_keras_state

        set_keras_state(self._before)
        self.function = function


def _begin_unpickling(settings: Mapping[str, Any]) -> _UnderSettings:
    from .model import keras_state, set_keras_state

    made = _UnderSettings(settings)
    made._before = keras_state()
    set_keras_state(settings)
    return made


def _settings_of_this_process() -> Mapping[str, Any]:
    """Return the settings of Keras' that hold here, as they do where ``model_fn`` is written."""
    keras = sys.modules.get("keras")
    if keras is None or not hasattr(keras, "config"):  # while it is being imported
        return _AT_FIRST
    from .model import keras_state

    settings = keras_state()
    try:
        keras.dtype_policies.get(settings["dtype_policy"])
    except ValueError as error:
        raise ModelError(
            f"the dtype policy {settings['dtype_policy']!r} of this process has no name by which "
            "it could be set on the ranks; call keras.config.set_dtype_policy in model_fn, and not "
            "here"
        ) from error
    return settings


def _check_callback_argument(callbacks: Any) -> None:
    """Check ``callbacks`` without importing Keras; the ranks check a function's result.

    Raises:
        InvalidInputError: it holds something else than Keras callbacks.
    """
    if _is_of_keras(callbacks, "Callback") or not callable(callbacks):
        list_callbacks(callbacks)


def list_callbacks(callbacks: Any) -> list[Any]:
    """Return one callback, or several, as a list.

    Raises:
        InvalidInputError: they are something else.
    """
    if _is_of_keras(callbacks, "Callback") and not _is_of_keras(callbacks, "CallbackList"):
        return [callbacks]
    if isinstance(callbacks, str) or not isinstance(callbacks, Sequence):
        raise InvalidInputError(
            "callbacks must be a list of keras.callbacks.Callback, or a function that returns one, "
            f"got {brief(callbacks)}"
        )
    for callback in callbacks:
        if not _is_of_keras(callback, "Callback"):
            raise InvalidInputError(
                f"callbacks holds {brief(callback)}: give objects of keras.callbacks.Callback"
            )
    return list(callbacks)


def _is_of_keras(value: Any, name: str) -> bool:
    """Return whether ``value`` is an instance of Keras' class of that name."""
    # Without importing Keras: if it is an instance, Keras is loaded already.
    return any(
        cls.__module__.startswith("keras.") and cls.__name__ == name for cls in type(value).__mro__
    )


def _check_file(place: Location) -> None:
    """Check that there is a file to read a model from.

    Raises:
        ModelError: there is no file at ``place``.
    """
    if place.is_folder:
        kind = "a folder"
        if place.join(GRAPH_FILE).exists():
            kind = "a SavedModel, whose graph cannot be trained on"
        raise ModelError(
            f"model_fn={str(place)!r} is {kind}; give a function that builds the model, with "
            "initial_weights for the weights of a SavedModel or run, or a .keras or .json file"
        )
    if not place.exists():
        raise ModelError(f"model file {place} does not exist")


def _file_source(place: Location, custom_objects: dict[str, Any]) -> ModelSource:
    _check_file(place)
    if place.name.endswith(".keras"):
        return ModelSource(file=read_archive(place), custom_objects=custom_objects)
    if place.name.endswith(".json"):
        return ModelSource(file=_model_json(place), custom_objects=custom_objects)
    raise ModelError(f"model file {place} must end in .keras or .json")


def read_archive(place: str | os.PathLike[str] | Location) -> Contents:
    """Return the contents of a ``.keras`` file.

    Raises:
        ModelError: the file is not a ``.keras`` archive.
    """
    location = place if isinstance(place, Location) else Location(place)
    if not location.name.endswith(".keras"):
        raise ModelError(f"model file {location} must end in .keras")
    _check_file(location)
    archive = location.spool(lambda part: None)
    try:
        read_entry(archive.open(), CONFIG_FILE, KIND)
    except ValueError as error:
        raise ModelError(f"{_NO_ARCHIVE % location}: {error}") from error
    return archive


def _model_json(place: Location) -> str:
    try:
        text = place.read_text()
        config = load_json(text)
    except ValueError as error:
        raise ModelError(f"model file {place} is not JSON: {error}") from error
    if not isinstance(config, dict) or "class_name" not in config:
        raise ModelError(f"model file {place} was not made by model.to_json()")
    if not config.get("compile_config"):
        raise ModelError(
            f"model file {place} holds a model that was not compiled; call model.compile(…) "
            "before model.to_json(), or give a model_fn"
        )
    return text


def portable_metrics(metrics: object) -> object:
    """Return metrics in a form that can be pickled; see `Engine.portable_metrics`."""
    if isinstance(metrics, str):
        return metrics
    if isinstance(metrics, Mapping):
        return {str(output): portable_metrics(inner) for output, inner in metrics.items()}
    if isinstance(metrics, Sequence):
        return [portable_metrics(inner) for inner in metrics]
    # An object of Keras' is pickled as its configuration, and reset where it is used.
    if callable(metrics) and not isinstance(metrics, type):
        return metrics
    hint = f"; give an object, {metrics.__name__}(…)" if isinstance(metrics, type) else ""
    raise InvalidInputError(
        f"invalid metric {metrics!r:.200}{hint}. A metric is the name of one of Keras', an object "
        "of keras.metrics, a function of labels and predictions, or 'spark:…'"
    )


def check_metric_names(metrics: object) -> None:
    """Check that the names among metrics are Keras'.

    Raises:
        InvalidInputError: one is not, or names a metric that takes arguments.
    """
    if isinstance(metrics, str):
        _check_exists(metrics)
    elif isinstance(metrics, (Mapping, list)):
        for inner in metrics.values() if isinstance(metrics, Mapping) else metrics:
            check_metric_names(inner)


def _check_exists(name: str) -> None:
    import keras

    if name in _BY_SHAPE:
        return
    try:
        keras.metrics.get(name)
    except TypeError as error:
        raise InvalidInputError(
            f"metric {name!r} takes arguments: give the object, keras.metrics.{name}(…)"
        ) from error
    except ValueError as error:
        names = [*_BY_SHAPE, *dir(keras.metrics)]
        close = difflib.get_close_matches(name, names, n=3, cutoff=0.6)
        meant = f" (did you mean {' or '.join(map(repr, close))}?)" if close else ""
        raise InvalidInputError(
            f"unknown metric {name!r}{meant}; give the name of one in keras.metrics, or one of "
            "Spark's, 'spark:…'"
        ) from error
