"""Predict on DataFrames and files with a trained model, and evaluate it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from pyspark.ml import Model

from ..cluster.spark.session import (
    active_session,
    check_is_frame,
    check_running,
    use_driver_python,
)
from ..config.prediction import PredictionSettings
from ..config.validators import ColumnNames
from ..data.prepare.datasets import check_has_an_end
from ..errors import InvalidInputError
from ..storage.filesystem import Location
from .evaluate import EvaluationRequest, evaluate
from .export import ExportRequest, export_model
from .files import FilesRequest, predict_files
from .frame import with_predictions
from .inference import ERROR, KEEP
from .load import ModelHandle
from .outputs import check_classes
from .params import (
    PredictionParams,
    check_stage_params,
    prediction_settings,
    set_params,
)

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

# Params that say of an output what it is; the setting of each.
_OF_CLASSES = {"probabilityCol": "probability_col", "rawPredictionCol": "raw_prediction_col"}


class PredictionModel(Model, PredictionParams):  # type: ignore[misc]
    """A model of Spark ML around a trained model of any origin.

    Args:
        model: the model, on the driver.
        settings: how it predicts.
    """

    def __init__(self, model: ModelHandle, settings: PredictionSettings | None = None) -> None:
        super().__init__()
        self._model = model
        set_params(self, settings or PredictionSettings())

    def _set(self, **values: Any) -> PredictionModel:
        before = dict(self._paramMap)
        super()._set(**values)
        metadata = self._model.metadata
        outputs = () if metadata.learn_outputs else metadata.recipe.outputs
        if outputs and not _OF_CLASSES.keys().isdisjoint(values):
            # A copy is given one Param after the other.
            class_columns = {
                name: self.getOrDefault(param)
                for param, name in _OF_CLASSES.items()
                if self.isDefined(param)
            }
            try:
                check_classes(outputs, PredictionSettings(**class_columns))
            except InvalidInputError:
                self._paramMap.clear()
                self._paramMap.update(before)
                raise
        return self

    def transform(self, dataset: DataFrame, params: Any = None) -> DataFrame:
        """Return the DataFrame with the predictions.

        Args:
            dataset: has the feature columns.
            params: a map from this transformer's Params to values that hold for this call.

        Raises:
            DataError: a column is missing, of another type, there twice, or has an added one's
                name.
            InvalidInputError: a Param does not fit the model, or the map has no effect.
            ModelError: the model cannot be called.
        """
        check_stage_params(self, params or {})
        return super().transform(dataset, dict(params or {}))

    def evaluate(
        self,
        dataset: DataFrame,
        metrics: Any = None,
        *,
        label_cols: ColumnNames | str | None = None,
        sample_weight_col: str | bool | None = None,
        handle_invalid: str | None = None,
    ) -> dict[str, Any]:
        """Return losses and metrics over all rows of a DataFrame, in one pass over Spark tasks.

        They are what ``model.evaluate`` gives in one process: every task adds up what the metrics
        keep, and the results follow from the sums over all rows. (The losses of single outputs,
        where there are several, Keras averages over batches of whatever size; its numbers are these
        with a ``batch_size`` of all rows.) What has no exact value in that
        way (a loss that depends on which rows are in a batch together, a metric that keeps
        something else than sums) is refused by name. A model of `from_keras` is evaluated by
        ``metrics`` that are given, as what it was compiled with is not known; one of
        `from_saved_model` is refused.

        A PyTorch model has its `TorchModel`'s loss and metrics, which ``run_training`` and
        ``from_run(…, model_fn=…)`` know. Its ``metrics`` are ``"accuracy"``, ``"mae"`` and
        ``"mse"``, and functions of outputs and labels that return one value per row, the mean over
        the rows, or a pair of a sum and what it is divided by; a dictionary names them. They do not
        weigh rows.

        Args:
            dataset: has the feature columns, and those the outputs are compared with.
            metrics: ``None`` (default) for the loss and metrics the model was compiled with. Else
                a list of names of Keras' metrics, objects of ``keras.metrics``, functions of
                labels and predictions, Spark ML's metrics (``"spark:areaUnderROC"``, or an
                evaluator of ``pyspark.ml.evaluation``, whose ``labelCol`` and ``weightCol``, if
                set, are those that are used here), and ``"compiled"`` for the model's own; or, for
                several outputs, Keras' by output, as ``Model.compile`` takes them.
            label_cols: the label columns, where they are not called as in training: a list, or a
                dictionary by the outputs' names. Of a model of `from_keras` with one output, the
                column ``label`` by default.
            sample_weight_col: the column of sample weights; by default that of the training,
                ``False`` for none. It weighs ``metrics`` that are given here; those the model was
                compiled with as ``Model.compile`` was told.
            handle_invalid: ``"error"`` or ``"skip"`` for rows with a null, or an array of another
                size, in any of these columns; by default the transformer's, where that is no
                ``"keep"``, which is for predictions, and ``"error"`` else.

        Returns:
            The results by name: numbers, and lists of numbers where a metric gives several.

        Raises:
            InvalidInputError: an argument cannot be right, or names no metric; it lists those.
            DataError: columns do not fit the model's, a row cannot be evaluated, or there is none.
            ModelError: a loss or metric has no exact value, or the model is not compiled.
        """
        settings = prediction_settings(self)
        by_default = ERROR if settings.handle_invalid == KEEP else settings.handle_invalid
        spark = _session(dataset, "evaluate")
        check_has_an_end(dataset, "evaluated on")
        predictor = self._model.predictor(spark, settings)
        request = EvaluationRequest(
            metrics,
            label_cols,
            sample_weight_col,
            by_default if handle_invalid is None else handle_invalid,
        )
        return evaluate(dataset, self._model.metadata.recipe, predictor, request)

    def predict_files(
        self,
        source: str | os.PathLike[str],
        destination: str | os.PathLike[str],
        *,
        columns: Sequence[str] | None = None,
        mode: str = "error",
    ) -> int:
        """Predict on a folder of Parquet files, and write another folder of them.

        Spark's tasks read and write the files themselves, so rows need not pass through the JVM.
        Other columns are stored as they were, folders such as ``day=1`` stay, and the destination
        holds every row once, also if tasks were repeated. All files must have the same columns.
        A column that pyarrow would store in another type is refused by name: timestamps of
        Parquet's old INT96, above all, which Spark writes unless
        ``spark.sql.parquet.outputTimestampType`` is ``TIMESTAMP_MICROS``. Files come into the
        destination at the end, and ``_SUCCESS`` last. A lease keeps other calls out meanwhile; that
        of a driver which was killed is taken over, at once on its machine, elsewhere after a
        minute. Params hold as for ``transform``, but for those that make vectors, classes or a
        struct of the outputs.

        Args:
            source: the folder, or one file; files whose names begin with ``_`` or ``.`` are left
                out.
            destination: the folder to write, not within the source.
            columns: the columns to keep beside the predictions; by default all.
            mode: ``"error"`` (default) refuses a destination that holds files, ``"overwrite"``
                replaces them at the end.

        Returns:
            The rows in the destination.

        Raises:
            DataError: there are no files, a log says which of them count (a stream's, Delta
                Lake's or Hudi's), a file is damaged, changes, vanishes or has other columns than
                the first one, or a column is missing, does not fit the model, or cannot be written
                as it was; the message names the file.
            InvalidInputError: the destination holds files, is being written by another call or
                cannot be written, a Param asks for what files are not given, or another argument
                cannot be right.
            ModelError: the model cannot be called.
            RunFailedError: the job ended before all was written.
            RunCancelledError: the job was cancelled through Spark.
        """
        settings = prediction_settings(self)
        place, target = Location(source), Location(destination)
        request = FilesRequest(place, target, columns, mode, settings)
        spark = active_session()
        use_driver_python(spark)
        return predict_files(spark, request, self._model.predictor(spark, settings))

    def export(
        self, path: str | os.PathLike[str], format: str = "saved_model", *, mode: str = "error"
    ) -> None:
        """Write the model for programs that know neither Spark nor this package.

        TensorFlow is imported by this call. A ``"saved_model"`` predicts with TensorFlow alone:
        ``tf.saved_model.load(path).signatures["serving_default"](**{column: tensor})`` takes the
        feature columns, in the types and shapes the model was trained on: encoded columns as the
        arrays that `transform` decodes them to. It gives the outputs, in the model's shapes, under
        the names of `transform`'s columns, and the columns of classes that ``probabilityCol`` and
        ``rawPredictionCol`` ask for.

        An ``"onnx"`` is one file with the same inputs and outputs, for onnxruntime and others. It
        needs the extra ``onnx``, and is compared with Keras
        on rows of the training before it is written. A ``"keras"`` is Keras' own file, which takes
        the model's inputs, and knows neither columns nor what is done to them; the user's own
        classes are needed to load it.

        Args:
            path: the folder to write, or the file, whose name ends in ``.onnx`` or ``.keras``; or
                its URL.
            format: ``"saved_model"`` (default), ``"onnx"`` or ``"keras"``.
            mode: ``"error"`` (default) refuses a path that holds something, ``"overwrite"``
                replaces an earlier export; a file of this name is replaced, whatever it holds.

        Raises:
            ModelError: the format cannot hold the model, or a column's transform; it says why.
            EnvironmentProblem: a package that the format needs is not installed.
            RunDirectoryError: there is something at the path.
            InvalidInputError: a Param asks for columns that the format does not have, or another
                argument cannot be right.
        """
        request = ExportRequest(Location(path), format, mode, prediction_settings(self))
        export_model(self._model, request)

    def _transform(self, dataset: DataFrame) -> DataFrame:
        settings = prediction_settings(self)
        predictor = self._model.predictor(_session(dataset, "transform"), settings)
        return with_predictions(dataset, predictor, settings)


def _session(dataset: DataFrame, method: str) -> SparkSession:
    check_is_frame(dataset, f"{method} takes a Spark DataFrame")
    spark = check_running(dataset.sparkSession)
    use_driver_python(spark)
    return spark
