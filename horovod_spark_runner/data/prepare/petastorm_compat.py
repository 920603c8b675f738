"""Petastorm's converter on current pyarrow and numpy.

Petastorm's last release still uses names that both have dropped. They are supplied while it is
imported and while it converts, and removed again: other libraries test for some of them. Only the
converter (DataFrame to Parquet) is used, unchanged. Nothing else in this package imports Petastorm.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
import threading
import types
import warnings
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from ...cluster.spark.session import with_settings

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

# Conversion changes session settings: one materialization at a time.
_lock = threading.Lock()


def convert(
    spark: SparkSession, frame: DataFrame, parent_url: str, row_group_bytes: int, codec: str
) -> str:
    """Write ``frame`` to Parquet with Petastorm and return the folder it made.

    Args:
        spark: the frame's session.
        frame: columns of numbers and of arrays of numbers, in their final types.
        parent_url: folder, as a URL, under which the converter makes one of its own.
        row_group_bytes: size of the row groups.
        codec: Parquet compression; ``zstd`` is not among Petastorm's.
    """
    settings = {"parquet.enable.dictionary": "false"}
    with _lock, _missing_names(), with_settings(spark, settings):
        module = _load_converter()
        # It would reuse the data of an equal plan, also if its input files have changed since.
        module._cache_df_meta_list.clear()
        # The conversion inside make_spark_converter, without its second job, which counts the rows:
        # they are counted already.
        url = module._cache_df_or_retrieve_cache_data_url(
            frame,
            parent_url,
            row_group_bytes,
            codec,
            None,  # types are final; Petastorm would warn of every conversion
        )
    return str(url)


def check_import() -> None:
    """Import Petastorm's converter, or raise the reason why it cannot be imported."""
    with _lock, _missing_names():
        _load_converter()


def _load_converter() -> Any:
    """Import and return ``petastorm.spark.spark_dataset_converter``."""
    name = "petastorm.spark.spark_dataset_converter"
    if name not in sys.modules:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            module: Any = importlib.import_module(name)
        # It would delete its data at exit; here, they are kept until they are cleared.
        module.register_delete_dir_handler(_delete_nothing)
        # It would parse "#", "?" and newlines in a path as parts of a URL, and write elsewhere.
        module._make_sub_dir_url = _join
    return sys.modules[name]


def _delete_nothing(url: str) -> None:
    """Replace the converter's deletion."""


def _join(parent: str, name: str) -> str:
    return f"{parent}/{name}"


@contextlib.contextmanager
def _missing_names() -> Iterator[None]:
    import fsspec.implementations.local
    import numpy
    import pyarrow

    local = fsspec.implementations.local.LocalFileSystem
    added: list[tuple[Any, str]] = []
    modules: list[str] = []

    names = [
        (pyarrow, "LocalFileSystem", local),
        (pyarrow, "localfs", local()),
        (pyarrow.lib, "ArrowIOError", OSError),
        (numpy, "unicode_", numpy.str_),
        (numpy, "string_", numpy.bytes_),
    ]
    for name in ("pyarrow.filesystem", "pyarrow.hdfs"):
        if name not in sys.modules:
            module = types.ModuleType(name)
            module.__dict__.update(LocalFileSystem=local, FileSystem=local, HadoopFileSystem=local)
            sys.modules[name] = module
            modules.append(name)
            names.append((pyarrow, name.rpartition(".")[2], module))
    for owner, name, value in names:
        if not hasattr(owner, name):
            setattr(owner, name, value)
            added.append((owner, name))
    try:
        yield
    finally:
        for owner, name in added:
            delattr(owner, name)
        for name in modules:
            del sys.modules[name]
