"""`export_pipeline`: a fitted pipeline of Spark ML as files that are scored without Spark."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from ..config.keywords import check_keywords
from ..config.validators import check_choice
from ..errors import DataError, InvalidInputError, ModelError, on_one_line
from ..scoring.bundle import MAIN_FILE, Bundle, bundle_files
from ..scoring.columns import ARRAY, VECTOR, Input, Stage, inputs_of
from ..scoring.network import ONNX, SAVED_MODEL, Network
from ..scoring.values import StringIndexer
from ..storage.filesystem import Location
from ..storage.folders import check_free, check_free_file, convert_save_errors, write_aside
from ..training.onnx import check_installed
from .readers import READERS, Fitted, kind_of, vector_size

if TYPE_CHECKING:
    from pyspark.ml import PipelineModel
    from pyspark.sql import DataFrame

_MODES = ("error", "overwrite")
BUNDLE, SUFFIX = "bundle", ".onnx"


@check_keywords("export_pipeline")
def export_pipeline(
    pipeline_model: PipelineModel,
    path: str | os.PathLike[str],
    frame: DataFrame,
    *,
    format: str = "bundle",
    network: str = "saved_model",
    columns: Sequence[str] | None = None,
    mode: str = "error",
) -> None:
    """Write a fitted pipeline such that it is scored without Spark.

    A ``"bundle"`` is a folder for `horovod_spark_runner.scoring`. Its files are data: JSON, NumPy's
    arrays, and a SavedModel or an ONNX file for each network, for which TensorFlow is imported by
    this call. Their sums tell damaged ones.

    An ``"onnx"`` is one file, preparation and network, for onnxruntime in any language; it needs
    the extra ``onnx``. Before it is written it is compared with the bundle on the first rows of
    ``frame``.

    A stage whose results could differ from Spark's is refused by name, before anything is written.

    Args:
        pipeline_model: the fitted pipeline, or one fitted stage. Pipelines may be nested, and the
            best models of ``CrossValidator`` and ``TrainValidationSplit`` are taken.
        path: the folder to write, or the file, whose name ends in ``.onnx``; or its URL.
        frame: a DataFrame as the pipeline takes it, such as the one it was fitted on: the types of
            its columns are those that are scored. For a bundle its rows are not read, but for the
            size of vectors that no stage declares; for an ONNX file, 50 are.
        format: ``"bundle"`` (default) or ``"onnx"``.
        network: what networks in a bundle are: ``"saved_model"`` (default), which TensorFlow
            calls, or ``"onnx"``, which onnxruntime does; of PyTorch modules ``"onnx"`` only. In
            an ONNX file they are ONNX.
        columns: the columns that an ONNX file gives; by default those that the last stage adds. A
            scorer of a bundle gives any.
        mode: ``"error"`` (default) refuses a path that holds something, ``"overwrite"`` replaces
            an earlier export; the file of an ONNX export is replaced, whatever it holds.

    Raises:
        ModelError: a stage cannot be exported; the message names it and says why.
        EnvironmentProblem: a package that the format needs is not installed.
        RunDirectoryError: there is something at the path.
        InvalidInputError: an argument cannot be right.
        DataError: the DataFrame is not one that the pipeline takes.
        StorageError: storage fails.
    """
    check_choice("mode", mode, _MODES)
    if not hasattr(frame, "schema") or not hasattr(pipeline_model, "transform"):
        raise InvalidInputError(
            "export_pipeline takes a fitted pipeline and a DataFrame that it takes, got "
            f"{pipeline_model!r:.200} and {frame!r:.200}"
        )
    check_choice("format", format, (BUNDLE, ONNX))
    check_choice("network", network, (SAVED_MODEL, ONNX))
    location = Location(path)
    if format == BUNDLE:
        if columns is not None:
            raise InvalidInputError(
                "columns are chosen of an ONNX file (format='onnx'); a scorer gives any column of "
                "a bundle"
            )
        check_free(location, mode, MAIN_FILE, "an exported pipeline")
        bundle = _bundle(pipeline_model, frame, network)
        with convert_save_errors("the exported pipeline", location):
            _write(bundle, location)
        return
    if not location.name.endswith(SUFFIX):
        raise InvalidInputError(
            f"an ONNX file is one file, whose name ends in {SUFFIX}; got {location}"
        )
    check_free_file(location, mode)
    check_installed("onnx")
    from .onnx_model import pipeline_file

    bundle = _bundle(pipeline_model, frame, ONNX)
    held = pipeline_file(bundle, frame, columns)
    with convert_save_errors("the exported pipeline", location):
        location.parent.make_folder()
        location.write_bytes(held)


def _bundle(pipeline_model: object, frame: DataFrame, network: str) -> Bundle:
    stages = list(_read(_flat(pipeline_model), frame, network))
    return Bundle(tuple(_inputs(stages, frame)), tuple(stages))


def _flat(stage: object) -> Iterator[Any]:
    """Yield the stages of a pipeline, of those within it, and the best ones of searches."""
    from pyspark.ml import PipelineModel
    from pyspark.ml.tuning import CrossValidatorModel, TrainValidationSplitModel

    if isinstance(stage, PipelineModel):
        for inner in stage.stages:
            yield from _flat(inner)
    elif isinstance(stage, CrossValidatorModel | TrainValidationSplitModel):
        yield from _flat(stage.bestModel)
    else:
        yield stage


def _read(stages: Iterable[object], frame: DataFrame, format: str) -> Iterator[Stage]:
    """Yield the scorer's stages; networks, which take longest, after all others are checked."""
    from ..model.transformer import TrainedTransformer

    stages = list(stages)
    _check_supported([one for one in stages if not isinstance(one, TrainedTransformer)])
    for stage in stages:
        fitted = Fitted(stage, frame, _transformed(stage, frame))
        if isinstance(stage, TrainedTransformer):
            from .network import network

            yield network(fitted, format)
        else:
            made = READERS[type(stage).__name__](fitted)
            for name in inputs_of(made):
                fitted.kind(name)
            yield made
        frame = fitted.after


def _transformed(stage: Any, frame: DataFrame) -> DataFrame:
    from pyspark.errors import PySparkException

    try:
        after: DataFrame = stage.transform(frame)
    except PySparkException as error:
        raise DataError(
            f"stage {type(stage).__name__} ({stage.uid}) does not take the DataFrame, whose "
            f"columns are {frame.columns} there: {on_one_line(error, 300)}"
        ) from error
    return after


def _check_supported(stages: Iterable[Any]) -> None:
    for stage in stages:
        kind = type(stage)
        if kind.__module__ != "pyspark.ml.feature" or kind.__name__ not in READERS:
            raise ModelError(
                f"stage {kind.__name__} ({stage.uid}) cannot be exported: the scorer has none "
                f"such. It has {', '.join(sorted(READERS))}, TFTransformer and TorchTransformer"
            )


def _inputs(stages: Iterable[Stage], frame: DataFrame) -> Iterator[Input]:
    """Yield the columns that the stages take from the DataFrame."""
    made: set[str] = set()
    needed: dict[str, bool] = {}
    widths: dict[str, int] = {}
    for stage in stages:
        if isinstance(stage, Network):
            widths.update(zip(stage.inputs, map(math.prod, stage.shapes), strict=True))
        for name in inputs_of(stage):
            if name not in made:
                needed[name] = needed.get(name, False) or not isinstance(stage, StringIndexer)
        made.update(stage.adds)
    for field in frame.schema.fields:
        if field.name in needed:
            kind = kind_of(field)
            assert kind is not None  # each stage's reader has looked
            size = 0
            if kind in (VECTOR, ARRAY):
                size = widths.get(field.name) or vector_size(frame, field)
            yield Input(field.name, kind, size, needed[field.name])


def _write(bundle: Bundle, target: Location) -> None:
    """Write the files; where storage can rename, a reader sees the old ones or the new ones."""
    files = bundle_files(bundle)
    if not target.has_atomic_rename:
        main = target.join(MAIN_FILE)
        if main.exists():
            main.delete_file()
        for name, data in files.items():
            target.join(name).write_in_place(data)
        for file in target.files():
            if file.name not in files:
                target.join(file.name).delete_file()
        return

    def write(folder: Location) -> None:
        folder.make_folder()
        for name, data in files.items():
            folder.join(name).write_in_place(data)

    write_aside(target, write)
