"""A trained model on the driver, as all copies of a transformer share it."""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ..checkpoint.run_directory import RunDirectory
from ..cluster.spark.tasks import ask_worker
from ..errors import ModelError
from ..storage.contents import Contents
from ..training.engine import engine_named
from ..training.sample_rows import SAMPLE_FILE
from ..training.spec import OutputSpec
from ..training.trained_model import Recipe, copy_model
from ..typed_json import read_fields
from .features import feature_names
from .inference import Predictor, describing
from .load import TrainedModel, check_callable
from .shipping import ShippedModel

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from ..config.prediction import PredictionSettings


class ServedModel:
    """A model as bytes for Spark's workers, and what is known of it; safe in threads.

    It can be pickled and copied.

    Args:
        model: the model, with its contents.
    """

    def __init__(self, model: TrainedModel) -> None:
        self._shipped = ShippedModel(model.recipe)
        self._known = replace(model, recipe=_without_contents(model.recipe))
        self._lock = threading.Lock()

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_lock"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _lock=threading.Lock())

    @property
    def known(self) -> TrainedModel:
        """What is known of the model without loading it."""
        return self._known

    def model(self) -> Any:
        """Return the framework's model, on the driver; see `Engine.model`."""
        recipe = self._shipped.recipe()
        return engine_named(recipe.engine).model(recipe)

    def whole(self) -> Recipe:
        """Return all that the model is made from, and what it gives; the framework may be loaded.

        Raises:
            ModelError: the model cannot be called, or is not the one that was trained.
        """
        recipe = self._shipped.recipe()
        known = self._known
        if known.learn_outputs and not recipe.outputs:
            told, problem = engine_named(recipe.engine).describe_outputs(recipe)
            outputs = tuple(read_fields(one, OutputSpec) for one in told)
            known = replace(known, recipe=replace(recipe, outputs=outputs), problem=problem)
        check_callable(known)
        return replace(recipe, outputs=known.recipe.outputs)

    def save(self, directory: RunDirectory) -> None:
        """Write the model's files.

        Raises:
            RunDirectoryError: the files it was read from are gone, and what is in memory is not
                enough.
            OSError: storage fails.
        """

        def held() -> Mapping[str, bytes | Contents]:
            recipe = self._shipped.recipe()
            sample = {} if recipe.sample is None else {SAMPLE_FILE: recipe.sample}
            files = engine_named(recipe.engine).held(recipe.own)
            return {**sample, **files} if files else {}

        copy_model(self._known.stored, directory, held)

    def predictor(self, spark: SparkSession, settings: PredictionSettings) -> Predictor:
        """Return what predicts in the workers of a session.

        Raises:
            ModelError: the model cannot be called, or is not the one that was trained.
            InvalidInputError: other feature columns are named than it takes.
        """
        with self._lock:  # also so that it is sent once
            if self._known.learn_outputs:
                self._learn_outputs(spark)
            check_callable(self._known)
            load = self._shipped.loader(spark)
        recipe = self._known.recipe
        return Predictor(
            digest=self._shipped.digest,
            load=load,
            columns=recipe.columns,
            outputs=recipe.outputs,
            batch_size=settings.predict_batch_size,
            handle_invalid=settings.handle_invalid,
            names=feature_names(settings, recipe.inputs, recipe.columns),
        )

    def _learn_outputs(self, spark: SparkSession) -> None:
        """Let a worker build the model and tell what it gives; the driver loads no framework."""
        told = ask_worker(spark, describing(self._shipped.loader(spark)), keep=True)
        outputs, problem, wrong = json.loads(told)
        if wrong:
            raise ModelError(f"{wrong} (run {self._known.place})")
        known = self._known.recipe
        if not known.outputs:
            known = replace(known, outputs=tuple(read_fields(one, OutputSpec) for one in outputs))
        self._known = replace(self._known, recipe=known, problem=problem, learn_outputs=not outputs)


def _without_contents(recipe: Recipe) -> Recipe:
    """Return what the driver has to know of a recipe."""
    return replace(recipe, own=None, transforms={}, sample=None)
