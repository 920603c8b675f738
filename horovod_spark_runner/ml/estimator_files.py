"""How `HorovodEstimator` is saved and loaded: its Params as JSON, code by the name it has."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from pyspark.ml.util import DefaultParamsReader, DefaultParamsWriter, MLReader, MLWriter

from ..errors import InvalidInputError
from ..settings.code import import_name, is_import_name
from ..settings.estimator import plain_json
from .estimator_params import EstimatorParams

# In Spark's metadata: the version of what is written here.
_KEY, FORMAT = "horovodSparkRunnerFormat", 1


class EstimatorWriter(MLWriter):  # type: ignore[misc]
    """Saves an estimator.

    Args:
        stage: the estimator.
    """

    def __init__(self, stage: EstimatorParams) -> None:
        super().__init__()
        self._stage = stage

    def save(self, path: str) -> None:
        """Save to a folder; what cannot be saved is refused before anything is replaced."""
        self._values()
        super().save(path)

    def saveImpl(self, path: str) -> None:
        """Write into a folder that is free."""
        DefaultParamsWriter.saveMetadata(
            self._stage,
            path,
            self.sparkSession,
            extraMetadata={_KEY: FORMAT},
            paramMap=self._values(),
        )

    def _values(self) -> dict[str, Any]:
        return {param.name: savable(param.name, v) for param, v in self._stage._paramMap.items()}


class EstimatorReader(MLReader):  # type: ignore[misc]
    """Loads an estimator.

    Args:
        cls: its class.
    """

    def __init__(self, cls: type[Any]) -> None:
        super().__init__()
        self._cls = cls

    def load(self, path: str) -> Any:
        """Return the estimator that was saved in a folder."""
        metadata = DefaultParamsReader.loadMetadata(path, self.sparkSession)
        expected = f"{self._cls.__module__}.{self._cls.__name__}"
        if metadata.get("class") != expected:
            raise InvalidInputError(f"{path} holds a {metadata.get('class')}, not a {expected}")
        found = metadata.get(_KEY)
        if found != FORMAT:
            raise InvalidInputError(
                f"{path} holds an estimator of format {found!r}; this version of "
                f"horovod_spark_runner reads format {FORMAT}"
            )
        stage = self._cls()
        stage._resetUid(metadata["uid"])
        DefaultParamsReader.getAndSetParams(stage, metadata)
        return stage


def savable(name: str, value: Any) -> Any:
    """Return the value of a Param as JSON, with functions and classes by their import names.

    Raises:
        InvalidInputError: it holds something else.
    """
    if name == "modelFn" and isinstance(value, str):
        is_local = "://" not in value and not is_import_name(value)
        return os.path.abspath(value) if is_local else value
    if callable(value):
        found = import_name(value)
        if found is None:
            raise InvalidInputError(
                f"{name} is {getattr(value, '__qualname__', repr(value))}, which another process "
                "cannot import, so the estimator cannot be saved; define it in a module (no "
                "script, notebook, lambda or function within a function), and give what varies as "
                "modelArgs"
            )
        return found
    if isinstance(value, Mapping):
        return {str(key): savable(f"{name}[{key!r}]", one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [savable(f"{name}[{number}]", one) for number, one in enumerate(value)]
    try:
        return plain_json(name, value)
    except InvalidInputError as error:
        raise InvalidInputError(f"the estimator cannot be saved: {error}") from error
