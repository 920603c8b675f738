"""ONNX files, run by onnxruntime on the CPU."""

from __future__ import annotations

import importlib
import os
from collections.abc import Mapping
from typing import Any

import numpy as np

from ..errors import DataError, EnvironmentProblem, ModelError
from ..typed_json import load_json

# Where this package tells what it knows of a file, among the file's own metadata.
METADATA = "horovod_spark_runner"
# There, the least and largest integer of each input that takes fewer than its column's type has.
BOUNDS = "bounds"
_ERRORS_ONLY = 3
# What it says of an index that is not in a table, by the kind of lookup.
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
        EnvironmentProblem: one is not.
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
    def facts(self) -> dict[str, Any]:
        """What this package has written of the file; nothing for another one's."""
        known = self._session.get_modelmeta().custom_metadata_map
        facts: dict[str, Any] = load_json(known.get(METADATA, "{}"))
        return facts

    def __call__(self, given: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Return the outputs by name.

        Raises:
            DataError: an index that the model looks up is not in its table.
            ModelError: onnxruntime cannot compute them.
        """
        try:
            found = self._session.run(self.outputs, dict(given))
        except Exception as error:  # as above
            if any(said in str(error) for said in _NO_INDEX):
                raise DataError(
                    "a row holds an index, as of an embedding, that is below 0 or beyond the "
                    f"model's table: {error!s:.500}"
                ) from error
            raise ModelError(f"onnxruntime cannot run it: {error!s:.500}") from error
        return dict(zip(self.outputs, found, strict=True))
