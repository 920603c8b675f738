"""The engine of PyTorch modules: model sources, recipes of saved models. Loads no framework."""

from __future__ import annotations

import keyword
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from ...checkpoint.run_directory import RunDirectory
from ...errors import InvalidInputError, ModelError, RunDirectoryError, brief
from ...frameworks import TORCH, quiet_imports
from ...storage.filesystem import Location
from ...sync.synchroniser import Collectives, Synchroniser
from ...training.engine import ONNX, TORCH_EXPORT, Engine, check_format
from ...training.sample_rows import SAMPLE_FILE
from ...training.spec import Binding, ModelNames, ModelSource, TrainingSpec, check_model_fn
from ...training.trained_model import WEIGHTS_FILE, Model, Recipe, StoredModel, with_model_fn
from ...training.trainee import EvaluationRequest, Evaluator
from ...training.warm_start import WeightsFormat
from .torch_callback import TorchCallback, list_callbacks
from .torch_model import TorchModel, refuse_lightning

if TYPE_CHECKING:
    from mpi4py import MPI

    from .trainee import TorchTrainee


_MODULE = "torch.nn.modules.module.Module"
# The module as a program of torch.export, or TorchScript, which needs no code of the user's.
PROGRAM_FILE = "module.pt2"
SCRIPT_FILE = "script.pt"
# What a model that was trained elsewhere is, if it is no module.
PROGRAM, SCRIPT = "program", "script"
FILES = (WEIGHTS_FILE, SAMPLE_FILE, PROGRAM_FILE, SCRIPT_FILE)


class _TorchEngine:
    """PyTorch implementation of `horovod_spark_runner.training.engine.Engine`."""

    tries_apart = True
    modules = (
        "torch",
        # What the first optimizer imports.
        "torch._dynamo",
        "horovod.torch",
        "horovod_spark_runner.engines.torch.trainee",
    )
    weights_formats = (
        WeightsFormat(
            "state_dict",
            "a .pt or .pth file of a state_dict (of a .pt2 file that you trust, "
            "torch.save(torch.export.load(path).state_dict, 'weights.pt') writes one)",
            (".pt", ".pth"),
        ),
    )
    export_formats = (TORCH_EXPORT, ONNX)

    def source(self, model: object, custom_objects: Mapping[str, object] | None) -> ModelSource:
        return _model_source(model, custom_objects)

    def check_callbacks(self, callbacks: object) -> None:
        _check_callback_argument(callbacks)

    def names(self, source: ModelSource) -> ModelNames:
        with quiet_imports():
            from .model import names_of
        return names_of(source)

    def begin(self, seed: int, environment: Mapping[str, str]) -> None:
        from .trainee import begin

        begin(seed)

    def collectives(self) -> Collectives:
        from .exchange import TensorCollectives

        return TensorCollectives()

    def trainee(
        self, spec: TrainingSpec, world: MPI.Comm, synchroniser: Synchroniser
    ) -> TorchTrainee:
        from .model import build_model
        from .trainee import TorchTrainee

        return TorchTrainee(spec, world, synchroniser, *build_model(spec.model))

    def adopt(
        self,
        directory: RunDirectory,
        model: Any,
        inputs: Binding | None,
        custom_objects: Mapping[str, object],
        signature: str = "",
    ) -> SavedModel:
        with quiet_imports():
            from .artifact import adopt_model
        return adopt_model(directory, model, inputs, signature)

    def parts(
        self,
        model: StoredModel,
        source: ModelSource | None,
        saved: Any,
        custom_objects: Mapping[str, object],
        trusted: bool = False,
    ) -> TorchParts:
        return _torch_parts(model, source, saved, trusted)

    def load(self, recipe: Recipe) -> Model:
        with quiet_imports():
            from .loading import load_model
        return load_model(recipe)

    def model(self, recipe: Recipe) -> object:
        with quiet_imports():
            from .loading import made_model
        return made_model(recipe)

    def stored_files(self, parts: TorchParts) -> Mapping[str, bytes]:
        if parts.source is not None:
            return {}
        files = {
            SCRIPT_FILE: parts.script,
            PROGRAM_FILE: parts.program,
            WEIGHTS_FILE: parts.weights,
        }
        return {name: data for name, data in files.items() if data is not None}

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
    ) -> None:
        with quiet_imports():
            from .export import export_recipe
        export_recipe(recipe, format, columns, outputs, target)

    def describe_outputs(self, recipe: Recipe) -> tuple[list[dict[str, object]], str]:
        with quiet_imports():
            from .loading import describe_outputs
        return describe_outputs(recipe)

    def portable_metrics(self, metrics: object) -> object:
        if isinstance(metrics, Mapping):
            return {str(name): _portable(one) for name, one in metrics.items()}
        if isinstance(metrics, Sequence) and not isinstance(metrics, str):
            return [_portable(one) for one in metrics]
        return [_portable(metrics)]

    def evaluator(self, recipe: Recipe, request: EvaluationRequest) -> Evaluator:
        with quiet_imports():
            from .evaluate import TorchEvaluator
        return TorchEvaluator(recipe, request)


ENGINE: Engine = _TorchEngine()


@dataclass(frozen=True)
class SavedModel:
    """Rank 0's description of a written model, besides its files.

    Attributes:
        module: the pickled module, of one that was trained elsewhere. It travels in memory only:
            nothing that is read from storage is unpickled.
    """

    module: bytes | None = field(default=None, repr=False)


@dataclass(frozen=True)
class ModuleWithExample:
    """A module that was trained elsewhere.

    Attributes:
        module: the module, or the path or URL of its TorchScript.
        example: rows it can be called with: an array or tensor, or a tuple or dictionary of them.
    """

    module: Any
    example: Any = field(repr=False)


@dataclass(frozen=True)
class TorchFacts:
    """PyTorch-specific fields of a signature.

    Attributes:
        torch: version of PyTorch.
        module: class of the module, ``"package.module:Class"``.
        names: parameters of ``forward`` that the inputs are for; ``None`` if given by position.
        program: whether there is a program of torch.export, which gives the same.
        script: whether there is TorchScript, which then is all there is.
    """

    torch: str = ""
    module: str = ""
    names: tuple[str, ...] | None = None
    program: bool = False
    script: bool = False


@dataclass(frozen=True)
class TorchParts:
    """Parts that a PyTorch model is rebuilt from; one of them is set.

    Attributes:
        source: builds the module.
        weights: contents of the weights file; ``None`` if the rest holds the weights.
        paths: names of the weights in ``state_dict()``, in the file's order.
        names: parameters of ``forward`` that the inputs are for; ``None`` to give them by position.
        module: the pickled module, see `SavedModel`; ``program`` is then for storage only.
        program: contents of a file of torch.export.
        script: contents of a file of TorchScript.
    """

    source: ModelSource | None = None
    weights: bytes | None = field(default=None, repr=False)
    paths: tuple[str, ...] = ()
    names: tuple[str, ...] | None = None
    module: bytes | None = field(default=None, repr=False)
    program: bytes | None = field(default=None, repr=False)
    script: bytes | None = field(default=None, repr=False)


def _torch_parts(
    model: StoredModel, source: ModelSource | None, saved: SavedModel | None, trusted: bool
) -> TorchParts:
    """Return the parts of a stored model; see `Engine.parts`.

    Raises:
        RunDirectoryError: a file is damaged, or neither the function that builds the module nor
            ``trusted`` is given.
    """
    facts, reweighted = model.facts(TorchFacts), model.signature.reweighted
    called = TorchParts(paths=model.signature.weights, names=facts.names)
    if source is not None and source.function is not None:
        if WEIGHTS_FILE not in model.sums:
            raise RunDirectoryError(
                f"{model.directory.location} holds a PyTorch program and no weights for what "
                "model_fn builds; leave model_fn out" + (", give trusted=True" * facts.program)
            )
        return replace(called, source=source, weights=model.read(WEIGHTS_FILE))
    if saved is not None and saved.module is not None:
        program = model.read(PROGRAM_FILE) if facts.program else None
        # Also for who loads the saved stage with model_fn.
        held = model.read(WEIGHTS_FILE)
        return replace(called, module=saved.module, program=program, weights=held)
    if facts.script:
        return replace(called, script=model.read(SCRIPT_FILE))
    if facts.program and trusted:
        weights = model.read(WEIGHTS_FILE) if reweighted else None
        return replace(called, program=model.read(PROGRAM_FILE), weights=weights)
    if facts.program:
        by_function = f"the function that builds the module, {with_model_fn(TORCH)}, or "
        raise RunDirectoryError(
            f"the model in {model.directory.location} holds code ({PROGRAM_FILE}), which is not "
            f"run by default: give {by_function if WEIGHTS_FILE in model.sums else ''}trusted=True,"
            " if only trusted users write there, by which torch.export.load reads it"
        )
    why = f", because {model.signature.problem}" if model.signature.problem else ""
    raise RunDirectoryError(
        f"{model.directory.location} holds the weights of a PyTorch module and no program of it"
        f"{why}; code is not kept in storage. Give the function that builds it: "
        + with_model_fn(TORCH)
    )


def _model_source(model: object, custom_objects: Mapping[str, object] | None = None) -> ModelSource:
    """Return the source for ``run_training``'s ``model_fn`` argument.

    Args:
        model: a function without required arguments that returns a `TorchModel`, or one itself.
        custom_objects: must not be given.

    Raises:
        ModelError: it is neither.
        InvalidInputError: ``custom_objects`` is given.
    """
    if custom_objects:
        raise InvalidInputError(
            "custom_objects are for Keras' files; what a PyTorch module needs is part of model_fn"
        )
    if isinstance(model, TorchModel):
        return ModelSource(function=_ModelFunction(model), engine=TORCH)
    refuse_lightning(model)
    # Without importing PyTorch: if it is a module, PyTorch is loaded already.
    if any(f"{c.__module__}.{c.__name__}" == _MODULE for c in type(model).__mro__):
        raise ModelError(
            f"model_fn is a {type(model).__name__}, a module without loss and optimizer; give "
            "TorchModel(module, loss=…, optimizer=…), or a function that returns one"
        )
    if not callable(model) or isinstance(model, type):
        raise ModelError(
            "model_fn must be a function that returns a TorchModel, or a TorchModel, got "
            f"{brief(model)}"
        )
    check_model_fn(model)
    return ModelSource(function=model, engine=TORCH)


@dataclass(frozen=True)
class _ModelFunction:
    """A function that returns a fixed model."""

    model: TorchModel

    def __call__(self) -> TorchModel:
        return self.model


def _check_callback_argument(callbacks: object) -> None:
    """Check ``callbacks`` without importing PyTorch; ranks check a function's result.

    Raises:
        InvalidInputError: it holds something else than callbacks of PyTorch trainings.
    """
    if isinstance(callbacks, TorchCallback) or not callable(callbacks):
        list_callbacks(callbacks)


def check_exportable(format: str, names: Sequence[str], transformed: Collection[str]) -> None:
    """Check as much of an export as shows without the module; see `Engine.check_export`."""
    for name in names:
        if format == TORCH_EXPORT and (not name.isidentifier() or keyword.iskeyword(name)):
            raise ModelError(
                f"a program cannot take feature column {name!r}: PyTorch makes it the name of a "
                "Python parameter. Call it otherwise, in the rows that are trained on, or only "
                "there: TorchTransformer.setFeatureCols([…]), then export"
            )
    for name in transformed:
        raise ModelError(
            f"a program cannot take feature column {name!r}: the model was trained with a "
            "transform of it, which is a function of Python's; transform the rows before, in a "
            "column of their own, or put it into the module's forward"
        )


def _portable(metric: object) -> object:
    if isinstance(metric, str) or (callable(metric) and not isinstance(metric, type)):
        return metric
    hint = f"; give an object, {metric.__name__}(…)" if isinstance(metric, type) else ""
    raise InvalidInputError(
        f"invalid metric {metric!r:.200}{hint}. A metric of a PyTorch model is 'accuracy', 'mae' "
        "or 'mse', a function of outputs and labels, or 'spark:…'; a dictionary gives them names"
    )
