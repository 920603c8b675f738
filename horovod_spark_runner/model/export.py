"""A transformer's model written for programs that know neither Spark nor this package."""

from __future__ import annotations

from dataclasses import dataclass

from ..config.prediction import PredictionSettings, added_columns
from ..config.validators import check_choice
from ..errors import InvalidInputError
from ..storage.filesystem import Location
from ..storage.folders import check_free, check_free_file, convert_save_errors
from ..training.engine import GRAPH_FILE, SUFFIXES, engine_named
from ..training.onnx import PLAIN, VECTOR, ClassColumn
from .features import feature_names
from .load import ModelHandle
from .outputs import added_by
from .predict_files import MODES


@dataclass(frozen=True)
class ExportRequest:
    """Model, format and destination of an export.

    Attributes:
        target: the folder or file to write.
        format: what to write.
        mode: what becomes of an export that is there.
        settings: how the transformer predicts: names of columns.

    Raises:
        InvalidInputError: that cannot be done.
    """

    target: Location
    format: str
    mode: str
    settings: PredictionSettings

    def __post_init__(self) -> None:
        check_choice("mode", self.mode, MODES)
        suffix = SUFFIXES.get(self.format, "")
        if not self.target.name.endswith(suffix):
            raise InvalidInputError(
                f"a {self.format!r} is one file, whose name ends in {suffix}; got {self.target}"
            )
        if self.settings.output_form == "struct":
            raise InvalidInputError(
                "output_form='struct' puts all outputs into one column, which an export does not "
                "have; take the outputs as they are, from a copy of the transformer with that "
                "cleared"
            )


def export_model(model: ModelHandle, request: ExportRequest) -> None:
    """Write the model; the framework is imported.

    Raises:
        InvalidInputError: the settings do not fit the model, or there is no such format.
        ModelError: the format cannot hold the model.
        RunDirectoryError: there is something at the place.
        StorageError: storage fails.
    """
    recipe = model.whole()
    settings = request.settings
    engine = engine_named(recipe.engine)
    columns = feature_names(settings, recipe.inputs, recipe.columns)
    engine.check_export(request.format, columns, tuple(recipe.transforms))
    outputs = added_columns([one.name for one in recipe.outputs], settings.prediction_col)
    classes = [
        ClassColumn(one.name, one.output, one.holds, one.scores)
        for one in added_by(recipe.outputs, settings)
        if one.holds not in (PLAIN, VECTOR)
    ]
    if request.format in SUFFIXES:
        check_free_file(request.target, request.mode)
    else:
        check_free(request.target, request.mode, GRAPH_FILE, "an export")
    with convert_save_errors("the export", request.target):
        request.target.parent.make_folder()
        engine.export(recipe, request.format, columns, outputs, request.target, classes)
