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
    sized = tf.debugging.assert_equal(
        tf.strings.length(stored),
        column.size,
        f"column {column.name} must hold {column.size} bytes",
    )
    with tf.control_dependencies([sized]):
        return tf.reshape(tf.io.decode_raw(stored, column.dtype), [-1, *column.shape])


def _image(column: Column, data: Any) -> Any:
    """Return one image. Each check comes before what would fail in its place with less to say."""
    is_png = tf.strings.substr(data, 0, 4) == b"\x89PNG"
    is_jpeg = tf.strings.substr(data, 0, 3) == b"\xff\xd8\xff"
    with _checked(column, is_png | is_jpeg, "other than PNG and JPEG"):
        rgba = tf.cond(is_png, lambda: _png(column, data), lambda: _jpeg(column, data))
    height, width = column.shape[:2]
    size = tf.shape(rgba)
    told = f"not of size {height} x {width}, which transform resizes with Pillow"
    with _checked(column, (size[0] == height) & (size[1] == width), told):
        channels = column.shape[2] if len(column.shape) == 3 else 1
        values = rgba[..., :channels] if channels > 1 else _grey(rgba)
        return tf.reshape(tf.cast(values, column.dtype), column.shape)


def _checked(column: Column, right: Any, told: str) -> Any:
    """Return the context in which it is known that an image is as it should be."""
    text = (
        f"column {column.name} holds an image that is {told}; the signature decoded takes the "
        f"column as arrays of shape {column.shape}"
    )
    return tf.control_dependencies([tf.debugging.Assert(right, [text])])


def _png(column: Column, data: Any) -> Any:
    # 16 bits are values that 8 do not hold; of fewer than 8, TensorFlow makes another alpha.
    depth = tf.strings.substr(data, _PNG_DEPTH_AT, 1)
    fits = depth == b"\x08" if column.shape[2:] == (4,) else depth != b"\x10"
    with _checked(column, fits, "not of 8 bits per channel"):
        return tf.io.decode_png(data, channels=4)


def _jpeg(column: Column, data: Any) -> Any:
    components = tf.io.extract_jpeg_shape(data)[2]
    with _checked(column, components < 4, "of four colours (CMYK)"):
        # As Pillow's does: libjpeg's slow transform, and chroma interpolated.
        rgb = tf.io.decode_jpeg(data, 3, fancy_upscaling=True, dct_method="INTEGER_ACCURATE")
    return tf.pad(rgb, [[0, 0], [0, 0], [0, 1]], constant_values=255)


def _grey(rgba: Any) -> Any:
    weighed = tf.cast(rgba[..., :3], tf.int32) * tf.constant(_GREY)
    total = tf.reduce_sum(weighed, -1, keepdims=True) + 2**15
    return tf.cast(tf.bitwise.right_shift(total, 16), tf.uint8)
