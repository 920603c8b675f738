"""Everything needed to rebuild a trained PyTorch model. Loads no framework."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from ...errors import RunDirectoryError
from ...frameworks import TORCH
from ...training.sample_rows import SAMPLE_FILE
from ...training.spec import ModelSource
from ...training.trained_model import WEIGHTS_FILE, StoredModel, with_model_fn

# The module as a program of torch.export, or TorchScript, which needs no code of the user's.
PROGRAM_FILE = "module.pt2"
SCRIPT_FILE = "script.pt"
# What a model that was trained elsewhere is, if it is no module.
PROGRAM, SCRIPT = "program", "script"
FILES = (WEIGHTS_FILE, SAMPLE_FILE, PROGRAM_FILE, SCRIPT_FILE)


@dataclass(frozen=True)
class SavedModule:
    """Rank 0's description of a written model, besides its files.

    Attributes:
        module: the pickled module, of one that was trained elsewhere. It travels in memory only:
            nothing that is read from storage is unpickled.
    """

    module: bytes | None = field(default=None, repr=False)


@dataclass(frozen=True)
class ModuleWithExample:
    """A module that was trained elsewhere.

    Attributes:
        module: the module, or the path or URL of its TorchScript.
        example: rows it can be called with: an array or tensor, or a tuple or dictionary of them.
    """

    module: Any
    example: Any = field(repr=False)


@dataclass(frozen=True)
class TorchFacts:
    """PyTorch-specific fields of a signature.

    Attributes:
        torch: version of PyTorch.
        module: class of the module, ``"package.module:Class"``.
        names: parameters of ``forward`` that the inputs are for; ``None`` if given by position.
        program: whether there is a program of torch.export, which gives the same.
        script: whether there is TorchScript, which then is all there is.
    """

    torch: str = ""
    module: str = ""
    names: tuple[str, ...] | None = None
    program: bool = False
    script: bool = False

    def to_fields(self) -> dict[str, Any]:
        return asdict(self)


def facts_of(model: StoredModel) -> TorchFacts:
    """Return a stored model's PyTorch-specific fields, with defaults for missing ones."""
    return model.facts(TorchFacts)


@dataclass(frozen=True)
class TorchParts:
    """Parts that a PyTorch model is rebuilt from: one of ``source``, ``module``, ``program``,
    ``script``.

    Attributes:
        source: builds the module.
        weights: contents of the weights file; ``None`` if the rest holds the weights.
        paths: names of the weights in ``state_dict()``, in the file's order.
        names: parameters of ``forward`` that the inputs are for; ``None`` to give them by position.
        module: the pickled module, see `SavedModule`; ``program`` is then for storage only.
        program: contents of a file of torch.export.
        script: contents of a file of TorchScript.
    """

    source: ModelSource | None = None
    weights: bytes | None = field(default=None, repr=False)
    paths: tuple[str, ...] = ()
    names: tuple[str, ...] | None = None
    module: bytes | None = field(default=None, repr=False)
    program: bytes | None = field(default=None, repr=False)
    script: bytes | None = field(default=None, repr=False)


def torch_parts(
    model: StoredModel, source: ModelSource | None, saved: SavedModule | None
) -> TorchParts:
    """Return the parts of a stored model; see `Engine.parts`.

    Raises:
        RunDirectoryError: a file is damaged, or the function that builds the module is needed.
    """
    facts, reweighted = facts_of(model), model.signature.reweighted
    called = TorchParts(
        paths=model.signature.weights,
        names=facts.names,
    )
    program = model.read(PROGRAM_FILE) if facts.program else None
    if source is not None and source.function is not None:
        if WEIGHTS_FILE not in model.sums:
            raise RunDirectoryError(
                f"{model.directory.location} holds a PyTorch program and no weights for what "
                "model_fn builds; leave model_fn out"
            )
        return replace(called, source=source, weights=model.read(WEIGHTS_FILE))
    if saved is not None and saved.module is not None:
        weights = None if facts.program else model.read(WEIGHTS_FILE)
        return replace(called, module=saved.module, program=program, weights=weights)
    if facts.script:
        return replace(called, script=model.read(SCRIPT_FILE))
    if program is not None:
        weights = model.read(WEIGHTS_FILE) if reweighted else None
        return replace(called, program=program, weights=weights)
    why = f", because {model.signature.problem}" if model.signature.problem else ""
    raise RunDirectoryError(
        f"{model.directory.location} holds the weights of a PyTorch module and no program of it"
        f"{why}; code is not kept in storage. Give the function that builds it: "
        + with_model_fn(TORCH)
    )


def held_files(parts: TorchParts) -> Mapping[str, bytes]:
    """Return the files that suffice to make the model again: none of one that a function builds."""
    files = {SCRIPT_FILE: parts.script, PROGRAM_FILE: parts.program, WEIGHTS_FILE: parts.weights}
    if parts.source is not None:
        return {}
    return {name: data for name, data in files.items() if data is not None}
