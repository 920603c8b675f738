"""Save and load `HorovodEstimator`: Params as JSON, code by its import name."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from typing import Any

from pyspark.ml.util import DefaultParamsReader, DefaultParamsWriter, MLReader, MLWriter

from ..config.estimator import plain_json
from ..config.importable import (
    from_storage,
    is_import_name,
    is_of_script,
    iterate_items,
    name_here,
)
from ..errors import InvalidInputError, RunDirectoryError
from ..storage.filesystem import Location
from ..typed_json import load_json
from .estimator_params import EstimatorParams
from .persistence import location_of, read_metadata, write_metadata, write_stage

logger = logging.getLogger(__name__)

# In Spark's metadata: the version of what is written here.
_KEY, FORMAT = "horovodSparkRunnerFormat", 1
# Params that may be paths of what a fit reads.
_READ = ("modelFn", "initialWeights", "resumeFrom")


class EstimatorWriter(MLWriter):  # type: ignore[misc]
    """Saves an estimator.

    Args:
        stage: the estimator.
    """

    def __init__(self, stage: EstimatorParams) -> None:
        super().__init__()
        self._stage = stage

    def save(self, path: str | os.PathLike[str]) -> None:
        """Save the estimator; refuse it before anything is replaced, if it cannot be saved.

        Args:
            path: folder or URL.

        Raises:
            RunDirectoryError: there is something at ``path``, and `overwrite` was not asked for.
            InvalidInputError: a Param holds what cannot be saved, ``path`` is none, or Spark reads
                from other storage than this process writes to.
            StorageError: storage fails.
        """
        stage, spark = self._stage, self.sparkSession
        values = {param.name: savable(param.name, v) for param, v in stage._paramMap.items()}
        text = DefaultParamsWriter._get_metadata_to_save(stage, spark, {_KEY: FORMAT}, values)
        write_stage(
            spark, path, lambda place: write_metadata(place, text), overwrite=self.shouldOverwrite
        )
        named = {one for one in iterate_items(values) if is_import_name(one)}
        of_script = sorted(filter(is_of_script, named))
        if of_script:
            logger.warning(
                "%s is saved with the names of code that it needs: a process that loads it to train"
                " must have its own %s, defined in its script or notebook",
                path,
                ", ".join(of_script),
            )


class EstimatorReader(MLReader):  # type: ignore[misc]
    """Loads an estimator.

    Args:
        cls: its class.
    """

    def __init__(self, cls: type[Any]) -> None:
        super().__init__()
        self._cls = cls

    def load(self, path: str | os.PathLike[str]) -> Any:
        """Return the estimator that was saved.

        Functions and classes are loaded as text, and not imported: before a fit, give them again by
        their setters. So it is with ``launch`` if it sets variables or parameters of MPI.

        Args:
            path: folder or URL.

        Raises:
            RunDirectoryError: there is none, or it is damaged.
            InvalidInputError: there is another stage, or one of a newer format.
        """
        location = location_of(self.sparkSession, path)
        try:
            metadata = load_json(read_metadata(location))
            class_name, version = metadata.get("class"), metadata.get(_KEY)
        except (ValueError, AttributeError) as error:
            if isinstance(error, RunDirectoryError):
                raise
            raise RunDirectoryError(f"the metadata in {location} are damaged: {error}") from error
        expected = f"{self._cls.__module__}.{self._cls.__name__}"
        if class_name != expected:
            raise InvalidInputError(f"{path} holds a {class_name}, not a {expected}")
        if version != FORMAT:
            raise InvalidInputError(
                f"{path} holds an estimator of format {version!r}; this version of "
                f"horovod_spark_runner reads format {FORMAT}"
            )
        stage = self._cls()
        try:
            stage._resetUid(metadata["uid"])
            DefaultParamsReader.getAndSetParams(stage, metadata)
            for values in (stage._paramMap, stage._defaultParamMap):  # Spark converts the latter
                values.update({param: from_storage(value) for param, value in values.items()})
        except Exception as error:  # Spark's code takes the metadata for its own
            raise RunDirectoryError(f"{location} is of another version: {error}") from error
        return stage


def savable(name: str, value: Any) -> Any:
    """Return the value of a Param as JSON, with functions and classes by their import names.

    Raises:
        InvalidInputError: it holds something else.
    """
    if name in _READ and isinstance(value, str):
        by_name = name == "modelFn" and is_import_name(value)
        return value if by_name else str(Location(value))  # the whole path
    if callable(value):
        import_name = name_here(value)
        if import_name is None:
            raise InvalidInputError(
                f"{name} is {getattr(value, '__qualname__', repr(value))}, which has no name that "
                "another process could import it by, so the estimator cannot be saved; define it "
                "at the top level of a module, script or notebook (no lambda, no function within a "
                "function), and give what varies as modelArgs. What it has trained can be saved: "
                "its model, and a search's bestModel"
            )
        return import_name
    if isinstance(value, Mapping):
        return {str(key): savable(f"{name}[{key!r}]", one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [savable(f"{name}[{number}]", one) for number, one in enumerate(value)]
    try:
        return plain_json(name, value)
    except InvalidInputError as error:
        raise InvalidInputError(f"the estimator cannot be saved: {error}") from error
