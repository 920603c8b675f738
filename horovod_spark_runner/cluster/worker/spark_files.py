"""Spark's files (``sc.addFile``, ``--files``, ``--archives``) in a rank, which is no Spark task."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType

_MODULE = "pyspark.core.files"


def set_spark_files(folder: str) -> None:
    """Have ``pyspark.SparkFiles`` find files in ``folder``, where Spark has put them.

    PySpark is not imported for that, which takes half a second.
    """
    if _MODULE in sys.modules:
        _set_folder(sys.modules[_MODULE], folder)
    else:
        sys.meta_path.insert(0, _Importer(folder))


def _set_folder(module: ModuleType, folder: str) -> None:
    module.SparkFiles._root_directory = folder
    module.SparkFiles._is_running_on_worker = True


class _Importer(MetaPathFinder, Loader):
    """Sets the folder when the module is imported."""

    def __init__(self, folder: str) -> None:
        self._folder = folder

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        spec = PathFinder.find_spec(name, path) if name == _MODULE else None
        if spec is None or spec.loader is None:
            return None
        self._loader, spec.loader = spec.loader, self
        return spec

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        _set_folder(module, self._folder)
