"""Bytes of columns to what the model takes, inside a graph, as `RowDecoder` does outside of it.

What a graph cannot do as Pillow does is an error in the row, never another value.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from ...data.manifest import Column

# Where PNG's first chunk says how many bits a channel has.
_PNG_DEPTH_AT = 24
# What Pillow makes grey of colours with, in 1/65536.
_GREY = (19595, 38470, 7471)


def decoded(column: Column, stored: Any) -> Any:
    """Return the values of a column of bytes: a tensor of ``(rows, *column.shape)``.

    Args:
        column: the column.
        stored: its bytes, a tensor of one string per row.
    """
    if column.encoding == "image":
        kind = tf.TensorSpec(column.shape, column.dtype)
        return tf.map_fn(lambda data: _image(column, data), stored, fn_output_signature=kind)
    told = f"column {column.name} must hold {column.size} bytes"
    tf.debugging.assert_equal(tf.strings.length(stored), column.size, told)
    return tf.reshape(tf.io.decode_raw(stored, column.dtype), [-1, *column.shape])


def _image(column: Column, data: Any) -> Any:
    """Return one image."""
    advice = f"the signature decoded takes column {column.name} as arrays of shape {column.shape}"
    is_png = tf.strings.substr(data, 0, 4) == b"\x89PNG"
    is_jpeg = tf.strings.substr(data, 0, 3) == b"\xff\xd8\xff"
    tf.debugging.Assert(
        is_png | is_jpeg,
        [f"column {column.name} holds an image other than PNG and JPEG;", advice],
    )
    rgba = tf.cond(is_png, lambda: _png(column, data, advice), lambda: _jpeg(column, data, advice))
    height, width = column.shape[:2]
    size = tf.shape(rgba)
    tf.debugging.Assert(
        (size[0] == height) & (size[1] == width),
        [f"column {column.name} holds an image that is not {height} x {width}, but", size[:2],
         "which transform resizes with Pillow;", advice],
    )  # fmt: skip
    channels = column.shape[2] if len(column.shape) == 3 else 1
    values = rgba[..., :channels] if channels > 1 else _grey(rgba)
    return tf.reshape(tf.cast(values, column.dtype), column.shape)


def _png(column: Column, data: Any, advice: str) -> Any:
    # 16 bits are values that 8 do not hold; of fewer than 8, TensorFlow makes another alpha.
    depth = tf.strings.substr(data, _PNG_DEPTH_AT, 1)
    fits = depth == b"\x08" if column.shape[2:] == (4,) else depth != b"\x10"
    told = f"column {column.name} holds an image that is not of 8 bits per channel;"
    tf.debugging.Assert(fits, [told, advice])
    return tf.io.decode_png(data, channels=4)


def _jpeg(column: Column, data: Any, advice: str) -> Any:
    components = tf.io.extract_jpeg_shape(data)[2]
    told = f"column {column.name} holds an image of four colours (CMYK);"
    tf.debugging.Assert(components < 4, [told, advice])
    # As Pillow's does: libjpeg's slow transform, and chroma interpolated.
    rgb = tf.io.decode_jpeg(data, 3, fancy_upscaling=True, dct_method="INTEGER_ACCURATE")
    return tf.pad(rgb, [[0, 0], [0, 0], [0, 1]], constant_values=255)


def _grey(rgba: Any) -> Any:
    weighed = tf.cast(rgba[..., :3], tf.int32) * tf.constant(_GREY)
    total = tf.reduce_sum(weighed, -1, keepdims=True) + 2**15
    return tf.cast(tf.bitwise.right_shift(total, 16), tf.uint8)
