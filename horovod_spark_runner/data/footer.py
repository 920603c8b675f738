"""The footer of a Parquet file: what it tells, and a checksum by which another file is known.

Sums, sizes and places of all columns are in it, and, mostly, their least and greatest values: a
file with other rows has another footer, also if it is equally large.
"""

from __future__ import annotations

import pyarrow as pa
import pyarrow.parquet as pq

from ..storage.sums import sum_of

_MAGIC = b"PAR1"
# Bytes read at once; only a footer of many row groups or columns is larger.
_TAIL = 64 * 1024
# Of the footer's length and the mark behind it.
_END = 8


def read_footer(stream: pa.NativeFile) -> tuple[pq.FileMetaData, str]:
    """Return a file's footer, and its checksum.

    Args:
        stream: the file, opened to be read anywhere.

    Raises:
        pa.ArrowInvalid: it is no Parquet file.
    """
    size = stream.size()
    tail = stream.read_at(min(size, _TAIL), max(0, size - _TAIL))
    whole = int.from_bytes(tail[-_END:-4], "little") + _END
    if tail[-4:] != _MAGIC or whole > size:
        raise pa.ArrowInvalid(f"it does not end with a footer of Parquet ({size} bytes)")
    if whole > len(tail):
        tail = stream.read_at(whole, size - whole)
    footer = tail[-whole:]
    return pq.read_metadata(pa.BufferReader(_MAGIC + footer)), sum_of(footer)[:16]
