"""A `TFTransformer` or `TorchTransformer` as a stage of an exported pipeline."""

from __future__ import annotations

import tempfile
from pathlib import Path

from ..data.manifest import Column
from ..data.prepare.columns import sources_of_features
from ..errors import InvalidInputError
from ..frameworks import KERAS, model_of
from ..model.features import check_fits, feature_names
from ..model.inference import SPARK_DTYPES, is_scalar, spark_type
from ..model.outputs import added_by
from ..model.params import prediction_settings
from ..model.transformer import TrainedTransformer
from ..storage.filesystem import Location
from ..training.engine import ONNX, engine_named
from .onnx_network import Network, NetworkColumn
from .readers import Fitted


def read_network(fitted: Fitted) -> Network:
    """Return a transformer with its network as an ONNX file; its framework is imported.

    Raises:
        ModelError: ONNX cannot hold the network, or what it takes.
        EnvironmentProblem: a package that writes ONNX files is not installed.
    """
    transformer: TrainedTransformer = fitted.stage
    settings = prediction_settings(transformer)
    if settings.output_form == "struct":
        raise fitted.refused("output_form='struct' makes a column of another kind than others")
    recipe = transformer._model.whole()
    names = feature_names(settings, recipe.inputs, recipe.columns)
    sources = sources_of_features(fitted.before, names)
    for name, source, column in zip(names, sources, recipe.columns, strict=True):
        fitted.kind(name)
        try:
            check_fits(source, column)
        except InvalidInputError as error:
            raise fitted.refused(str(error)) from error
        _check_plain(fitted, name, column, source.depth, keras=recipe.engine == KERAS)
    if recipe.batch_size is not None:
        raise fitted.refused(f"its network takes exactly {recipe.batch_size} rows at a time")
    added = added_by(recipe.outputs, settings)
    for one in added:
        spark_type(one.spec)  # refuses what Spark has no type for
    # Names of its own: the columns' may be none that TensorFlow takes.
    arguments = tuple(f"column{number}" for number in range(len(names)))
    engine = engine_named(recipe.engine)
    if ONNX not in engine.export_formats:
        raise fitted.refused(f"a {model_of(recipe.engine)} has no ONNX form")
    engine.check_export(ONNX, arguments, tuple(recipe.transforms))
    results = tuple(f"output{number}" for number in range(len(recipe.outputs)))
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder, "model.onnx")
        engine.export(recipe, ONNX, arguments, results, Location(place))
        contents = place.read_bytes()
    return Network(
        inputs=names,
        outputs=tuple(one.name for one in added),
        arguments=arguments,
        dtypes=tuple(column.dtype for column in recipe.columns),
        shapes=tuple(column.shape for column in recipe.columns),
        results=results,
        added=tuple(
            NetworkColumn(
                one.output,
                one.holds,
                one.scores,
                is_scalar(one.spec),
                SPARK_DTYPES[one.spec.dtype][1] or one.spec.dtype,
                one.spec.dtype,
            )
            for one in added
        ),
        handle_invalid=settings.handle_invalid,
        contents=contents,
    )


def _check_plain(fitted: Fitted, name: str, column: Column, depth: int, *, keras: bool) -> None:
    if column.encoding:
        raise fitted.refused(
            f"feature column {name!r} holds bytes to be decoded ({column.encoding})"
            + ("; TFTransformer.export writes a SavedModel that takes arrays" if keras else "")
        )
    if column.is_text and column.shape:
        raise fitted.refused(f"feature column {name!r} holds lists of strings")
    if depth > 1:
        raise fitted.refused(f"feature column {name!r} holds nested arrays; make them one array")
