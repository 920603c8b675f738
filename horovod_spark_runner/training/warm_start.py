"""Weights to begin with, as the driver finds them: of another run, or in an engine's formats.

The files are sent along as they are; the engine's `initial_weights` puts the values into the model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ..checkpoint.files import VARIABLES_FILE, CheckpointInfo, newest_readable, read_variables
from ..checkpoint.run_directory import RunDirectory
from ..config.training import InitialWeights
from ..errors import ModelError
from ..frameworks import model_of
from ..storage.contents import Contents, open_archive
from ..storage.filesystem import Location
from .spec import WarmStart
from .trained_model import WEIGHTS_FILE, read_model

# Format of a run's own weights: arrays, by their numbers.
ARRAYS = "arrays"


@dataclass(frozen=True)
class WeightsFormat:
    """A format of weights that the trainings of an engine can begin with.

    Attributes:
        kind: its name, in `WarmStart.kind`.
        called: what such a thing is called in messages.
        suffixes: how the names of its files end.
        marker: for a format that is a folder, a file that is in each.
    """

    kind: str
    called: str
    suffixes: tuple[str, ...] = ()
    marker: str = ""

    def fits(self, location: Location) -> bool:
        """Return whether ``location`` is such a file or folder."""
        if self.marker:
            return location.join(self.marker).exists()
        return location.name.endswith(self.suffixes)


def read_warm_start(
    weights: InitialWeights, engine: str, formats: Sequence[WeightsFormat]
) -> WarmStart:
    """Read the files of ``weights``.

    Args:
        weights: where they are.
        engine: dotted name of the engine that trains.
        formats: what it can begin with, besides runs.

    Raises:
        ModelError: there are no such weights, or they are another engine's.
    """
    place, skip_mismatch = weights.place, weights.skip_mismatch
    location = Location(place)
    try:
        start = _of_format(location, formats) or _of_run(location, engine, formats)
    except OSError as error:
        raise ModelError(f"initial_weights={str(place)!r} cannot be read: {error}") from error
    except ValueError as error:
        raise ModelError(f"initial_weights={str(place)!r} cannot be used: {error}") from error
    if skip_mismatch and start.kind == ARRAYS and not start.paths:
        raise ModelError(
            f"initial_weights={str(place)!r} was written by a version that did not record the "
            "paths of weights, which skip_mismatch=True needs; give one of its checkpoints, or "
            f"{', or '.join(one.called for one in formats)}"
        )
    return replace(start, skip_mismatch=skip_mismatch)


def _of_format(location: Location, formats: Sequence[WeightsFormat]) -> WarmStart | None:
    for one in formats:
        if one.fits(location):
            if one.marker:
                return WarmStart(str(location), one.kind, _read_folder(location, ""))
            return WarmStart(str(location), one.kind, {location.name: _contents(location)})
    return None


def _of_run(location: Location, engine: str, formats: Sequence[WeightsFormat]) -> WarmStart:
    text = str(location)
    if location.join(VARIABLES_FILE).exists():
        return _of_checkpoint(location, *read_variables(location), engine=engine)
    directory = RunDirectory(location)
    if directory.signature.exists():
        model = read_model(directory)
        signature = model.signature
        _check_engine(text, signature.engine, engine)
        return WarmStart(
            text, ARRAYS, {WEIGHTS_FILE: model.contents(WEIGHTS_FILE)}, signature.weights
        )
    newest = newest_readable(directory, read_variables)
    if newest is None:
        others = "".join(f" or {one.called}" for one in formats)
        raise ModelError(
            f"initial_weights={text!r} must be a run directory with a model or checkpoint{others}, "
            f"to train a {model_of(engine)}"
        )
    return _of_checkpoint(*newest, engine=engine)


def _of_checkpoint(
    folder: Location, info: CheckpointInfo, data: Contents, *, engine: str
) -> WarmStart:
    _check_engine(str(folder), info.engine, engine)
    paths = tuple(path for name, path, *_ in info.variables if name.startswith("model/"))
    return WarmStart(str(folder), ARRAYS, {VARIABLES_FILE: data}, paths)


def _check_engine(origin: str, source_engine: str, engine: str) -> None:
    if source_engine != engine:
        raise ModelError(
            f"initial_weights={origin!r} holds the weights of a {model_of(source_engine)}, but a "
            f"{model_of(engine)} is to be trained, whose weights are arranged otherwise; give "
            "those of such a model"
        )


def _read_folder(folder: Location, below: str) -> dict[str, Contents]:
    files: dict[str, Contents] = {}
    for entry in folder.list():
        name = f"{below}{entry.name}"
        if entry.is_folder:
            files.update(_read_folder(entry, f"{name}/"))
        else:
            files[name] = _contents(entry)
    return files


def _contents(file: Location) -> Contents:
    contents = file.spool(lambda part: None)
    if file.name.endswith(".keras"):
        with open_archive(contents.open(), f"a Keras archive: {file}"):
            pass  # it is measured
    return contents
