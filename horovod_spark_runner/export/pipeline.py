"""`export_pipeline`: a fitted pipeline of Spark ML as one ONNX file."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ..config.keywords import check_keywords
from ..config.validators import check_choice
from ..errors import DataError, InvalidInputError, ModelError, on_one_line
from ..model.predict_files import MODES
from ..storage.filesystem import Location
from ..storage.folders import check_free_file, convert_save_errors
from ..training.engine import ONNX, SUFFIXES
from ..training.onnx import check_installed
from .columns import Input, kind_of, vector_size
from .onnx_network import Network
from .readers import READERS, WITHOUT, Fitted
from .stages import Stage, StringIndexer

if TYPE_CHECKING:
    from pyspark.ml import PipelineModel
    from pyspark.sql import DataFrame


@check_keywords("export_pipeline")
def export_pipeline(
    pipeline_model: PipelineModel,
    path: str | os.PathLike[str],
    frame: DataFrame,
    *,
    format: str = ONNX,
    columns: Sequence[str] | None = None,
    mode: str = "error",
) -> None:
    """Write a fitted pipeline, preparation and network, as one ONNX file.

    onnxruntime runs the file without Spark, in any language. Writing needs the extra ``onnx`` and
    imports the networks' frameworks. Before the file is written, it is compared with the pipeline
    in Spark on the first 50 rows of ``frame``.

    A stage that ONNX cannot hold, or whose results could differ from Spark's, is refused by name.

    Args:
        pipeline_model: the fitted pipeline, or one fitted stage. Pipelines may be nested, and the
            best models of ``CrossValidator`` and ``TrainValidationSplit`` are taken.
        path: the file, whose name ends in ``.onnx``; or its URL.
        frame: a DataFrame as the pipeline takes it, such as the one it was fitted on: the types of
            its columns are those of the file's inputs.
        format: ``"onnx"``, the only one.
        columns: the columns that the file gives; by default those that the last stage adds.
        mode: ``"error"`` (default) refuses a path that holds something, ``"overwrite"`` replaces
            the file that is there.

    Raises:
        ModelError: a stage cannot be exported; the message names it and says why.
        EnvironmentProblem: a package that writes ONNX files is not installed.
        RunDirectoryError: there is something at the path.
        InvalidInputError: an argument is invalid.
        DataError: the pipeline does not take the DataFrame.
        StorageError: storage fails.
    """
    check_choice("mode", mode, MODES)
    check_choice("format", format, (ONNX,))
    if not hasattr(frame, "schema") or not hasattr(pipeline_model, "transform"):
        raise InvalidInputError(
            "export_pipeline takes a fitted pipeline and a DataFrame that it takes, got "
            f"{pipeline_model!r:.200} and {frame!r:.200}"
        )
    location = Location(path)
    if not location.name.endswith(SUFFIXES[ONNX]):
        raise InvalidInputError(
            f"a pipeline is exported as one ONNX file, whose name ends in .onnx; got {location}"
        )
    check_free_file(location, mode)
    check_installed("onnx")
    from .onnx_model import build_onnx
    from .verification import compare_with_spark

    stages = list(_read(_flat(pipeline_model), frame))
    inputs = list(_inputs(stages, frame))
    contents = build_onnx(inputs, stages, columns)
    compare_with_spark(contents, pipeline_model, frame, inputs, stages)
    with convert_save_errors("the exported pipeline", location):
        location.parent.make_folder()
        location.write_bytes(contents)


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


def _read(stages: Iterable[object], frame: DataFrame) -> Iterator[Stage]:
    """Read the stages; networks, which take longest, after all others are checked."""
    from ..model.transformer import TrainedTransformer

    stages = list(stages)
    _check_supported([one for one in stages if not isinstance(one, TrainedTransformer)])
    for stage in stages:
        fitted = Fitted(stage, frame, _transformed(stage, frame))
        if isinstance(stage, TrainedTransformer):
            from .network import read_network

            yield read_network(fitted)
        else:
            made = READERS[type(stage).__name__](fitted)
            for name in made.inputs:
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
        named = f"stage {kind.__name__} ({stage.uid}) cannot be exported"
        if kind.__module__ == "pyspark.ml.feature":
            if kind.__name__ in READERS:
                continue
            if kind.__name__ in WITHOUT:
                raise ModelError(
                    f"{named}: {WITHOUT[kind.__name__]}. Prepare text by layers inside the "
                    "network, such as keras.layers.TextVectorization and Hashing, and export "
                    "that alone as a SavedModel: TFTransformer.export(path)"
                )
        raise ModelError(
            f"{named}; exported are {', '.join(sorted(READERS))}, TFTransformer and "
            "TorchTransformer"
        )


def _inputs(stages: Iterable[Stage], frame: DataFrame) -> Iterator[Input]:
    """Yield the columns that the stages take from the DataFrame."""
    made: set[str] = set()
    needed: dict[str, bool] = {}
    widths: dict[str, int] = {}
    for stage in stages:
        if isinstance(stage, Network):
            widths.update(zip(stage.inputs, map(math.prod, stage.shapes), strict=True))
        for name in stage.inputs:
            if name not in made:
                needed[name] = needed.get(name, False) or not isinstance(stage, StringIndexer)
        made.update(stage.outputs)
    for field in frame.schema.fields:
        if field.name in needed:
            kind = kind_of(field)
            assert kind is not None  # each stage's reader has checked it
            one = Input(field.name, kind, 0, needed[field.name])
            if one.holds_vectors:
                size = widths.get(field.name) or vector_size(frame, field)
                one = replace(one, size=size)
            yield one
