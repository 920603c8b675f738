"""Recognise file formats by their first bytes. Pure."""

from __future__ import annotations

import re

# Bytes of a value's beginning that tell what it is.
HEAD_BYTES = 16
# Regular expressions on the beginning in hexadecimal, two digits per byte, in which Java and Python
# agree. "npy" and "npz" are NumPy's own formats, in which Petastorm's NdarrayCodec and
# CompressedNdarrayCodec write.
SIGNATURES = {
    "image": "|".join(
        (
            "89504E470D0A1A0A",  # PNG
            "FFD8FF",  # JPEG
            "474946383",  # GIF
            "52494646.{8}57454250",  # WebP: a RIFF file, its size, "WEBP"
            "424D.{8}00000000",  # BMP: its size, then two reserved fields
            "49492A00|4D4D002A|49492B00|4D4D002B",  # TIFF and BigTIFF, in both byte orders
            "0000000C6A5020200D0A870A",  # JPEG 2000
            # AVIF and HEIF: a box's size, "ftyp", the brand
            ".{8}66747970(?:61766966|61766973|68656963|68656978|6D696631)",
        )
    ),
    "npy": "934E554D5059",
    "npz": "504B0304",
}
# What values of an encoding are called in messages.
TITLES = {
    "image": "PNG, JPEG, GIF, WebP, BMP or TIFF images",
    "npy": "npy arrays",
    "npz": "npz arrays",
}


def encoding_of(data: bytes) -> str:
    """Return the encoding that ``data`` begin like; ``"raw"`` if like none."""
    head = data[:HEAD_BYTES].hex().upper()
    return next((e for e, start in SIGNATURES.items() if re.match(start, head)), "raw")
