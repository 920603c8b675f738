"""Transformers: trained models as models of Spark ML."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from pyspark.ml import Model
from pyspark.ml.param import Param
from pyspark.ml.util import MLReadable, MLWritable

from ..checkpoint.run_directory import RunDirectory
from ..cluster.spark.session import (
    active_session,
    check_is_frame,
    check_running,
    use_driver_python,
)
from ..config.data import Transform
from ..config.keywords import check_keywords
from ..config.prediction import (
    ClassCol,
    HandleInvalid,
    OutputForm,
    PredictionCol,
    PredictionSettings,
    added_columns,
)
from ..config.validators import ColumnNames, check_choice, check_place
from ..data.prepare.datasets import check_has_an_end
from ..errors import InvalidInputError, brief
from ..formatting import quote_all
from ..frameworks import KERAS, transformer_of
from ..observe.console import show_activity
from ..observe.notebook import heading_html, never_failing
from ..storage.filesystem import Location
from ..storage.folders import check_free, check_free_file, convert_save_errors
from ..training.engine import GRAPH_FILE, SUFFIXES, engine_named
from ..training.onnx import PLAIN, VECTOR
from .evaluate import evaluate
from .features import feature_names
from .inference import ERROR, KEEP
from .load import ModelHandle, TrainingSummary, adopt_model, read_finished_run
from .outputs import added_by, check_classes, with_predictions
from .params import (
    PredictionParams,
    check_stage_params,
    prediction_settings,
    set_params,
    setters,
)
from .persistence import KerasStageReader, StageWriter, UserCode, loading_with
from .predict_files import MODES, FilesRequest, predict_files

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

# Params that say of an output what it is; the setting of each.
_OF_CLASSES = {"probabilityCol": "probability_col", "rawPredictionCol": "raw_prediction_col"}


T = TypeVar("T", bound="TrainedTransformer")


class TrainedTransformer(Model, PredictionParams, MLReadable, MLWritable):  # type: ignore[misc]
    """Adds a trained model's predictions to a DataFrame; all other columns stay.

    Args:
        model: the model, on the driver.
        summary: the summary of its training.
        settings: how it predicts.

    Attributes:
        engine: the engine of the models that a class holds, where a model does not say another.
        loading_advice: how the user's own code is given when one is loaded, for messages.
    """

    engine: ClassVar[str]
    loading_advice: ClassVar[str]

    def __init__(
        self,
        model: ModelHandle,
        *,
        summary: TrainingSummary | None = None,
        settings: PredictionSettings | None = None,
    ) -> None:
        super().__init__()
        self._model = model
        self._summary = summary
        set_params(self, settings or PredictionSettings())

    @classmethod
    def _of_run(
        cls: type[T],
        run_dir: str | os.PathLike[str],
        code: UserCode,
        checkpoint: int | None,
        **settings: Any,
    ) -> T:
        """Return the transformer of a finished run; ``settings`` are those of predictions."""
        prediction, directory = PredictionSettings(**settings), RunDirectory(Location(run_dir))
        with show_activity(f"loading the model in {directory.location}"):
            model = read_finished_run(
                directory, engine=cls.engine, checkpoint=checkpoint, **vars(code)
            )
        others = [name for name in code.transforms or () if name not in model.recipe.transforms]
        if others:
            raise InvalidInputError(
                f"transforms names {quote_all(others)}, which the model in {directory.location} "
                "was trained without a transform of: leave it out, or change the DataFrame's column"
            )
        summary = TrainingSummary(str(directory.location), directory.read_metrics())
        return cls(ModelHandle(model), summary=summary, settings=prediction)

    def _set(self: T, **values: object) -> T:
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

    def transform(
        self, dataset: DataFrame, params: Mapping[Param[Any], object] | None = None
    ) -> DataFrame:
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
        metrics: object = None,
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
        with show_activity("evaluating the model", spark):
            predictor = self._model.predictor(spark, settings)
            return evaluate(
                dataset,
                self._model.metadata.recipe,
                predictor,
                metrics=metrics,
                label_cols=label_cols,
                sample_weight_col=sample_weight_col,
                handle_invalid=by_default if handle_invalid is None else handle_invalid,
            )

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
        with show_activity(f"predicting files into {target}", spark):
            return predict_files(spark, request, self._model.predictor(spark, settings))

    def export(
        self, path: str | os.PathLike[str], format: str = "saved_model", *, mode: str = "error"
    ) -> None:
        """Write the model for programs that know neither Spark nor this package.

        TensorFlow is imported by this call. A ``"saved_model"`` predicts with TensorFlow alone:
        ``tf.saved_model.load(path).signatures["serving_default"](**{column: tensor})`` takes the
        feature columns, in the types and shapes the model was trained on: encoded columns as the
        arrays that `transform` decodes them to. It gives the outputs, in the model's shapes, under
        the names of `transform`'s columns. Columns of classes, which ``probabilityCol`` and
        ``rawPredictionCol`` ask for, are refused: `export_pipeline` has them.

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
        _export(self._model, Location(path), format, mode, prediction_settings(self))

    def _transform(self, dataset: DataFrame) -> DataFrame:
        settings = prediction_settings(self)
        predictor = self._model.predictor(_session(dataset, "transform"), settings)
        return with_predictions(dataset, predictor, settings)

    @property
    def output_names(self) -> list[str]:
        """The names of the model's outputs, in its order."""
        return [output.name for output in self._model.metadata.recipe.outputs]

    @property
    def summary(self) -> TrainingSummary:
        """Summary of the model's training.

        Raises:
            InvalidInputError: it comes from no training of this package's.
        """
        if self._summary is None:
            raise InvalidInputError(
                "summary is missing: the model does not come from a training of this package"
            )
        return self._summary

    @property
    def hasSummary(self) -> bool:
        """True if there is a `summary`."""
        return self._summary is not None

    @never_failing
    def _repr_html_(self) -> str:
        title = f"{type(self).__name__} {self.uid}"
        if self._summary is None:
            return heading_html(title, {"outputs": ", ".join(self.output_names)})
        return self._summary.html(title)

    def getModel(self) -> Any:
        """Return the framework's own model, with its weights, on the driver.

        The framework is imported by this call. A Keras model is not compiled; a PyTorch module is
        on the CPU, in evaluation mode.

        Raises:
            ModelError: ``model_fn`` builds another model than was trained.
        """
        return self._model.model()

    def write(self) -> StageWriter:
        """Return a writer of this transformer: ``write().overwrite().save(path)``.

        Raises:
            RunDirectoryError: from its ``save``: there is something at the path, or the files the
                model was read from are gone.
        """
        return StageWriter(self)


def _session(dataset: DataFrame, method: str) -> SparkSession:
    check_is_frame(dataset, f"{method} takes a Spark DataFrame")
    spark = check_running(dataset.sparkSession)
    use_driver_python(spark)
    return spark


def _export(
    model: ModelHandle, target: Location, format: str, mode: str, settings: PredictionSettings
) -> None:
    """Write the model; the framework is imported.

    Args:
        model: the model.
        target: the folder or file to write.
        format: what to write.
        mode: what becomes of an export that is there.
        settings: how the transformer predicts: names of columns.

    Raises:
        InvalidInputError: the settings do not fit the model, or there is no such format.
        ModelError: the format cannot hold the model.
        RunDirectoryError: there is something at the place.
        StorageError: storage fails.
    """
    check_choice("mode", mode, MODES)
    suffix = SUFFIXES.get(format, "")
    if not target.name.endswith(suffix):
        raise InvalidInputError(
            f"a {format!r} is one file, whose name ends in {suffix}; got {target}"
        )
    if settings.output_form == "struct":
        raise InvalidInputError(
            "output_form='struct' puts all outputs into one column, which an export does not have; "
            "take the outputs as they are, from a copy of the transformer with that cleared"
        )
    recipe = model.whole()
    engine = engine_named(recipe.engine)
    columns = feature_names(settings, recipe.inputs, recipe.columns)
    engine.check_export(format, columns, tuple(recipe.transforms))
    outputs = added_columns([one.name for one in recipe.outputs], settings.prediction_col)
    made = [
        one.name for one in added_by(recipe.outputs, settings) if one.holds not in (PLAIN, VECTOR)
    ]
    if made:
        raise InvalidInputError(
            f"a {format!r} gives a model's outputs as they are, and probability_col and "
            f"raw_prediction_col ask for {quote_all(made)}, which are made of them: clear these "
            "two in a copy of the transformer, or export it as a pipeline, "
            "export_pipeline(PipelineModel([transformer]), path, frame)"
        )
    if format in SUFFIXES:
        check_free_file(target, mode)
    else:
        check_free(target, mode, GRAPH_FILE, "an export")
    with convert_save_errors("the export", target):
        target.parent.make_folder()
        engine.export(recipe, format, columns, outputs, target)


def transformer_class(engine: str) -> type[TrainedTransformer]:
    """Return the class for an engine's dotted name; `TFTransformer` for one of nobody's."""
    from .torch_transformer import TorchTransformer

    classes = (TFTransformer, TorchTransformer)
    return next(one for one in classes if one.__name__ == transformer_of(engine))


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
    @check_keywords("TFTransformer.from_run", setters)
    def from_run(
        cls,
        run_dir: str | os.PathLike[str],
        *,
        checkpoint: int | None = None,
        custom_objects: Mapping[str, object] | None = None,
        model_fn: Callable[[], object] | None = None,
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
        return cls._of_run(
            run_dir,
            UserCode(custom_objects, model_fn, transforms),
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
    @check_keywords("TFTransformer.from_keras", setters)
    def from_keras(
        cls,
        model: object,
        feature_cols: ColumnNames | None = None,
        *,
        custom_objects: Mapping[str, object] | None = None,
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
    @check_keywords("TFTransformer.from_saved_model", setters)
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
        custom_objects: Mapping[str, object] | None = None,
        model_fn: Callable[[], object] | None = None,
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
