"""`TFTransformer`: a trained model as a Spark ML transformer."""

from __future__ import annotations

import json
import os
import sys
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
from ..spark.session import active_session, use_own_python
from ..storage.filesystem import Location
from ..training.trained_model import Recipe, output_from
from .files import FilesRequest, predict_files
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

    def _check_settings(self) -> None:
        check_prediction_col(self.prediction_col)
        check_choice("handle_invalid", self.handle_invalid, HANDLE_INVALID)
        check_count("batch_size", self.batch_size)

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
        holds every row once, also if tasks were repeated. It appears when all is done, with
        ``_SUCCESS``.

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
            DataError: there are no files, or a column is missing, does not fit the model, or
                cannot be written as it was; the message names the file.
            InvalidInputError: the destination holds files, or another argument cannot be right.
            ModelError: the model cannot be called.
        """
        request = FilesRequest(
            Location(source), Location(destination), columns, mode, self.prediction_col
        )
        spark = active_session()
        self._make_ready(spark)
        return predict_files(spark, request, self._predictor(spark), sys.stderr)

    def _transform(self, dataset: DataFrame) -> DataFrame:
        spark = getattr(dataset, "sparkSession", None)
        if spark is None:
            raise InvalidInputError(f"transform takes a Spark DataFrame, got {dataset!r:.200}")
        self._make_ready(spark)
        return with_predictions(dataset, self._predictor(spark), self.prediction_col)

    def _make_ready(self, spark: SparkSession) -> None:
        self._check_settings()
        use_own_python(spark)
        if self._model.learn_outputs:
            self._learn_outputs(spark)
        check_callable(self._model)

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
