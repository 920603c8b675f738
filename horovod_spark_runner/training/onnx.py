"""Metadata of a model in its ONNX file, for any framework."""

from __future__ import annotations

import importlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import numpy as np

from .._version import __version__
from ..errors import DataError, EnvironmentProblem, ModelError
from ..typed_json import JsonObject, load_json

if TYPE_CHECKING:
    from ..data.manifest import Column
    from .spec import OutputSpec

# Key of this package's facts in a file's metadata.
METADATA = "horovod_spark_runner"
# There, the least and largest integer of each input that takes fewer than its column's type has.
BOUNDS = "bounds"
_ERRORS_ONLY = 3
# onnxruntime's message about an index outside a table, by operator.
_NO_INDEX = ("out of data bounds", "must be within bounds", "invalid index found")
# onnxruntime's builds from PyPI report to their makers from their import on, unless this is set.
_NO_REPORTS = "ORT_DISABLE_TELEMETRY"


def import_onnxruntime() -> Any:
    """Return onnxruntime, imported such that it reports to nobody.

    Raises:
        EnvironmentProblem: it is not installed.
    """
    before = os.environ.get(_NO_REPORTS)
    os.environ[_NO_REPORTS] = "1" if before is None else before
    try:
        import onnxruntime
    except ImportError as error:
        raise EnvironmentProblem(
            "ONNX files are run by onnxruntime, which is not installed: pip install onnxruntime"
        ) from error
    finally:
        if before is None:
            del os.environ[_NO_REPORTS]
    return onnxruntime


def check_installed(*packages: str) -> None:
    """Check that packages are installed which write ONNX files, and onnxruntime, which runs them.

    Raises:
        EnvironmentProblem: a package is not installed.
    """
    try:
        import_onnxruntime()
        for package in packages:
            importlib.import_module(package)
    except (EnvironmentProblem, ImportError) as error:
        raise EnvironmentProblem(
            f"writing this ONNX file needs {', '.join(packages)} and onnxruntime: pip install "
            f"'horovod_spark_runner[onnx]' ({error})"
        ) from error


class OnnxSession:
    """An ONNX file that is loaded.

    Args:
        contents: the file.

    Attributes:
        inputs: the names of its inputs that must be given.
        outputs: the names of its outputs.

    Raises:
        EnvironmentProblem: onnxruntime is not installed.
        ModelError: onnxruntime cannot run it.
    """

    def __init__(self, contents: bytes) -> None:
        onnxruntime = import_onnxruntime()
        options = onnxruntime.SessionOptions()
        options.log_severity_level = _ERRORS_ONLY
        try:
            self._session = onnxruntime.InferenceSession(
                contents, options, providers=["CPUExecutionProvider"]
            )
        except Exception as error:  # onnxruntime's own kinds have no public base
            raise ModelError(f"onnxruntime cannot load it: {error!s:.500}") from error
        self.inputs = [one.name for one in self._session.get_inputs()]
        self.outputs = [one.name for one in self._session.get_outputs()]

    @property
    def facts(self) -> JsonObject:
        """Metadata that this package has written into the file; empty for other files."""
        metadata = self._session.get_modelmeta().custom_metadata_map
        facts: JsonObject = load_json(metadata.get(METADATA, "{}"))
        return facts

    def __call__(self, inputs: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Return the outputs by name.

        Raises:
            DataError: an index that the model looks up is not in its table.
            ModelError: onnxruntime cannot compute them.
        """
        try:
            values = self._session.run(self.outputs, dict(inputs))
        except Exception as error:  # as above
            if any(phrase in str(error) for phrase in _NO_INDEX):
                raise DataError(
                    "a row holds an index, as of an embedding, that is below 0 or beyond the "
                    f"model's table: {error!s:.500}"
                ) from error
            raise ModelError(f"onnxruntime cannot run it: {error!s:.500}") from error
        return dict(zip(self.outputs, values, strict=True))


_FORMAT = 1
# Name of the first dimension of all inputs and outputs.
ROWS = "rows"
# Protocol buffers hold less than 2 GiB; the graph itself needs little beside the weights.
MOST_BYTES = 2**31 - 2**24


def write_facts(
    model: object,
    columns: Sequence[Column],
    outputs: Sequence[OutputSpec],
    added: Sequence[str],
    bounds: Mapping[str, tuple[int, int]],
) -> None:
    """Write the types of columns and outputs into an ONNX model.

    Args:
        model: the ``onnx.ModelProto``.
        columns: the inputs, by their names in the file.
        outputs: what the model gives.
        added: the names of the outputs in the file.
        bounds: the least and largest integer of inputs that take fewer than their columns hold.
    """
    import onnx

    facts = {
        "format": _FORMAT,
        "version": __version__,
        "columns": [asdict(column) for column in columns],
        "outputs": [
            {
                "name": name,
                "shape": spec.shape,
                "dtype": spec.dtype,
                "activation": spec.activation,
            }
            for name, spec in zip(added, outputs, strict=True)
        ],
        BOUNDS: dict(bounds),
    }
    onnx.helper.set_model_props(model, {METADATA: json.dumps(facts)})


# Contents of an added column.
PLAIN, VECTOR, CLASS, PROBABILITY, SCORES = "plain", "vector", "class", "probability", "scores"
# How far probabilities may be from a sum of 1, by the type that they are computed in.
TOLERANCE = {"float16": 2e-2, "bfloat16": 2e-2, "float32": 1e-3, "float64": 1e-3}
