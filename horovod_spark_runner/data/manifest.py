"""Manifest of a materialized dataset: columns, files and row groups. Pure.

The driver builds the manifest once, from the files' footers, and sends it to all ranks. They list
no files and open only those they read.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace

import numpy as np

from ..storage.checksums import seal, unseal
from ..storage.paths import check_name
from ..typed_json import read_fields

FORMAT = 6
# `Column.dtype` of strings, which NumPy holds as Python objects.
TEXT = "string"
# Approximate bytes of a string in memory.
_TEXT_BYTES = 64
# Bytes of the largest value of a row that Spark allows.
_MAX_BYTES = 2**31


@dataclass(frozen=True)
class Column:
    """A column as the ranks read it.

    Attributes:
        name: column name.
        dtype: NumPy dtype name of its elements; ``"string"`` for strings.
        shape: shape of one row's value; ``()`` for a scalar.
        encoding: how a column of bytes is decoded: ``"image"`` (PNG, JPEG and others that Pillow
            reads), ``"npy"`` or ``"npz"`` (NumPy's formats), ``"raw"`` (the bytes of the
            elements); ``""`` for numbers and strings.
    """

    name: str
    dtype: str
    shape: tuple[int, ...] = ()
    encoding: str = ""

    def __post_init__(self) -> None:
        try:
            fits = min(self.shape, default=0) >= 0 and self.size <= _MAX_BYTES
            fits = fits and (self.is_text or not self.numpy_dtype.hasobject)
        except TypeError:
            fits = False
        if not fits:
            raise ValueError(f"a column of dtype {self.dtype!r:.99} and shape {self.shape!r:.99}")

    @property
    def is_text(self) -> bool:
        """Whether its elements are strings."""
        return self.dtype == TEXT

    @property
    def is_encoded(self) -> bool:
        """Whether its values are decoded one by one."""
        return self.encoding not in ("", "raw")

    @property
    def numpy_dtype(self) -> np.dtype:
        """NumPy's type of its elements in memory; ``object`` for strings."""
        return np.dtype(object if self.is_text else self.dtype)

    @property
    def width(self) -> int:
        """Elements of one row's value."""
        return math.prod(self.shape)

    @property
    def size(self) -> int:
        """Bytes of one row's value in memory; an estimate for strings."""
        return self.width * (_TEXT_BYTES if self.is_text else self.numpy_dtype.itemsize)

    def blank(self) -> np.ndarray:
        """Return one row of zeros or empty strings."""
        return np.full((1, *self.shape), "" if self.is_text else 0, self.numpy_dtype)

    def describe(self) -> str:
        """Return "'image': float32 of shape (8, 8, 1)" for messages."""
        shape = f" of shape {self.shape}" if self.shape else ""
        return f"{self.name!r}: {self.dtype}{shape}"


@dataclass(frozen=True)
class RowGroup:
    """One Parquet row group: where it is and how large.

    Attributes:
        file: index into the manifest's files.
        index: row group's number in that file.
        rows: rows it holds.
        size: bytes it takes in memory.
    """

    file: int
    index: int
    rows: int
    size: int


def with_memory_sizes(
    groups: Sequence[RowGroup], columns: Sequence[Column]
) -> tuple[RowGroup, ...]:
    """Return row groups with their sizes as arrays in place of those in Parquet.

    A few distinct values take far less in a file, also uncompressed.
    """
    row = sum(column.size for column in columns if not column.is_encoded)
    return tuple(replace(group, size=max(group.size, group.rows * row)) for group in groups)


@dataclass(frozen=True)
class Manifest:
    """A materialized dataset.

    Attributes:
        url: folder of the dataset.
        files: its Parquet files, relative to ``url``.
        columns: its columns.
        row_groups: all row groups, in file order.
        checksum: of the rows' contents, whatever their order; equal data have equal checksums.
        row_order: checksum of their order in the files; ``""`` for the user's files, whose
            ``checksum`` covers the order.
        file_sizes: bytes of each file.
        footers: checksum of each file's footer; empty if unknown.
        tables: versions of the tables that the rows were read from, by name or path.
        source: identity of the plan and input files it was made from; ``""`` if it has none.
        verified: whether its stored numbers need no further check for NaN and infinity.
        allow_nan: whether decoded values and results of transforms may be NaN or infinite.
    """

    url: str
    files: tuple[str, ...]
    columns: tuple[Column, ...]
    row_groups: tuple[RowGroup, ...]
    checksum: str
    file_sizes: tuple[int, ...] = ()
    source: str = ""
    verified: bool = True
    allow_nan: bool = False
    row_order: str = ""
    footers: tuple[str, ...] = ()
    tables: Mapping[str, str] = field(default_factory=dict)

    @property
    def rows(self) -> int:
        return sum(group.rows for group in self.row_groups)

    @property
    def size(self) -> int:
        """The bytes that all rows take in memory."""
        return sum(group.size for group in self.row_groups)

    @property
    def fingerprint(self) -> str:
        """Identity of the data: contents and columns, not where or when it was written."""
        columns = [asdict(column) for column in self.columns]
        text = json.dumps([self.checksum, self.rows, columns], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def column(self, name: str) -> Column:
        return next(column for column in self.columns if column.name == name)

    def to_json(self) -> str:
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        fields["columns"] = [asdict(column) for column in self.columns]
        # There may be 100,000 of them, which asdict takes seconds for.
        fields["row_groups"] = [vars(group) for group in self.row_groups]
        return seal(json.dumps({"format": FORMAT, **fields}))

    @classmethod
    def from_json(cls, text: str) -> Manifest:
        """Rebuild a manifest.

        Raises:
            ValueError: the text is not a manifest of this format, or is damaged.
        """
        fields = unseal(text)
        if not isinstance(fields, dict) or fields.get("format") != FORMAT:
            raise ValueError("a dataset manifest of another format")
        manifest = read_fields(fields, cls)
        files = len([check_name(name) for name in manifest.files])
        if {files} != {len(manifest.file_sizes), len(manifest.footers) or files} or not all(
            0 <= group.file < files and group.rows >= 0 <= group.size
            for group in manifest.row_groups
        ):
            raise ValueError("its files, their sizes and their row groups do not fit together")
        return manifest
