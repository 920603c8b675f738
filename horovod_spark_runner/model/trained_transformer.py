"""Base of the transformers of all frameworks."""

from __future__ import annotations

import os
from typing import Any, ClassVar, TypeVar

from pyspark.ml.util import MLReadable, MLWritable

from ..checkpoint.run_directory import RunDirectory
from ..config.prediction import PredictionSettings
from ..errors import InvalidInputError
from ..formatting import quote_all
from ..storage.filesystem import Location
from .load import ModelHandle, read_finished_run
from .persistence import StageWriter
from .predictions import PredictionModel
from .summary import TrainingSummary

T = TypeVar("T", bound="TrainedTransformer")


class TrainedTransformer(PredictionModel, MLReadable, MLWritable):  # type: ignore[misc]
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
        super().__init__(model, settings)
        self._summary = summary

    @classmethod
    def _of_run(
        cls: type[T],
        run_dir: str | os.PathLike[str],
        settings: PredictionSettings,
        **how: Any,
    ) -> T:
        """Return the transformer of a finished run; ``how`` as `read_finished_run` takes it."""
        directory = RunDirectory(Location(run_dir))
        model = read_finished_run(directory, engine=cls.engine, **how)
        others = [name for name in how["transforms"] or () if name not in model.recipe.transforms]
        if others:
            raise InvalidInputError(
                f"transforms names {quote_all(others)}, which the model in {directory.location} "
                "was trained without a transform of: leave it out, or change the DataFrame's column"
            )
        summary = TrainingSummary(str(directory.location), directory.read_metrics())
        return cls(ModelHandle(model), summary=summary, settings=settings)

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
                "there is no summary: the model comes from no training of this package's"
            )
        return self._summary

    @property
    def hasSummary(self) -> bool:
        """True if there is a `summary`."""
        return self._summary is not None

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
        return StageWriter(self, self._model, self._summary)
