"""What a trained PyTorch model is made from again. Loads no framework."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from ...errors import RunDirectoryError
from ..spec import TORCH, ModelSource
from ..trained_model import WEIGHTS_FILE, StoredModel, with_model_fn

# Inputs and what the trained module gave for them, by which one that is built anew is known again.
SAMPLE_FILE = "sample.npz"
FILES = (WEIGHTS_FILE, SAMPLE_FILE)


@dataclass(frozen=True)
class SavedModule:
    """What rank 0 says of the model that it has written, besides what lies in its files."""


@dataclass(frozen=True)
class TorchFacts:
    """What a signature says of a PyTorch model besides what it says of any.

    Attributes:
        torch: version of PyTorch.
        module: class of the module, ``"package.module:Class"``.
        names: parameters of ``forward`` that the inputs are for; ``None`` if given by position.
        autocast: type that it was computed in, ``""`` for that of its weights.
    """

    torch: str = ""
    module: str = ""
    names: tuple[str, ...] | None = None
    autocast: str = ""

    def to_fields(self) -> dict[str, Any]:
        return asdict(self)


def facts_of(model: StoredModel) -> TorchFacts:
    """Return what a stored model's signature says of it; defaults for what it does not."""
    known = TorchFacts.__annotations__
    own = {name: value for name, value in model.signature.own.items() if name in known}
    names = own.get("names")
    return TorchFacts(**{**own, "names": None if names is None else tuple(names)})


@dataclass(frozen=True)
class TorchParts:
    """What a PyTorch model is made from.

    Attributes:
        source: builds the module.
        weights: contents of the weights file.
        paths: names of the weights in ``state_dict()``, in the file's order.
        names: parameters of ``forward`` that the inputs are for; ``None`` to give them by position.
        autocast: type that it is computed in, ``""`` for that of its weights.
        sample: what the trained module gave, by which what ``source`` builds is checked.
    """

    source: ModelSource
    weights: bytes = field(repr=False)
    paths: tuple[str, ...]
    names: tuple[str, ...] | None
    autocast: str = ""
    sample: bytes | None = field(default=None, repr=False)


def torch_parts(
    model: StoredModel, source: ModelSource | None, saved: SavedModule | None
) -> TorchParts:
    """Return what a stored model is made from; see `Engine.parts`.

    Raises:
        RunDirectoryError: a file is damaged, or the function that builds the module is needed.
    """
    if source is None:
        raise RunDirectoryError(
            f"{model.directory.location} holds the weights of a PyTorch module, whose code is not "
            f"kept in storage; give the function that builds it: {with_model_fn(TORCH)}"
        )
    facts = facts_of(model)
    sampled = SAMPLE_FILE in model.sums and not model.signature.reweighted
    return TorchParts(
        source=source,
        weights=model.read(WEIGHTS_FILE),
        paths=model.signature.weights,
        names=facts.names,
        autocast=facts.autocast,
        sample=model.read(SAMPLE_FILE) if sampled else None,
    )


def held_files(parts: TorchParts) -> Mapping[str, bytes]:
    """Return the files that suffice to make the model again: none without its function."""
    return {}
