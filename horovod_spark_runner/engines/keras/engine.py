"""The engine of Keras models. Loads no framework until it is used."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ...checkpoint.run_directory import RunDirectory
from ...errors import EnvironmentProblem
from ...quiet import quiet_imports
from ...storage.contents import Contents
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
from ...training.onnx import ClassColumn, check_no_classes
from ...training.spec import Binding, ModelNames, ModelSource, TrainingSpec
from ...training.trained_model import WEIGHTS_FILE, Model, Recipe, StoredModel
from ...training.trainee import Evaluator, Question
from ...training.warm_start import WeightsFormat
from .requested_metrics import portable_metrics
from .saved import (
    ARCHIVE_FILE,
    PACKED_FILE,
    KerasParts,
    SavedModel,
    check_exportable,
    check_transforms,
    keras_parts,
)
from .source import check_callback_argument, model_source

if TYPE_CHECKING:
    from mpi4py import MPI

    from .trainee import KerasTrainee


class _KerasEngine:
    """Keras implementation of `horovod_spark_runner.training.engine.Engine`."""

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
        return model_source(model, custom_objects)

    def check_callbacks(self, callbacks: object) -> None:
        check_callback_argument(callbacks)

    def names(self, source: ModelSource) -> ModelNames:
        with quiet_imports():
            from .names import names_of
        return names_of(source)

    def begin(self, seed: int, environment: Mapping[str, str]) -> None:
        for problem, advice in wrong_variables(environment):
            raise EnvironmentProblem(f"{problem}; {advice}")
        import horovod.tensorflow as hvd
        import keras
        import tensorflow as tf

        hvd.init()
        for device in tf.config.list_physical_devices("GPU"):
            tf.config.experimental.set_memory_growth(device, True)
        keras.utils.set_random_seed(seed)
        # That leaves this one as it comes, from noise: no two runs would be the same.
        tf.random.set_global_generator(tf.random.Generator.from_seed(seed + hvd.rank()))

    def collectives(self) -> Collectives:
        from .collectives import TensorCollectives

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
            from .adopt import adopt_graph, adopt_model
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

    def held(self, parts: KerasParts) -> Mapping[str, Contents]:
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
        classes: Sequence[ClassColumn] = (),
    ) -> None:
        if format != SAVED_MODEL:
            check_no_classes(format, classes)
        with quiet_imports():
            from .export import export_recipe
            from .keras_file import export_keras
            from .onnx_file import export_onnx
        if format == KERAS_FILE:
            export_keras(recipe, target)
        elif format == ONNX:
            export_onnx(recipe, columns, outputs, target)
        else:
            check_format(format, (SAVED_MODEL,))
            export_recipe(recipe, columns, outputs, target, classes)

    def describe_outputs(self, recipe: Recipe) -> tuple[list[dict[str, object]], str]:
        with quiet_imports():
            from .loading import describe_outputs
        return describe_outputs(recipe)

    def portable_metrics(self, metrics: object) -> object:
        return portable_metrics(metrics)

    def evaluator(self, recipe: Recipe, question: Question) -> Evaluator:
        with quiet_imports():
            from .evaluator import KerasEvaluator
        return KerasEvaluator(recipe, question)


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
