"""A SavedModel: a graph that another program has exported, called through one of its signatures."""

from __future__ import annotations

import shutil
import tempfile
import zipfile
from collections.abc import Mapping
from typing import IO

import tensorflow as tf

from ...errors import ModelError
from ...storage.checksums import read_verified_file
from ...storage.contents import PART_BYTES, Contents, spool, unpack
from ...storage.filesystem import Location
from ...training.engine import GRAPH_FILE


def pack(folder: Location, sums: Mapping[str, str] | None = None) -> Contents:
    """Return a SavedModel's files as one archive.

    Args:
        folder: where it lies.
        sums: SHA-256 of all its files, where they are known.

    Raises:
        ModelError: there is no SavedModel, or a file is missing or damaged.
    """
    files = folder.files() if folder.is_folder else []
    if not any(file.name == GRAPH_FILE for file in files):
        raise ModelError(f"{folder} holds no SavedModel: {GRAPH_FILE} is missing")
    names = [file.name for file in files] if sums is None else list(sums)

    def write(whole: IO[bytes]) -> None:
        with zipfile.ZipFile(whole, "w") as archive:
            for name in names:
                _add(archive, folder, name, sums)

    return spool(write)


def _add(
    archive: zipfile.ZipFile, folder: Location, name: str, sums: Mapping[str, str] | None
) -> None:
    try:
        if sums is None:
            contents = folder.join(name).spool(lambda part: None)
        else:
            contents = read_verified_file(folder, name, sums)
    except ValueError as error:
        raise ModelError(f"the SavedModel in {folder}: {error}") from error
    with archive.open(name, "w", force_zip64=True) as entry, contents.open() as file:
        shutil.copyfileobj(file, entry, PART_BYTES)


class Graph:
    """One signature of a SavedModel, called as a Keras model is.

    Args:
        packed: what `pack` returned.
        signature: the signature's name.

    Attributes:
        loaded: what TensorFlow loads of it.
        takes: what the signature takes, by name.

    Raises:
        ModelError: there is no such signature, or it takes nothing, or a fixed number of rows.
    """

    def __init__(self, packed: Contents, signature: str) -> None:
        with tempfile.TemporaryDirectory() as folder:
            unpack(packed.open(), folder, "a SavedModel's files")
            self.loaded = tf.saved_model.load(folder)
        signatures = sorted(self.loaded.signatures)
        if signature not in signatures:
            has = ", ".join(signatures) or "none"
            raise ModelError(f"the SavedModel has no signature {signature!r}; it has {has}")
        self._call = self.loaded.signatures[signature]
        self.takes: Mapping[str, tf.TensorSpec] = self._call.structured_input_signature[1]
        if not self.takes:
            raise ModelError(f"signature {signature!r} of the SavedModel takes no inputs")
        fixed = [n for n, spec in self.takes.items() if not spec.shape.rank or spec.shape[0]]
        if fixed:
            raise ModelError(
                f"signature {signature!r} of the SavedModel takes {fixed[0]!r} of shape "
                f"{self.takes[fixed[0]].shape}; it must take any number of rows"
            )

    def predict_step(self, data: tuple[Mapping[str, tf.Tensor]]) -> dict[str, tf.Tensor]:
        """Return the outputs by name."""
        (inputs,) = data
        shaped = {
            name: tf.reshape(tf.cast(inputs[name], spec.dtype), [-1, *spec.shape[1:]])
            for name, spec in self.takes.items()
        }
        return dict(sorted(self._call(**shaped).items()))
