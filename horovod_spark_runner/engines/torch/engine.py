"""The engine of PyTorch modules. Loads no framework until it is used."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ...checkpoint.run_directory import RunDirectory
from ...quiet import quiet_imports
from ...storage.filesystem import Location
from ...sync.synchroniser import Collectives, Synchroniser
from ...training.engine import ONNX, TORCH_EXPORT, Engine, check_format
from ...training.onnx import ClassColumn, check_no_classes
from ...training.spec import Binding, ModelNames, ModelSource, TrainingSpec
from ...training.trained_model import Model, Recipe, StoredModel
from ...training.trainee import Evaluator, Question
from ...training.warm_start import WeightsFormat
from .saved import SavedModule, TorchParts, held_files, torch_parts
from .source import (
    check_callback_argument,
    check_exportable,
    model_source,
    portable_metrics,
)

if TYPE_CHECKING:
    from mpi4py import MPI

    from .trainee import TorchTrainee


class _TorchEngine:
    """PyTorch implementation of `horovod_spark_runner.training.engine.Engine`."""

    modules = (
        "torch",
        # What the first optimizer imports.
        "torch._dynamo",
        "horovod.torch",
        "horovod_spark_runner.engines.torch.lightning.trainee",
    )
    weights_formats = (
        WeightsFormat("state_dict", "a .pt or .pth file of a state_dict", (".pt", ".pth")),
        WeightsFormat("program", "a .pt2 file of torch.export", (".pt2",)),
    )
    export_formats = (TORCH_EXPORT, ONNX)

    def source(self, model: object, custom_objects: Mapping[str, object] | None) -> ModelSource:
        return model_source(model, custom_objects)

    def check_callbacks(self, callbacks: object) -> None:
        check_callback_argument(callbacks)

    def names(self, source: ModelSource) -> ModelNames:
        with quiet_imports():
            from .build import names_of
        return names_of(source)

    def begin(self, seed: int, environment: Mapping[str, str]) -> None:
        from .rank import begin

        begin(seed)

    def collectives(self) -> Collectives:
        from .collectives import TensorCollectives

        return TensorCollectives()

    def trainee(
        self, spec: TrainingSpec, world: MPI.Comm, synchroniser: Synchroniser
    ) -> TorchTrainee:
        from .build import build
        from .lightning.recognise import is_lightning
        from .lightning.trainee import LightningTrainee
        from .trainee import TorchTrainee

        model, module = build(spec.model)
        kind = LightningTrainee if is_lightning(module) else TorchTrainee
        return kind(spec, world, synchroniser, model, module)

    def adopt(
        self,
        directory: RunDirectory,
        model: Any,
        inputs: Binding | None,
        custom_objects: Mapping[str, object],
        signature: str = "",
    ) -> SavedModule:
        with quiet_imports():
            from .adopt import adopt
        return adopt(directory, model, inputs, signature)

    def parts(
        self,
        model: StoredModel,
        source: ModelSource | None,
        saved: Any,
        custom_objects: Mapping[str, object],
    ) -> TorchParts:
        return torch_parts(model, source, saved)

    def load(self, recipe: Recipe) -> Model:
        with quiet_imports():
            from .loading import load_model
        return load_model(recipe)

    def model(self, recipe: Recipe) -> object:
        with quiet_imports():
            from .loading import made_module
        return made_module(recipe)

    def held(self, parts: TorchParts) -> Mapping[str, bytes]:
        return held_files(parts)

    def check_export(self, format: str, names: Sequence[str], transformed: Collection[str]) -> None:
        check_format(format, self.export_formats)
        check_exportable(format, names, transformed)

    def export(
        self,
        recipe: Recipe,
        format: str,
        columns: Sequence[str],
        outputs: Sequence[str],
        target: Location,
        classes: Sequence[ClassColumn] = (),
    ) -> None:
        check_no_classes(format, classes)
        with quiet_imports():
            from .export import export_recipe
        export_recipe(recipe, format, columns, outputs, target)

    def describe_outputs(self, recipe: Recipe) -> tuple[list[dict[str, object]], str]:
        with quiet_imports():
            from .loading import describe_outputs
        return describe_outputs(recipe)

    def portable_metrics(self, metrics: object) -> object:
        return portable_metrics(metrics)

    def evaluator(self, recipe: Recipe, question: Question) -> Evaluator:
        with quiet_imports():
            from .evaluator import TorchEvaluator
        return TorchEvaluator(recipe, question)


ENGINE: Engine = _TorchEngine()
