"""From what lies in the Parquet files to the columns the ranks read."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from ...errors import DataError
from ..manifest import Column
from ..read.decode import decode_array, decode_value, fit_value
from ..read.images import image_dtype, image_mode
from .checks import Layout
from .columns import Source
from .schema import check_shape_names, check_shapes


def columns_of(
    sources: Sequence[Source],
    layouts: Mapping[str, Layout],
    shapes: Mapping[str, tuple[int, ...]],
    first_value: Callable[[str], bytes],
) -> tuple[Column, ...]:
    """Return the columns of a dataset.

    Args:
        sources: the columns as they were written.
        layouts: how their values lie.
        shapes: shapes asked for, by column.
        first_value: gives the first row's bytes of a column.

    Raises:
        DataError: a shape names no column or does not fit, or the first value cannot be decoded.
    """
    check_shape_names(shapes, [source.name for source in sources])
    return tuple(
        _column(source, layouts[source.name], shapes.get(source.name), first_value)
        for source in sources
    )


def _column(
    source: Source,
    layout: Layout,
    shape: tuple[int, ...] | None,
    first_value: Callable[[str], bytes],
) -> Column:
    name = source.name
    if layout.encoding == "image":
        return _image_column(source, shape, first_value(name))
    if layout.encoding in ("npy", "npz"):
        array = decode_array(name, layout.encoding, first_value(name))
        fitted = _fit(name, shape, array.shape)
        if fitted != array.shape:
            raise DataError(
                f"shapes gives column {name!r} the shape {fitted}, but its arrays have the shape "
                f"{array.shape}"
            )
        column = Column(name, source.dtype or _number(name, array.dtype), fitted, layout.encoding)
        fit_value(column, array, "the first row holds")
        return column
    if layout.encoding == "raw":
        dtype = source.dtype or "uint8"
        (size,) = layout.sizes
        if not size or size % np.dtype(dtype).itemsize:
            raise DataError(
                f"column {name!r} holds {size} bytes per row, which are no whole number of "
                f"{dtype}; give its type with dtypes={{{name!r}: …}}, and its shape in shapes"
            )
        sizes = (size // np.dtype(dtype).itemsize,)
        return Column(name, dtype, _fit(name, shape, sizes), "raw")
    return Column(name, source.dtype, _fit(name, shape, layout.sizes))


def _fit(name: str, shape: tuple[int, ...] | None, sizes: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape of a column whose rows have ``sizes``."""
    if 0 in sizes:
        raise DataError(f"column {name!r} holds empty arrays only")
    if shape is None:
        return sizes
    return check_shapes({name: shape}, {name: math.prod(sizes) if sizes else 0})[name]


def missing_image_shape(name: str) -> DataError:
    """Return the error for a column of encoded images without a shape."""
    return DataError(
        f"column {name!r} holds encoded images; give the size to read them in: "
        f"data=DataOptions(shapes={{{name!r}: (height, width, channels)}}) for run_training, "
        f"shapes={{{name!r}: (height, width, channels)}} elsewhere"
    )


def _image_column(source: Source, shape: tuple[int, ...] | None, data: bytes) -> Column:
    if shape is None:
        raise missing_image_shape(source.name)
    image_mode(source.name, shape)
    dtype = source.dtype or image_dtype(source.name, data)
    column = Column(source.name, dtype, shape, "image")
    decode_value(column, data, None, None)  # Pillow is there, and the first image is one that fits
    return column


def _number(name: str, dtype: np.dtype) -> str:
    """Return the dtype to train an array in: real numbers in float32."""
    if dtype.kind == "b":
        return "int8"
    if dtype.kind == "f":
        return "float32"
    if dtype.kind in "iu":
        return str(dtype.name)
    raise DataError(f"column {name!r} holds arrays of {dtype}, which cannot be trained on")
