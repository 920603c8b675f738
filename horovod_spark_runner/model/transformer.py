"""`TFTransformer`: a trained model as a Spark ML model."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

from ..config.data import Transform
from ..config.prediction import (
    ClassCol,
    HandleInvalid,
    OutputForm,
    PredictionCol,
    PredictionSettings,
)
from ..config.validators import ColumnNames, check_place
from ..errors import InvalidInputError, brief
from ..frameworks import KERAS
from .load import ModelHandle, adopt_model
from .persistence import KerasStageReader, UserCode, loading_with
from .trained_transformer import TrainedTransformer


class TFTransformer(TrainedTransformer):
    """Adds a trained Keras model's predictions to a DataFrame; all other columns stay.

    A model of Spark ML: its settings are Params, with getters and setters, and hold for
    ``transform(df, params={…})`` alone where they are given there. Each output of the model adds a
    column: of numbers if the output is one number per row, else of arrays of numbers or vectors.
    It predicts as ``model.predict`` does.

    A transformer can be pickled and copied, also by threads, and used in a new Spark session;
    copies share the model.
    """

    engine = KERAS
    loading_advice = (
        "Of a saved transformer, that is TFTransformer.read().customObjects({…}).load(path), or "
        ".modelFn(…); of one in a pipeline, with TFTransformer.loading(custom_objects={…}): "
        "PipelineModel.load(path)"
    )

    @classmethod
    def from_run(
        cls,
        run_dir: str | os.PathLike[str],
        *,
        checkpoint: int | None = None,
        custom_objects: Mapping[str, Any] | None = None,
        model_fn: Callable[[], Any] | None = None,
        transforms: Mapping[str, Transform] | None = None,
        feature_cols: ColumnNames | None = None,
        prediction_col: PredictionCol = None,
        probability_col: ClassCol = None,
        raw_prediction_col: ClassCol = None,
        output_form: OutputForm = "array",
        handle_invalid: HandleInvalid = "error",
        predict_batch_size: int = 1024,
    ) -> TFTransformer:
        """Return the transformer of a finished run.

        A model made of Keras' own layers needs the run directory only. One with classes, functions
        or lambdas of the user's needs these, because code is not kept in storage.

        Args:
            run_dir: its run directory.
            checkpoint: steps of the run after which the checkpoint was taken whose weights are
                meant, as its folder's name says; by default, the trained model's.
            custom_objects: the model's own classes and functions by name, if it has some.
            model_fn: function without arguments that builds the model, which is then given the
                trained weights; in place of ``custom_objects``, and for models with lambdas.
            transforms: the functions its columns were trained with.
            feature_cols: see `TFTransformer.featureCols`.
            prediction_col: see `TFTransformer.predictionCol`.
            probability_col: see `TFTransformer.probabilityCol`.
            raw_prediction_col: see `TFTransformer.rawPredictionCol`.
            output_form: see `TFTransformer.outputForm`.
            handle_invalid: see `TFTransformer.handleInvalid`.
            predict_batch_size: see `TFTransformer.predictBatchSize`.

        Raises:
            RunDirectoryError: it holds no finished model, no such checkpoint, or a model that needs
                ``custom_objects`` or ``model_fn``; the message names the parts.
            DataError: a transform that the model was trained with is missing.
            InvalidInputError: another argument cannot be right.
        """
        settings = PredictionSettings(
            feature_cols=feature_cols,
            prediction_col=prediction_col,
            probability_col=probability_col,
            raw_prediction_col=raw_prediction_col,
            output_form=output_form,
            handle_invalid=handle_invalid,
            predict_batch_size=predict_batch_size,
        )
        return cls._of_run(
            run_dir,
            settings,
            custom_objects=custom_objects,
            model_fn=model_fn,
            transforms=transforms,
            checkpoint=checkpoint,
        )

    @classmethod
    def from_keras(
        cls,
        model: Any,
        feature_cols: ColumnNames | None = None,
        *,
        custom_objects: Mapping[str, Any] | None = None,
    ) -> TFTransformer:
        """Return the transformer of a Keras model that was trained elsewhere.

        TensorFlow is imported by this call. Columns that feed the inputs hold numbers (for inputs
        of one), vectors or arrays of the inputs' sizes. There is no `summary`.

        Args:
            model: a functional or Sequential model whose inputs are known, or the path or URL of
                its ``.keras`` file.
            feature_cols: columns of its inputs, as `run_training` takes them; by default
                ``features`` for a model with one input, else the inputs' names.
            custom_objects: the model's own classes and functions by name, if it has some.

        Raises:
            ModelError: it is no such model, columns do not fit it, or it cannot be called.
            InvalidInputError: another argument cannot be right.
        """
        return cls(ModelHandle(adopt_model(cls.engine, model, feature_cols, custom_objects)))

    @classmethod
    def from_saved_model(
        cls,
        path: str | os.PathLike[str],
        feature_cols: ColumnNames | None = None,
        *,
        signature: str = "serving_default",
    ) -> TFTransformer:
        """Return the transformer of a SavedModel, as TensorFlow and ``model.export`` write it.

        TensorFlow is imported by this call. A SavedModel is a program: take only those you trust.
        Its outputs have their names in the signature. There is no `summary`, and `getModel`
        returns what ``tf.saved_model.load`` does.

        Args:
            path: folder or URL.
            feature_cols: columns of the signature's inputs: a dictionary by their names, or a list
                of one; by default ``features`` for one input, else the inputs' names.
            signature: what is called of it.

        Raises:
            ModelError: there is no SavedModel or signature, or columns do not fit its inputs.
            InvalidInputError: another argument cannot be right.
        """
        check_place("path", path)
        if not isinstance(signature, str) or not signature:
            raise InvalidInputError(f"signature must be a name, got {brief(signature)}")
        model = adopt_model(cls.engine, path, feature_cols, signature=signature)
        return cls(ModelHandle(model))

    @classmethod
    def read(cls) -> KerasStageReader:
        """Return a reader of transformers: ``read().load(path)``.

        Code of the user's that it needs is given by ``customObjects``, ``modelFn`` and
        ``transforms``, as to `from_run`: ``read().customObjects({…}).load(path)``.

        Raises:
            RunDirectoryError: from its ``load``: there is no transformer, it is damaged, of a newer
                format, or needs code of the user's; the message names it.
        """
        return KerasStageReader(cls)

    @classmethod
    def loading(
        cls,
        *,
        custom_objects: Mapping[str, Any] | None = None,
        model_fn: Callable[[], Any] | None = None,
        transforms: Mapping[str, Transform] | None = None,
    ) -> AbstractContextManager[None]:
        """Pass user code to transformers that are loaded inside pipelines.

        ``with TFTransformer.loading(custom_objects={…}): PipelineModel.load(path)``.

        Args:
            custom_objects: the models' own classes and functions by name.
            model_fn: function without arguments that builds the model.
            transforms: the functions that columns were trained with.

        Raises:
            InvalidInputError: from the loading: an argument cannot be used.
        """
        return loading_with(cls.__name__, UserCode(custom_objects, model_fn, transforms))
