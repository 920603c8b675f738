"""Read the requirements of a ``.keras`` archive without loading Keras.

An archive is a zip file whose ``config.json`` describes every layer: classes and functions of
Keras by their module, the user's own by their names, lambdas as marshalled code. That code is
never run: `name_lambdas_in` puts names in its place, to be looked up as other functions are.
"""

from __future__ import annotations

import json
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...storage.contents import Contents, read_entry
from ...typed_json import load_json

CONFIG_FILE = "config.json"
# What an archive is, for messages.
KIND = "a Keras archive"
LAMBDA = "__lambda__"


@dataclass(frozen=True)
class CustomPart:
    """A class or function in an archive that is not Keras' own.

    Attributes:
        name: its name in Python; ``"__lambda__"`` for a function without one.
        key: the name it is looked up by; for a lambda, where it stands.
        layer: name of the layer that it is, or belongs to.
        field: argument of the layer that it is; ``""`` for the layer itself.
    """

    name: str
    key: str
    layer: str
    field: str = ""

    def describe(self) -> str:
        """Return "'my_function' in layer 'dense'" for messages."""
        what = "a lambda" if self.name == LAMBDA else repr(self.name)
        return f"{what} in layer {self.layer!r}" if self.layer else what


def read_config(archive: Contents) -> dict[str, Any]:
    """Return the archive's description of the model, without how it was compiled.

    Raises:
        ValueError: it is no ``.keras`` archive.
    """
    return {**_config_of(archive), "compile_config": None}


def _config_of(archive: Contents) -> dict[str, Any]:
    config = load_json(read_entry(archive.open(), CONFIG_FILE, KIND))
    if not isinstance(config, dict):
        raise ValueError(f"not {KIND}: {CONFIG_FILE} holds no description")
    return config


def read_compile_config(archive: Contents) -> dict[str, Any]:
    """Return with which losses and metrics the archive's model was compiled; empty if with none.

    Raises:
        ValueError: it is no ``.keras`` archive.
    """
    config = _config_of(archive).get("compile_config") or {}
    names = ("loss", "loss_weights", "metrics", "weighted_metrics")
    return {name: config[name] for name in names if name in config}


def custom_parts(config: Mapping[str, Any]) -> list[CustomPart]:
    """Return the classes and functions that are not Keras' own, each name once."""
    parts = {part.key: part for _, part in _walk(config, (), "")}
    return list(parts.values())


def read_unpacked_config(folder: Path) -> dict[str, Any]:
    """Return `read_config` of an archive that is unpacked in ``folder``."""
    config: dict[str, Any] = load_json((folder / CONFIG_FILE).read_text())
    return {**config, "compile_config": None}


def pack(folder: Path, file: Any) -> None:
    """Write the archive of the files in ``folder``, as Keras does.

    Args:
        folder: what Keras has written unpacked.
        file: takes bytes by its ``write``.
    """
    with zipfile.ZipFile(file, "w") as archive:
        for path in sorted(folder.rglob("*")):
            if path.is_file():
                archive.write(path, path.relative_to(folder))


def name_lambdas_in(folder: Path) -> None:
    """Replace each lambda in an unpacked archive by a function named by the key of its part."""
    place = folder / CONFIG_FILE
    config = read_unpacked_config(folder)
    lambdas = [path for path, part in _walk(config, (), "") if part.name == LAMBDA]
    for path in lambdas:
        owner: Any = config
        for step in path[:-1]:
            owner = owner[step]
        owner[path[-1]] = {
            "module": "builtins",
            "class_name": "function",
            "config": _key(path),
            "registered_name": "function",
        }
    if lambdas:
        place.write_text(json.dumps(config))


Steps = tuple[str | int, ...]


def _walk(value: object, path: Steps, layer: str) -> Iterator[tuple[Steps, CustomPart]]:
    if isinstance(value, Mapping):
        kind, inner = value.get("class_name"), value.get("config")
        if isinstance(kind, str) and "config" in value:
            if not path or _is_layer(inner):
                layer = _name(inner) or kind
            part = _custom(value, kind, path, layer)
            if part is not None:
                yield path, part
        for key, below in value.items():
            yield from _walk(below, (*path, key), layer)
    elif isinstance(value, (list, tuple)):
        for number, below in enumerate(value):
            yield from _walk(below, (*path, number), layer)


def _is_layer(config: object) -> bool:
    return isinstance(config, Mapping) and {"name", "trainable"} <= set(config)


def _name(config: object) -> str:
    return str(config.get("name") or "") if isinstance(config, Mapping) else ""


def _custom(value: Mapping[str, Any], kind: str, path: Steps, layer: str) -> CustomPart | None:
    module, registered = value.get("module"), value.get("registered_name")
    field = str(path[-1]) if path and isinstance(path[-1], str) else ""
    if kind == LAMBDA:
        return CustomPart(LAMBDA, _key(path), layer, field)
    if kind == "function":
        name = str(value["config"])
        return CustomPart(name, name, layer, field)
    if not registered or (isinstance(module, str) and module.partition(".")[0] == "keras"):
        return None
    return CustomPart(kind, str(registered), layer or _name(value["config"]), field)


def _key(path: Steps) -> str:
    return "lambda at " + "/".join(map(str, path))
