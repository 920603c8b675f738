"""Save and load transformers and estimators as stages of Spark ML.

A transformer is a folder:

::

    PATH/
        metadata/part-00000     Spark ML's JSON: class, uid, Params; format, summary, sums
        model/                  the trained model's files, as in a run directory

An estimator is its metadata alone: Params as JSON, code by its import name. Spark reads the
metadata as those of any stage. Nothing is unpickled, and nothing that storage names is imported but
the stage's class, which Spark imports: code of the user's is given again.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from pyspark.ml.util import DefaultParamsReader, DefaultParamsWriter, MLReader, MLWriter

from .._version import __version__
from ..checkpoint.run_directory import RunDirectory
from ..cluster.spark.session import classic_context
from ..config.data import Transform
from ..config.estimator import plain_json
from ..config.importable import (
    from_storage,
    is_import_name,
    is_of_script,
    iterate_items,
    name_here,
)
from ..errors import DataError, InvalidInputError, RunDirectoryError, brief
from ..observe.console import show_activity
from ..storage.checksums import compute_checksum
from ..storage.filesystem import Location
from ..storage.folders import convert_save_errors, write_aside
from ..typed_json import load_json, read_fields
from .load import ModelHandle, TrainingSummary, read_finished_run
from .params import EstimatorParams

if TYPE_CHECKING:
    from pyspark.ml.param import Params
    from pyspark.sql import SparkSession

    from .transformer import TrainedTransformer


R = TypeVar("R", bound="_StageReader")

# In Spark's metadata: fields of a transformer, and the format of an estimator.
FORMAT = 1
_PACKAGE_KEY = "horovod_spark_runner"
_ESTIMATOR_KEY, _ESTIMATOR_FORMAT = "horovodSparkRunnerFormat", 1
# Params of an estimator that may be paths of what a fit reads.
_READ = ("modelFn", "initialWeights", "resumeFrom")

logger = logging.getLogger(__name__)


def _write_stage(
    spark: SparkSession,
    path: str | os.PathLike[str],
    write: Callable[[Location], None],
    *,
    overwrite: bool,
) -> Location:
    """Write a stage, and return where it is.

    On local storage and HDFS a reader sees the old stage or the new one, on HDFS for a moment none,
    never a part; the old one is kept until the new one is in its place.

    Args:
        spark: the session it is to be loaded in.
        path: folder or URL.
        write: writes its files into a folder.
        overwrite: whether to replace what is there.

    Raises:
        RunDirectoryError: there is something at ``path``, which is not to be replaced.
        InvalidInputError: ``path`` is none, or Spark reads from other storage than this process
            writes to.
        StorageError: storage fails.
    """
    location = _location_of(spark, path)
    if location.exists() and not (overwrite and location.is_folder):
        advice = "write().overwrite().save(path) replaces it"
        raise RunDirectoryError(
            f"{location} is there already; "
            + (advice if location.is_folder else "it is a file, not a folder")
        )
    with convert_save_errors("the stage", location):
        if location.has_atomic_rename:
            write_aside(location, write)
        else:
            write(location)
    if "://" not in os.fspath(path) and classic_context(spark) is None:
        _check_seen(spark, path, location)
    return location


def _write_metadata(location: Location, text: str) -> None:
    """Write a stage's metadata as Spark ML does: one line of JSON."""
    folder = location.join("metadata")
    folder.make_folder()
    part, mark = folder.join("part-00000"), folder.join("_SUCCESS")
    part.write_text(text + "\n")
    mark.write_bytes(b"")
    # In an object store, where a stage is written over another: Spark reads all that is there.
    for place in folder.list():
        if place.name not in (part.name, mark.name):
            place.delete_file()


def read_metadata(location: Location) -> str:
    """Return a stage's metadata, whoever wrote them.

    Raises:
        RunDirectoryError: there are none, or they cannot be read.
    """
    folder = location.join("metadata")
    try:
        parts = [part for part in folder.list() if part.name.startswith("part-")]
        if parts:
            return parts[0].read_text()
    except (OSError, ValueError) as error:
        raise RunDirectoryError(f"{folder} cannot be read: {error}") from error
    raise RunDirectoryError(f"{location} holds no saved stage: {folder} is missing")


def _location_of(spark: SparkSession, path: str | os.PathLike[str]) -> Location:
    """Return the place that Spark means by a path: without a scheme, on its default file system.

    Raises:
        InvalidInputError: it is no path, or relative to a file system that is not this machine's.
    """
    location = Location(path)
    context = classic_context(spark)
    text = os.fspath(path)
    if context is None or not location.is_local or text.startswith("file:"):
        return location
    configuration = context._jsc.hadoopConfiguration()
    default = str(configuration.get("fs.defaultFS") or "file:///")
    if default.startswith("file:"):
        if os.path.isabs(text):
            return location
        # Spark's JVM stays in the folder where it started; this process may have left it.
        files = context._jvm.org.apache.hadoop.fs.FileSystem.get(configuration)
        return Location(os.path.join(files.getWorkingDirectory().toUri().getPath(), text))
    if not text.startswith("/"):
        raise InvalidInputError(
            f"{text!r} is relative, and Spark's default file system is {default}; give a whole "
            f"path there, or a URL, such as {location.spark_url}"
        )
    return Location(default.rstrip("/") + text)


def _check_seen(spark: SparkSession, path: str | os.PathLike[str], location: Location) -> None:
    """Check that the server of Spark Connect reads the files of this process.

    Raises:
        InvalidInputError: it does not; then nothing stays there.
    """
    written = location.join("metadata", "part-00000").read_text()
    try:
        row = spark.read.text(os.path.join(path, "metadata")).first()
        seen = row is not None and row[0] == written.rstrip("\n")
    except Exception:  # whatever Spark raises for what is not there
        seen = False
    if not seen:
        location.delete_folder()
        raise InvalidInputError(
            f"Spark's server finds nothing at {os.fspath(path)!r}, where this process has written "
            "to its own disk; give the URL of storage that both reach"
        )


@dataclass(frozen=True)
class _Written:
    """Fields that the package's own metadata of a stage have in every format."""

    format: int
    version: str


@dataclass(frozen=True)
class _PackageFields:
    """Its other fields, but the sum of all metadata."""

    signature: str
    summary: dict[str, Any] | None = None


@dataclass(frozen=True)
class UserCode:
    """Code that a stage may need besides its files; see ``from_run`` of its class."""

    custom_objects: Mapping[str, object] | None = None
    model_fn: Callable[[], object] | None = None
    transforms: Mapping[str, Transform] | None = None
    trusted: bool = False


# By the name of the class.
_user_code: ContextVar[Mapping[str, UserCode] | None] = ContextVar("user_code", default=None)


@contextlib.contextmanager
def loading_with(kind: str, code: UserCode) -> Iterator[None]:
    """Pass ``code`` to stages that are loaded inside, also as parts of pipelines.

    Args:
        kind: the name of their class.
        code: what they are given.
    """
    token = _user_code.set({**(_user_code.get() or {}), kind: code})
    try:
        yield
    finally:
        _user_code.reset(token)


class StageWriter(MLWriter):  # type: ignore[misc]
    """Saves a transformer; see `pyspark.ml.util.MLWriter`.

    Args:
        stage: the transformer.
    """

    def __init__(self, stage: TrainedTransformer) -> None:
        super().__init__()
        self._stage = stage

    def save(self, path: str | os.PathLike[str]) -> None:
        """Save the stage; warn of code that loading it will need.

        On local storage and HDFS a reader sees the old stage or the new one, never a part.

        Args:
            path: folder or URL.

        Raises:
            RunDirectoryError: there is something at ``path``, and `overwrite` was not asked for;
                or the files the model was read from are gone.
            InvalidInputError: ``path`` is none, or Spark reads from other storage than this
                process writes to.
            StorageError: storage fails.
        """
        spark = self.sparkSession
        location = _write_stage(
            spark, path, lambda place: self._write(place, spark), overwrite=self.shouldOverwrite
        )
        self._warn_of_needs(location)

    def _write(self, location: Location, spark: SparkSession) -> None:
        directory = RunDirectory(location)
        self._stage._model.save(directory)
        summary = self._stage._summary
        package_fields = {
            "format": FORMAT,
            "version": __version__,
            "signature": compute_checksum(directory.signature.read_bytes()),
            "summary": None if summary is None else asdict(summary),
        }
        text = DefaultParamsWriter._get_metadata_to_save(
            self._stage, spark, {_PACKAGE_KEY: package_fields}
        )
        metadata = load_json(text)
        metadata[_PACKAGE_KEY]["metadata"] = _sum_of_all(metadata)
        _write_metadata(location, json.dumps(metadata))

    def _warn_of_needs(self, location: Location) -> None:
        """Load the files, and warn of code that loading needs besides."""
        try:
            loaded = read_finished_run(
                RunDirectory(location), engine=self._stage.engine, trusted=True
            )
        except (RunDirectoryError, DataError) as error:
            logger.warning(
                "%s is saved, but does not load by itself: %s. %s",
                location,
                error,
                _advice(type(self._stage), error),
            )
            return
        if loaded.recipe.outputs != self._stage._model.metadata.recipe.outputs:
            logger.warning(
                "%s is saved, but what it gives is known from model_fn only: give it, "
                "%s.read().modelFn(…).load(path)",
                location,
                type(self._stage).__name__,
            )


class _StageReader(MLReader):  # type: ignore[misc]
    """Loads a transformer; see `pyspark.ml.util.MLReader`.

    Args:
        kind: the class that is loaded.
    """

    def __init__(self, kind: type[TrainedTransformer]) -> None:
        super().__init__()
        self._kind = kind
        self._code = vars((_user_code.get() or {}).get(kind.__name__) or UserCode()).copy()

    def modelFn(self: R, model_fn: Callable[[], object]) -> R:
        """Set the function that builds the model, which then receives its weights."""
        self._code["model_fn"] = model_fn
        return self

    def transforms(self: R, transforms: Mapping[str, Transform]) -> R:
        """Set the functions that columns were trained with, by column."""
        self._code["transforms"] = transforms
        return self

    def load(self, path: str | os.PathLike[str]) -> Any:
        """Return the transformer that was saved.

        Args:
            path: folder or URL.

        Raises:
            RunDirectoryError: there is none, it is damaged, of a newer format, or needs code of
                the user's; the message names it.
            DataError: a transform that the model was trained with is missing.
            InvalidInputError: an argument cannot be used.
        """
        location = _location_of(self.sparkSession, path)
        metadata = _read_stage_metadata(location, self._kind)
        fields = _read_package_fields(location, metadata)
        directory = RunDirectory(location)
        try:
            with show_activity(f"loading the model in {directory.location}"):
                model = read_finished_run(directory, engine=self._kind.engine, **self._code)
        except (RunDirectoryError, DataError) as error:
            raise type(error)(f"{error}. {_advice(self._kind, error)}") from error
        if compute_checksum(directory.signature.read_bytes()) != fields.signature:
            raise RunDirectoryError(
                f"{location} holds the model of another transformer than its metadata are of: it "
                "was overwritten in part"
            )
        try:
            summary = (
                None if fields.summary is None else read_fields(fields.summary, TrainingSummary)
            )
            stage = self._kind(ModelHandle(model), summary=summary)
            _restore(stage, metadata)
        except Exception as error:  # Spark's code takes the metadata for its own
            raise RunDirectoryError(f"{location} is of another version: {error!r}") from error
        return stage


class KerasStageReader(_StageReader):
    """Loads a transformer of a Keras model."""

    def customObjects(self, custom_objects: Mapping[str, object]) -> KerasStageReader:
        """Set the model's own classes and functions, by name."""
        self._code["custom_objects"] = custom_objects
        return self


class TorchStageReader(_StageReader):
    """Loads a transformer of a PyTorch module."""

    def trusted(self) -> TorchStageReader:
        """Allow code that the files hold to run, because only trusted users write them."""
        self._code["trusted"] = True
        return self


def _advice(kind: type[TrainedTransformer], error: RunDirectoryError | DataError) -> str:
    """Return advice how to provide missing code when a stage of class ``kind`` is loaded."""
    if isinstance(error, RunDirectoryError):
        advice: str = kind.loading_advice
        return advice
    name = kind.__name__
    return (
        f"Of a saved transformer, that is {name}.read().transforms({{…}}).load(path); of one in a "
        f"pipeline, with {name}.loading(transforms={{…}}): PipelineModel.load(path)"
    )


def _read_stage_metadata(location: Location, kind: type) -> dict[str, Any]:
    """Return the metadata of a stage, which must be of class ``kind``.

    Raises:
        RunDirectoryError: there is none, it is of another class, or it is damaged.
    """
    name = f"{kind.__module__}.{kind.__name__}"
    text = read_metadata(location)
    try:
        metadata: dict[str, Any] = load_json(text)
        class_name = metadata["class"]
    except (ValueError, KeyError, TypeError) as error:
        raise RunDirectoryError(f"the metadata in {location} are damaged: {error!r}") from error
    if class_name != name:
        raise RunDirectoryError(f"{location} holds a stage of class {class_name}, not {name}")
    return metadata


def _restore(stage: Params, metadata: Mapping[str, object]) -> None:
    """Give a new stage the identity and Params of a saved one."""
    stage._resetUid(metadata["uid"])
    DefaultParamsReader.getAndSetParams(stage, metadata)


def _read_package_fields(location: Location, metadata: dict[str, Any]) -> _PackageFields:
    """Return what the package recorded in a stage's metadata, after a check of all of them.

    Raises:
        RunDirectoryError: they are of a newer format, or damaged.
    """
    try:
        written = read_fields(metadata[_PACKAGE_KEY], _Written)
        if written.format > FORMAT:
            raise RunDirectoryError(
                f"{location} was saved by horovod_spark_runner {written.version} in format "
                f"{written.format}; this one, {__version__}, reads format {FORMAT}: update it"
            )
        fields = read_fields(metadata[_PACKAGE_KEY], _PackageFields)
        wanted = metadata[_PACKAGE_KEY].pop("metadata")
    except (ValueError, KeyError, TypeError) as error:
        if isinstance(error, RunDirectoryError):
            raise
        raise RunDirectoryError(f"the metadata in {location} are damaged: {error!r}") from error
    if _sum_of_all(metadata) != wanted:
        raise RunDirectoryError(
            f"the metadata in {location} are damaged: their SHA-256 is not the one recorded"
        )
    return fields


def _sum_of_all(metadata: Mapping[str, object]) -> str:
    return compute_checksum(json.dumps(metadata, sort_keys=True).encode())


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
        text = DefaultParamsWriter._get_metadata_to_save(
            stage, spark, {_ESTIMATOR_KEY: _ESTIMATOR_FORMAT}, values
        )
        _write_stage(
            spark, path, lambda place: _write_metadata(place, text), overwrite=self.shouldOverwrite
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
            RunDirectoryError: there is none, another stage, or one of a newer format, or it is
                damaged.
        """
        location = _location_of(self.sparkSession, path)
        metadata = _read_stage_metadata(location, self._cls)
        version = metadata.get(_ESTIMATOR_KEY)
        if version != _ESTIMATOR_FORMAT:
            raise RunDirectoryError(
                f"{path} holds an estimator of format {version!r}; this version of "
                f"horovod_spark_runner reads format {_ESTIMATOR_FORMAT}"
            )
        stage = self._cls()
        try:
            _restore(stage, metadata)
            for values in (stage._paramMap, stage._defaultParamMap):  # Spark converts the latter
                values.update({param: from_storage(value) for param, value in values.items()})
        except Exception as error:  # Spark's code takes the metadata for its own
            raise RunDirectoryError(f"{location} is of another version: {error!r}") from error
        return stage


def savable(name: str, value: object) -> object:
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
    if isinstance(value, Mapping) and name == "launch['env']":  # values may be secrets
        return dict.fromkeys(map(str, value), "")
    if isinstance(value, Mapping):
        return {str(key): savable(f"{name}[{key!r}]", one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [savable(f"{name}[{number}]", one) for number, one in enumerate(value)]
    try:
        return plain_json(name, value)
    except InvalidInputError as error:
        if name.startswith("callbacks["):
            raise InvalidInputError(
                f"the estimator cannot be saved with the object {name}={brief(value)}: give "
                "callbacks as a function that returns a list of them"
            ) from error
        raise InvalidInputError(f"the estimator cannot be saved: {error}") from error
