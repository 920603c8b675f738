"""Files of torch.export, ``.pt2``: archives with a graph as JSON and tensors as they are in memory.

They are read here, not by ``torch.export.load``, which unpickles objects, and evaluates expressions
and imports names that a file gives it. None of that is needed to compute a graph.
"""

from __future__ import annotations

import contextlib
import io
import zipfile
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from ...errors import ModelError, on_one_line
from ...typed_json import load_json
from .graph import DTYPES

# Version of the format; PyTorch raises it where readers of an earlier one would fail.
_SCHEMA = 8
_GRAPH = "models/model.json"
_AGAIN = "torch.export.save(torch.export.export(module, …), path)"


class ProgramFile:
    """A file of torch.export.

    Args:
        data: its contents.
        where: its place, for messages.

    Raises:
        ModelError: it is none.
    """

    def __init__(self, data: bytes, where: str) -> None:
        self._where = where
        with self.reading():
            self._archive = zipfile.ZipFile(io.BytesIO(data))
            entries = self._archive.infolist()
            self._entries = {entry.filename.partition("/")[2]: entry for entry in entries}
            if "archive_format" not in self._entries:
                raise ModelError(f"{where} is no .pt2 archive; write it by {_AGAIN}")
            # Readers differ in which of two entries they take; PyTorch compresses none.
            size = sum(entry.file_size for entry in entries)
            if len(self._entries) < len(entries) or size > len(data):
                raise ModelError(f"{where} is damaged: its entries overlap, or are there twice")

    @contextlib.contextmanager
    def reading(self) -> Iterator[None]:
        """Raise errors of the file's contents as one that names the file.

        Raises:
            ModelError: instead of any error.
        """
        try:
            yield
        except ModelError as error:
            if self._where in str(error):
                raise
            raise ModelError(f"{self._where}: {error}") from error
        except Exception as error:  # of Python's, of the archive, or of PyTorch
            raise ModelError(
                f"{self._where} is no program of torch.export that can be read here: "
                f"{type(error).__name__}: {on_one_line(error, 300)}; write it anew: {_AGAIN}"
            ) from error

    def program(self) -> dict[str, Any]:
        """Return the fields of the program.

        Raises:
            ModelError: there is none, or it is of another version of the format.
        """
        fields: dict[str, Any] = self._json(_GRAPH)
        version = fields["schema_version"]["major"]
        if version != _SCHEMA:
            raise ModelError(
                f"{self._where} is of version {version} of torch.export's format, and {_SCHEMA} is "
                f"read here; write it anew by another PyTorch: {_AGAIN}"
            )
        return fields

    def tensors(self, kind: str, device: torch.device) -> dict[str, Tensor]:
        """Return tensors by name; those that share memory in the file share it.

        Args:
            kind: ``"weights"`` (of the module's ``state_dict``), or ``"constants"``.
            device: where they are to be.

        Raises:
            ModelError: there are objects among them, or they are damaged.
        """
        stored: dict[tuple[str, torch.dtype], Tensor] = {}
        loaded: dict[str, Tensor] = {}
        with self.reading():
            for name, entry in self._json(f"data/{kind}/model_{kind}_config.json")[
                "config"
            ].items():
                path, meta = f"data/{kind}/{entry['path_name']}", entry["tensor_meta"]
                if entry["use_pickle"] or meta is None:
                    raise ModelError(
                        f"{self._where} holds a pickled object ({path}), which is not loaded"
                    )
                key = path, DTYPES[meta["dtype"]]
                if key not in stored:
                    stored[key] = self._tensor(*key).to(device)
                tensor = torch.as_strided(
                    stored[key],
                    [size["as_int"] for size in meta["sizes"]],
                    [stride["as_int"] for stride in meta["strides"]],
                    meta["storage_offset"]["as_int"],
                )
                if entry["is_param"]:
                    tensor = nn.Parameter(tensor, meta["requires_grad"])
                loaded[name] = tensor
        return loaded

    def _tensor(self, path: str, dtype: torch.dtype) -> Tensor:
        data = bytearray(self._read(path))
        # In memory of PyTorch's own, which is aligned.
        return torch.frombuffer(data, dtype=dtype).clone() if data else torch.empty(0, dtype=dtype)

    def _json(self, name: str) -> Any:
        return load_json(self._read(name))

    def _read(self, name: str) -> bytes:
        if name not in self._entries:
            raise ModelError(f"{self._where} holds no {name}; write it anew: {_AGAIN}")
        return self._archive.read(self._entries[name])
