"""`TorchTransformer`: a trained PyTorch module as a Spark ML model."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager

from ..config.data import Transform
from ..config.keywords import check_keywords
from ..config.prediction import (
    ClassCol,
    HandleInvalid,
    OutputForm,
    PredictionCol,
)
from ..config.validators import ColumnNames, check_flag, check_place
from ..engines.torch.engine import PROGRAM, SCRIPT, ModuleWithExample
from ..errors import InvalidInputError
from ..frameworks import TORCH
from ..training.engine import TORCH_EXPORT
from .load import ModelHandle, adopt_model
from .params import setters
from .persistence import TorchStageReader, UserCode, loading_with
from .transformer import TrainedTransformer


class TorchTransformer(TrainedTransformer):
    """Adds a trained PyTorch module's predictions to a DataFrame; all other columns stay.

    A model of Spark ML: its settings are Params, with getters and setters, and hold for
    ``transform(df, params={…})`` alone where they are given there. Each output of the module, also
    of those in tuples and dictionaries, adds a column: of numbers if the output is one number per
    row, else of arrays of numbers or vectors. The module is called in evaluation mode, without
    gradients, on as many threads as a task has cores, or on its GPU.

    A transformer can be pickled and copied, also by threads, and used in a new Spark session;
    copies share the model.
    """

    engine = TORCH
    loading_advice = (
        "Of a saved transformer, that is TorchTransformer.read().modelFn(…).load(path), or "
        ".trusted(); of one in a pipeline, with TorchTransformer.loading(model_fn=…), or "
        "(trusted=True): PipelineModel.load(path)"
    )

    @classmethod
    @check_keywords("TorchTransformer.from_run", setters)
    def from_run(
        cls,
        run_dir: str | os.PathLike[str],
        *,
        checkpoint: int | None = None,
        model_fn: Callable[[], object] | None = None,
        transforms: Mapping[str, Transform] | None = None,
        trusted: bool = False,
        feature_cols: ColumnNames | None = None,
        prediction_col: PredictionCol = None,
        probability_col: ClassCol = None,
        raw_prediction_col: ClassCol = None,
        output_form: OutputForm = "array",
        handle_invalid: HandleInvalid = "error",
        predict_batch_size: int = 1024,
    ) -> TorchTransformer:
        """Return the transformer of a finished run.

        Give ``model_fn``, which builds the module; the run directory's weights alone are read then.
        Or give ``trusted=True``: of a module that torch.export can hold, the run directory has a
        program.

        Args:
            run_dir: its run directory.
            checkpoint: steps of the run after which the checkpoint was taken whose weights are
                meant, as its folder's name says; by default, the trained model's.
            model_fn: function without arguments that returns the `TorchModel`, or the module
                alone, which is then given the trained weights.
            transforms: the functions its columns were trained with.
            trusted: whether to read the program by ``torch.export.load``, which may run code of it:
                only where trusted users alone can write to the run directory.
            feature_cols: see `TorchTransformer.featureCols`.
            prediction_col: see `TorchTransformer.predictionCol`.
            probability_col: see `TorchTransformer.probabilityCol`.
            raw_prediction_col: see `TorchTransformer.rawPredictionCol`.
            output_form: see `TorchTransformer.outputForm`.
            handle_invalid: see `TorchTransformer.handleInvalid`.
            predict_batch_size: see `TorchTransformer.predictBatchSize`.

        Raises:
            RunDirectoryError: it holds no finished model, no such checkpoint, or a model that needs
                ``model_fn`` or ``trusted``; the message says why.
            DataError: a transform that the model was trained with is missing.
            InvalidInputError: another argument cannot be right.
        """
        return cls._of_run(
            run_dir,
            UserCode(None, model_fn, transforms, trusted),
            checkpoint,
            feature_cols=feature_cols,
            prediction_col=prediction_col,
            probability_col=probability_col,
            raw_prediction_col=raw_prediction_col,
            output_form=output_form,
            handle_invalid=handle_invalid,
            predict_batch_size=predict_batch_size,
        )

    @classmethod
    @check_keywords("TorchTransformer.from_module", setters)
    def from_module(
        cls, module: object, feature_cols: ColumnNames | None = None, *, example: object
    ) -> TorchTransformer:
        """Return the transformer of a module that was trained elsewhere.

        There is no `summary`. The module is left in evaluation mode. It travels to Spark's workers
        as it is; saved, it is its weights, and the program that torch.export makes of it, if it
        can: to load it, give what `from_run` needs.

        Args:
            module: the ``torch.nn.Module``, with its weights.
            feature_cols: columns of its inputs, as `run_training` takes them: a list in the order
                of ``forward``, or a dictionary by the names of its parameters; by default
                ``features`` for one input, else the inputs' names.
            example: rows that it can be called with, which tell shapes and types: a tensor or NumPy
                array, or a tuple of them in the order of ``forward``, or a dictionary by the names
                of its parameters. The first ones, 8 at most, are kept with it; give real rows to a
                module that does not take any.

        Raises:
            ModelError: it is no module, columns do not fit it, or it cannot be called so.
            InvalidInputError: another argument cannot be right.
        """
        source = ModuleWithExample(module, example)
        return cls(ModelHandle(adopt_model(cls.engine, source, feature_cols)))

    @classmethod
    @check_keywords("TorchTransformer.from_exported", setters)
    def from_exported(
        cls,
        path: str | os.PathLike[str],
        feature_cols: ColumnNames | None = None,
        *,
        trusted: bool = False,
    ) -> TorchTransformer:
        """Return the transformer of a program of ``torch.export``, a ``.pt2`` file.

        `getModel` returns what ``torch.export.load(path).module()`` does.

        Args:
            path: file or URL.
            feature_cols: columns of its inputs: a dictionary by their names, or a list of one; by
                default ``features`` for one input, else the inputs' names.
            trusted: must be True, because ``torch.export.load`` may run code that a file holds:
                take only files of a trusted origin.

        Raises:
            ModelError: there is no such program, it takes or gives no rows of tensors, or columns
                do not fit its inputs.
            InvalidInputError: ``trusted`` is not True, or another argument is invalid.
        """
        check_place("path", path)
        if not check_flag("trusted", trusted):
            raise InvalidInputError(
                f"{os.fspath(path)} may hold code, which is not run by default: give trusted=True, "
                "if the file is of a trusted origin, by which torch.export.load reads it, or build "
                "the module yourself, TorchTransformer.from_module(module, example=…)"
            )
        return cls(ModelHandle(adopt_model(cls.engine, path, feature_cols, signature=PROGRAM)))

    @classmethod
    @check_keywords("TorchTransformer.from_torchscript", setters)
    def from_torchscript(
        cls,
        path: str | os.PathLike[str],
        feature_cols: ColumnNames | None = None,
        *,
        example: object,
    ) -> TorchTransformer:
        """Return the transformer of a file of TorchScript, as ``torch.jit.save`` writes it.

        TorchScript is a program: take only files you trust; one that opens files is refused.
        PyTorch is about to give it up for ``torch.export``. `getModel` returns what
        ``torch.jit.load`` does.

        Args:
            path: file or URL.
            feature_cols: columns of its inputs: a list in their order, or a dictionary by their
                names; by default ``features`` for one input.
            example: see `from_module`.

        Raises:
            ModelError: there is no TorchScript, columns do not fit it, or it cannot be called so.
            InvalidInputError: another argument cannot be right.
        """
        check_place("path", path)
        source = ModuleWithExample(path, example)
        return cls(ModelHandle(adopt_model(cls.engine, source, feature_cols, signature=SCRIPT)))

    def export(
        self, path: str | os.PathLike[str], format: str = TORCH_EXPORT, *, mode: str = "error"
    ) -> None:
        """Write the model for programs that know neither Spark nor this package.

        PyTorch is imported by this call. A ``"torch_export"`` is one file that predicts with
        PyTorch alone: ``torch.export.load(path).module()(column=tensor)`` takes the feature
        columns, in the types and shapes the model was trained on, as `transform` does, and gives a
        dictionary of the outputs, in the module's shapes, under the names of `transform`'s columns.
        An ``"onnx"`` is one file with the same inputs and outputs, for onnxruntime and others; it
        needs the extra ``onnx``. Encoded columns are arrays in both. What is written is compared
        with the module on rows that are made, and not written where it gives something else.

        Args:
            path: the file to write, or its URL; its name ends in ``.pt2`` or ``.onnx``.
            format: ``"torch_export"`` (default) or ``"onnx"``.
            mode: ``"error"`` (default) refuses a path that holds something, ``"overwrite"``
                replaces a file of this name, whatever it holds.

        Raises:
            ModelError: the format cannot hold the module, or a column's transform; it says why.
            EnvironmentProblem: a package that the format needs is not installed.
            RunDirectoryError: there is something at the path.
            InvalidInputError: a Param asks for columns that Spark makes of outputs, or another
                argument cannot be right.
        """
        super().export(path, format, mode=mode)

    @classmethod
    def read(cls) -> TorchStageReader:
        """Return a reader of transformers: ``read().modelFn(make_model).load(path)``.

        What it needs is given by ``modelFn``, ``transforms`` and ``trusted()``, as to `from_run`.

        Raises:
            RunDirectoryError: from its ``load``: there is no transformer, it is damaged, of a newer
                format, or needs code of the user's; the message names it.
        """
        return TorchStageReader(cls)

    @classmethod
    def loading(
        cls,
        *,
        model_fn: Callable[[], object] | None = None,
        transforms: Mapping[str, Transform] | None = None,
        trusted: bool = False,
    ) -> AbstractContextManager[None]:
        """Pass user code to transformers that are loaded inside pipelines.

        ``with TorchTransformer.loading(model_fn=…): PipelineModel.load(path)``.

        Args:
            model_fn: function without arguments that builds the model.
            transforms: the functions that columns were trained with.
            trusted: see `from_run`.

        Raises:
            InvalidInputError: from the loading: an argument cannot be used.
        """
        return loading_with(cls.__name__, UserCode(None, model_fn, transforms, trusted))
