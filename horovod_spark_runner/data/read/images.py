"""Decode images to arrays, with Pillow."""

from __future__ import annotations

import functools
import io
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from ...errors import DataError, EnvironmentProblem
from ..manifest import Column

if TYPE_CHECKING:
    from PIL.Image import Image

_T = TypeVar("_T")
_MODES = {1: "L", 3: "RGB", 4: "RGBA"}
# Pillow has plug-ins for many more formats, some of which run other programs.
_FORMATS = ("PNG", "JPEG", "GIF", "WEBP", "BMP", "TIFF", "JPEG2000", "AVIF")
# Positions of the bits per channel: PNG's first chunk, a tag of TIFF, the first component in
# JPEG 2000's SIZ marker, a flag in AVIF's configuration.
_PNG_DEPTH_AT = 24
_TIFF_BITS_PER_SAMPLE = 258
_JPEG2000_SIZE, _JPEG2000_DEPTH_AT = b"\xff\x4f\xff\x51", 42
_AVIF_CONFIGURATION, _AVIF_FLAGS_AT, _AVIF_HIGH_DEPTH = b"av1C", 6, 0x40
# Bytes by which Pillow detects a format.
_PREFIX = 16
# Types of images of more than 8 bits, by Pillow's mode with room for them.
_DEEP_DTYPES = {"I": "uint16", "F": "float32"}


def image_mode(name: str, shape: Sequence[int]) -> str:
    """Return Pillow's mode for images of ``shape``.

    Raises:
        DataError: it is not a shape of images.
    """
    channels = shape[2] if len(shape) == 3 else 1
    if len(shape) not in (2, 3) or channels not in _MODES:
        raise DataError(
            f"shapes gives image column {name!r} the shape {tuple(shape)}; it must be (height, "
            "width) or (height, width, channels) with 1, 3 or 4 channels"
        )
    return _MODES[channels]


def image_dtype(name: str, data: bytes) -> str:
    """Return the NumPy dtype that holds all values of an encoded image like this one.

    Raises:
        DataError: the bytes are not an image.
        EnvironmentProblem: Pillow is not installed.
    """
    return _read(name, data, lambda image: _DEEP_DTYPES.get(_deep_mode(image), "uint8"))


def decode_image(column: Column, data: bytes) -> np.ndarray:
    """Return an encoded image in the shape of ``column``, resized to it if it is of another size.

    Values are never scaled: they have 8 bits, or more if the image has more.

    Raises:
        DataError: the bytes are not an image, or it has more bits than the column's type, or than
            Pillow reads.
        EnvironmentProblem: Pillow is not installed.
    """
    return _read(column.name, data, functools.partial(_to_array, column, data))


def _read(name: str, data: bytes, use: Callable[[Image], _T]) -> _T:
    """Return the result of ``use``, called with the opened image."""
    pillow = _pillow()
    try:
        with pillow.open(io.BytesIO(data), formats=_formats()) as image:
            return use(image)
    except DataError:
        raise
    except (pillow.DecompressionBombError, NotImplementedError) as error:
        reason = str(error)
    except pillow.UnidentifiedImageError:
        reason = f"it begins with {bytes(data[:8])!r}, unknown to Pillow here"
        if guess := _guess_format(data):
            reason = f"its {len(data)} bytes begin as {guess} does, but are damaged or cut short"
    except Exception as error:  # corrupt images raise many types
        reason = f"its {len(data)} bytes are damaged or cut short: {error or type(error).__name__}"
    raise DataError(f"column {name!r}: an image cannot be decoded: {reason}")


def _guess_format(data: bytes) -> str:
    """Return the format, of those that Pillow reads here, whose prefix ``data`` have; or ``""``."""
    for name in _formats():
        _, accept = _pillow().OPEN[name]
        if accept is not None and accept(data[:_PREFIX]) is True:
            return name
    return ""


def _to_array(column: Column, data: bytes, image: Image) -> np.ndarray:
    mode, deep = image_mode(column.name, column.shape), _deep_mode(image)
    _check_depth(column, data, image, deep)
    image = image.convert(deep or mode)
    height, width = column.shape[:2]
    if image.size != (width, height):
        bilinear = _pillow().Resampling.BILINEAR
        image = image.resize((width, height), bilinear, reducing_gap=3.0)
    array = np.asarray(image)
    if deep == "I" and array.min() >= 0 and array.max() < 2**16:
        array = array.astype(np.uint16)
    if deep and mode == "RGB":
        array = np.repeat(array[..., None], 3, axis=-1)
    return array.reshape(column.shape)


def _deep_mode(image: Image) -> str:
    """Return the mode with room for all values of an image of more than 8 bits, or ``""``."""
    # "I;16" and its variants have 16 bits, "I" 32; Pillow resizes only the latter well.
    return "I" if image.mode.startswith("I") else "F" if image.mode == "F" else ""


def _check_depth(column: Column, data: bytes, image: Image, deep: str) -> None:
    """Check that no bits of the image would be lost."""
    if deep and np.dtype(column.dtype).itemsize == 1:
        dtype = _DEEP_DTYPES[deep]
        raise DataError(
            f"column {column.name!r}: an image holds values of more than 8 bits (Pillow's mode "
            f"{image.mode!r}), which {column.dtype} cannot hold; read all in a larger type, "
            f"dtypes={{{column.name!r}: {dtype!r}}}"
        )
    if deep and image_mode(column.name, column.shape) == "RGBA":
        raise DataError(
            f"column {column.name!r}: an image of more than 8 bits has one channel (Pillow's mode "
            f"{image.mode!r}), not 4; give the shape (height, width, 1)"
        )
    bits = 8 if deep else _bits(image, data)
    if bits > 8:
        raise DataError(
            f"column {column.name!r}: an image ({image.format}) has colours of more than 8 bits "
            "per channel, of which Pillow keeps only 8; store such images as NumPy arrays (npy), "
            "or convert them to 8 bits first"
        )


def _bits(image: Image, data: bytes) -> int:
    """Return the bits of a channel of the file, if they are known to be more than 8; else 8."""
    if image.format == "PNG":
        return int(data[_PNG_DEPTH_AT])
    if image.format == "TIFF":
        return int(max(image.tag_v2.get(_TIFF_BITS_PER_SAMPLE, (8,))))
    if image.format == "JPEG2000":
        return (data[data.index(_JPEG2000_SIZE) + _JPEG2000_DEPTH_AT] & 0x7F) + 1
    if image.format == "AVIF" and (start := data.find(_AVIF_CONFIGURATION)) >= 0:
        return 10 if data[start + _AVIF_FLAGS_AT] & _AVIF_HIGH_DEPTH else 8
    return 8


def _pillow() -> Any:
    try:
        from PIL import Image
    except ImportError as error:
        raise EnvironmentProblem(
            "columns of encoded images need Pillow: pip install 'horovod_spark_runner[images]'"
        ) from error
    return Image


@functools.cache
def _formats() -> tuple[str, ...]:
    """Return the formats that this Pillow reads."""
    pillow = _pillow()
    pillow.init()
    return tuple(name for name in _FORMATS if name in pillow.OPEN)
