"""The files of a trained model in a run directory, with the sums by which damaged ones are known.

``signature.json`` says what the model takes and gives, and holds the SHA-256 of the other files and
of itself. It is written last: until then, and if a writer is killed, files and sums do not fit.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..errors import RunDirectoryError
from ..storage.sums import read_checked, sealed, sum_of, unsealed
from .directory import RunDirectory

ARCHIVE_FILE = "model.keras"
WEIGHTS_FILE = "weights.npz"
SAMPLE_FILE = "sample.npz"


class ModelWriter:
    """Writes the files of one trained model, in place of an earlier one's.

    Args:
        directory: the run directory.
    """

    def __init__(self, directory: RunDirectory) -> None:
        self._directory = directory
        self._sums: dict[str, str] = {}
        directory.model.make_folder()

    def write(self, name: str, data: bytes | memoryview) -> None:
        self._sums[name] = sum_of(data)
        self._directory.model.join(name).write_bytes(data)

    def finish(self, signature: Mapping[str, Any]) -> None:
        """Write the signature; what an earlier model had besides goes."""
        run_id = self._directory.run_id()
        facts = {"run_id": run_id, "sums": self._sums, "signature": signature}
        text = json.dumps(facts, indent=1)
        self._directory.signature.write_text(sealed(text))
        for name in {ARCHIVE_FILE, WEIGHTS_FILE, SAMPLE_FILE} - self._sums.keys():
            place = self._directory.model.join(name)
            if place.exists():
                place.delete_file()


@dataclass(frozen=True)
class StoredModel:
    """The files of a trained model.

    Attributes:
        directory: its run directory.
        signature: what is known of the model.
        sums: of its files, by name.
    """

    directory: RunDirectory
    signature: Mapping[str, Any]
    sums: Mapping[str, str]

    def read(self, name: str) -> bytes:
        """Return the contents of a file.

        Raises:
            RunDirectoryError: it is missing or damaged.
        """
        try:
            return read_checked(self.directory.model, name, self.sums)
        except ValueError as error:
            raise RunDirectoryError(f"the model in {self.directory.location}: {error}") from error


def read_model(directory: RunDirectory) -> StoredModel:
    """Return the finished model in ``directory``.

    Raises:
        RunDirectoryError: there is none, its signature is damaged, or it is of another run.
    """
    try:
        fields = unsealed(directory.signature.read_text())
        model = StoredModel(directory, fields["signature"], fields["sums"])
        trained_by, here = fields["run_id"], directory.run_id()
    except FileNotFoundError as error:
        raise RunDirectoryError(
            f"{directory.location} holds no finished model ({directory.signature} is missing)"
        ) from error
    except (ValueError, KeyError, TypeError) as error:
        raise RunDirectoryError(f"{directory.signature} cannot be read: {error}") from error
    if None not in (trained_by, here) and trained_by != here:
        raise RunDirectoryError(
            f"the model in {directory.location} is of another run ({trained_by}) than its "
            f"directory ({here}): its files were put there from elsewhere"
        )
    return model
