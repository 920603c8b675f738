"""`TFTransformer`: a trained model as a Spark ML transformer."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from pyspark.ml import Transformer

from ..errors import InvalidInputError, ModelError
from ..launch.shared.topology import RankPlacement
from ..rundir.attempt import Attempt
from ..rundir.directory import RunDirectory
from ..settings.data import Transform
from ..settings.kinds import check_choice, check_count
from ..spark.session import use_own_python
from ..storage.filesystem import Location
from ..training.columns import ColumnNames
from ..training.trained_model import Recipe, output_from
from .evaluate import EvaluationRequest, evaluate
from .frame import with_predictions
from .inference import ERROR, HANDLE_INVALID, Predictor, describing
from .naming import PredictionCol, check_prediction_col
from .shipping import ShippedModel
from .trained import TrainedModel, check_callable, read_finished_run

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


class TFTransformer(Transformer):  # type: ignore[misc]
    """Adds a trained Keras model's predictions to a DataFrame; all other columns stay.

    Each output of the model adds a column: of numbers if the output is one number per row, else of
    arrays of numbers. It predicts as ``model.predict`` does.

    A transformer can be pickled and copied, and used in a new Spark session.

    Attributes:
        prediction_col: names of the added columns. ``None`` (default): "prediction" for a single
            output; several are called by the outputs' names. A string: the name, or, for several
            outputs, what their names begin with (``"p"`` gives ``"p_price"``). A dictionary from
            output to column, where outputs that are not in it keep their names; or a list, in the
            outputs' order. May be set at any time.
        handle_invalid: what becomes of rows with a null, or an array that has null elements or
            another size, in a feature column: ``"error"`` (default), ``"skip"`` leaves them out,
            ``"keep"`` gives them null as prediction. May be set at any time.
        batch_size: rows per call of the model (1024).
        output_names: names of the model's outputs.
        history: metrics of each epoch, over all ranks.
        run_dir: the run directory.
        placement: where the ranks ran; empty if loaded from a run directory.
        timings: seconds per phase of the run, one after the other: ``prepare`` (checks),
            ``materialize``, ``attempts`` (earlier ones, and the pauses between), ``check``,
            ``tasks``, ``rendezvous``, ``start``, ``function``, ``results`` (of the last attempt;
            see `RunResult`) and ``load``; in all ``total``. Of ``function``, on rank 0: ``build``,
            ``epochs``, ``save``; of ``epochs``, in training steps: ``train``. Besides, training
            steps' ``samples_per_second``. Empty if loaded from a run directory.
        attempts: the attempts the run took, as `horovod_spark_runner.rundir.attempt.Attempt`;
            empty if loaded from a run directory.
    """

    def __init__(
        self,
        model: TrainedModel,
        *,
        run_dir: str,
        history: Sequence[Mapping[str, float]] = (),
        placement: Sequence[RankPlacement] = (),
        prediction_col: PredictionCol = None,
        batch_size: int = 1024,
        handle_invalid: str = ERROR,
        attempts: Sequence[Attempt] = (),
    ) -> None:
        super().__init__()
        self._shipped = ShippedModel(model.recipe)
        self._model = replace(model, recipe=_without_contents(model.recipe))
        self.run_dir = run_dir
        self.history = [dict(logs) for logs in history]
        self.placement = tuple(placement)
        self.timings: dict[str, float] = {}
        self.attempts = tuple(attempts)
        self.prediction_col = prediction_col
        self.batch_size = batch_size
        self.handle_invalid = handle_invalid
        self._check_settings()

    @classmethod
    def from_run(
        cls,
        run_dir: str | os.PathLike[str],
        *,
        custom_objects: Mapping[str, Any] | None = None,
        model_fn: Callable[[], Any] | None = None,
        transforms: Mapping[str, Transform] | None = None,
        prediction_col: PredictionCol = None,
        batch_size: int = 1024,
        handle_invalid: str = ERROR,
    ) -> TFTransformer:
        """Return the transformer of a finished run.

        A model made of Keras' own layers needs the run directory only. One with classes, functions
        or lambdas of the user's needs these, because code is not kept in storage.

        Args:
            run_dir: its run directory.
            custom_objects: the model's own classes and functions by name, if it has some.
            model_fn: function without arguments that builds the model, which is then given the
                trained weights; in place of ``custom_objects``, and for models with lambdas.
            transforms: the functions its columns were trained with.
            prediction_col: columns to add; see the attribute.
            batch_size: rows per call of the model (1024).
            handle_invalid: ``"error"`` (default), ``"skip"`` or ``"keep"``; see the attribute.

        Raises:
            RunDirectoryError: it holds no finished model, or one that needs ``custom_objects`` or
                ``model_fn``; the message names the parts.
            DataError: a transform that the model was trained with is missing.
            InvalidInputError: another argument cannot be right.
        """
        directory = RunDirectory(Location(run_dir))
        model = read_finished_run(
            directory, custom_objects=custom_objects, model_fn=model_fn, transforms=transforms
        )
        return cls(
            model,
            run_dir=str(directory.location),
            history=directory.read_metrics(),
            prediction_col=prediction_col,
            batch_size=batch_size,
            handle_invalid=handle_invalid,
        )

    @property
    def output_names(self) -> list[str]:
        """The names of the model's outputs, in its order."""
        return [output.name for output in self._model.recipe.outputs]

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
        keep, and the results follow from the sums over all rows. What has no exact value in that
        way (a loss that depends on which rows are in a batch together, a metric that keeps
        something else than sums) is refused by name.

        Args:
            dataset: has the feature columns, and those the outputs are compared with.
            metrics: ``None`` (default) for the loss and metrics the model was compiled with. Else
                a list of names of Keras' metrics, objects of ``keras.metrics``, functions of
                labels and predictions, Spark ML's metrics (``"spark:areaUnderROC"``, or an
                evaluator of ``pyspark.ml.evaluation``), and ``"compiled"`` for the model's own; or,
                for several outputs, Keras' by output, as ``Model.compile`` takes them.
            label_cols: the label columns, where they are not called as in training: a list, or a
                dictionary by the outputs' names.
            sample_weight_col: the column of sample weights; by default that of the training,
                ``False`` for none. It weighs ``metrics`` that are given here; those the model was
                compiled with as ``Model.compile`` was told.
            handle_invalid: ``"error"`` or ``"skip"`` for rows with a null, or an array of another
                size, in any of these columns; by default the transformer's.

        Returns:
            The results by name: numbers, and lists of numbers where a metric gives several.

        Raises:
            InvalidInputError: an argument cannot be right, or names no metric; it lists those.
            DataError: columns do not fit the model's, a row cannot be evaluated, or there is none.
            ModelError: a loss or metric has no exact value, or the model is not compiled.
        """
        spark = self._ready(dataset, "evaluate")
        request = EvaluationRequest(
            metrics,
            label_cols,
            sample_weight_col,
            self.handle_invalid if handle_invalid is None else handle_invalid,
            self.batch_size,
        )
        load = self._shipped.loader(spark)
        return evaluate(dataset, self._model.recipe, self._shipped.digest, load, request)

    def _check_settings(self) -> None:
        check_prediction_col(self.prediction_col)
        check_choice("handle_invalid", self.handle_invalid, HANDLE_INVALID)
        check_count("batch_size", self.batch_size)

    def _transform(self, dataset: DataFrame) -> DataFrame:
        spark = self._ready(dataset, "transform")
        return with_predictions(dataset, self._predictor(spark), self.prediction_col)

    def _ready(self, dataset: DataFrame, method: str) -> SparkSession:
        """Return the session of a DataFrame, the model being one that can be called in it."""
        self._check_settings()
        spark: SparkSession | None = getattr(dataset, "sparkSession", None)
        if spark is None:
            raise InvalidInputError(f"{method} takes a Spark DataFrame, got {dataset!r:.200}")
        use_own_python(spark)
        if self._model.learn_outputs:
            self._learn_outputs(spark)
        check_callable(self._model)
        return spark

    def _learn_outputs(self, spark: SparkSession) -> None:
        """Let a worker build the model and tell what it gives; the driver loads no framework."""
        describe = describing(self._shipped.loader(spark))
        row = spark.range(0, 1, 1, 1).mapInArrow(describe, "text string").first()
        outputs, problem, wrong = json.loads(row.text) if row is not None else ([], "", "")
        if wrong:
            raise ModelError(f"{wrong} (run {self.run_dir})")
        known = self._model.recipe
        if not known.outputs:
            known = replace(known, outputs=tuple(output_from(o) for o in outputs))
        self._model = replace(self._model, recipe=known, problem=problem, learn_outputs=not outputs)

    def _predictor(self, spark: SparkSession) -> Predictor:
        recipe = self._model.recipe
        return Predictor(
            digest=self._shipped.digest,
            load=self._shipped.loader(spark),
            columns=recipe.columns,
            outputs=recipe.outputs,
            batch_size=self.batch_size,
            handle_invalid=self.handle_invalid,
        )


def _without_contents(recipe: Recipe) -> Recipe:
    """Return what the driver has to know of a recipe."""
    return replace(recipe, own=None, transforms={})
