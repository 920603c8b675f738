"""MurmurHash3 (x86, 32 bits) as Spark ML hashes features. Pure."""

from __future__ import annotations

import struct

SEED = 42
_MASK = 0xFFFFFFFF


def hash_of(text: str) -> int:
    """Return the hash of a text's UTF-8, as a signed 32-bit number."""
    data = text.encode("utf-8", "surrogatepass")
    mixed, whole = SEED, len(data) & ~3
    for (word,) in struct.iter_unpack("<I", data[:whole]):
        mixed ^= _scrambled(word)
        mixed = ((mixed << 13) | (mixed >> 19)) & _MASK
        mixed = (mixed * 5 + 0xE6546B64) & _MASK
    if len(data) > whole:
        mixed ^= _scrambled(int.from_bytes(data[whole:], "little"))
    mixed ^= len(data)
    mixed ^= mixed >> 16
    mixed = (mixed * 0x85EBCA6B) & _MASK
    mixed ^= mixed >> 13
    mixed = (mixed * 0xC2B2AE35) & _MASK
    mixed ^= mixed >> 16
    return mixed - (1 << 32) if mixed >> 31 else mixed


def _scrambled(word: int) -> int:
    word = (word * 0xCC9E2D51) & _MASK
    word = ((word << 15) | (word >> 17)) & _MASK
    return (word * 0x1B873593) & _MASK


def place_of(text: str, size: int) -> int:
    """Return the place of a text among ``size``."""
    return hash_of(text) % size  # not negative in Python
