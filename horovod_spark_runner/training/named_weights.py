"""Weights by name: how those of a model and others differ, and taking the others over."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from ..checkpoint.attachments import contents_of
from ..checkpoint.files import VARIABLES_FILE
from ..cluster.worker.reporting import notify
from ..errors import ModelError
from ..storage.arrays import ArraysFile
from .spec import WarmStart

_SHOWN = 5


@dataclass(frozen=True)
class NamedWeight:
    """A weight.

    Attributes:
        name: such as ``dense/kernel``.
        shape: of its value.
        read: returns its value.
        dtype: its type, where that counts.
        assign: sets its value, of a model's weight.
    """

    name: str
    shape: tuple[int, ...]
    read: Callable[[], np.ndarray] = field(repr=False)
    dtype: str = ""
    assign: Callable[[np.ndarray], object] | None = field(default=None, repr=False)

    @property
    def kind(self) -> str:
        """Its type and shape, for messages."""
        return f"{self.dtype} of shape {self.shape}".strip()


def weights_of_run(start: WarmStart) -> list[NamedWeight]:
    """Return the weights that a run has kept."""
    ((name, data),) = start.files.items()
    file = ArraysFile(contents_of(data))
    prefix = "model/" if name == VARIABLES_FILE else ""
    keys = [key for key in sorted(file.names) if key.startswith(prefix)]
    paths = start.paths if len(start.paths) == len(keys) else [""] * len(keys)
    return [
        NamedWeight(path, file.shape(key), partial(file.read, key))
        for path, key in zip(paths, keys, strict=True)
    ]


def describe_difference(
    ours: Sequence[NamedWeight], theirs: Sequence[NamedWeight], *, by_order: bool
) -> str:
    """Return the first difference of a model's weights from others; ``""`` if there is none.

    Args:
        ours: those of the model.
        theirs: the others.
        by_order: whether they go by their order, and not by their names.
    """
    if by_order:
        for number, (one, other) in enumerate(zip(ours, theirs, strict=False)):
            if one.kind != other.kind:
                return f"weight {number} is {one.name!r} {one.kind}, there it is {other.kind}"
    else:
        kinds = [{each.name: each.kind for each in weights} for weights in (theirs, ours)]
        for name in dict.fromkeys(name for part in kinds for name in part):
            there, here = (part.get(name, "missing") for part in kinds)
            if here != there:
                return f"weight {name!r} is {here} in the model, and {there} there"
    same = len(ours) == len(theirs)
    return "" if same else f"the model has {len(ours)} weights, there are {len(theirs)}"


def take_over(
    ours: Sequence[NamedWeight],
    theirs: Sequence[NamedWeight],
    start: WarmStart,
    *,
    by_order: bool,
    advice: str = "",
) -> None:
    """Assign a model's weights the values of others; report those that are left.

    Args:
        ours: those of the model.
        theirs: the others.
        start: where they are from, and whether those that do not fit are left out.
        by_order: whether they go by their order, and not by their names.
        advice: ends the message where none fits.

    Raises:
        ModelError: some do not fit; or none does.
    """
    names = [[weight.name for weight in weights] for weights in (ours, theirs)]
    pairs = {n: n for n in range(min(map(len, names)))} if by_order else match_names(*names)
    fitting = {n: m for n, m in pairs.items() if ours[n].kind == theirs[m].kind}
    difference = describe_difference(ours, theirs, by_order=by_order)
    if fitting and difference and not start.skip_mismatch:
        raise ModelError(
            f"initial_weights={start.origin!r} do not fit the model: {difference}; "
            "InitialWeights(…, skip_mismatch=True) takes over those that fit"
        )
    for number, other in fitting.items():
        assign = ours[number].assign
        assert assign is not None
        assign(theirs[other].read())
    report_taken(ours, fitting, theirs, start, advice)


def report_taken(
    ours: Sequence[NamedWeight],
    taken: Collection[int],
    theirs: Sequence[NamedWeight],
    start: WarmStart,
    advice: str,
) -> None:
    """Report which of a model's weights were taken over, where that may be some of them.

    Args:
        ours: the model's.
        taken: the numbers of those that were.
        theirs: what there was.
        start: where it is from.
        advice: ends the message where none was.

    Raises:
        ModelError: none was.
    """
    if not taken:
        raise ModelError(
            f"initial_weights={start.origin!r}: no weight has the name and shape of one of the "
            f"model's, which are {_listed(ours)}; there are {_listed(theirs) or 'none'}{advice}"
        )
    left = [weight for number, weight in enumerate(ours) if number not in taken]
    if left or start.skip_mismatch:
        text = f"initial_weights={start.origin!r}: {len(taken)} of {len(ours)} weights taken over"
        if left:
            text += f"; {len(left)} keep their initial values ({_listed(left)})"
        notify(text, warn=bool(left))


def _listed(weights: Sequence[NamedWeight]) -> str:
    names = [f"{weight.name!r} {weight.shape}" for weight in weights[:_SHOWN]]
    more = len(weights) - _SHOWN
    return ", ".join(names) + (f" and {more} more" if more > 0 else "")


def match_names(ours: Sequence[str], theirs: Sequence[str]) -> dict[int, int]:
    """Map the number of each of our names to the number of the same name of theirs. Pure.

    If no name is equal, the name of the whole model, which leads all names of a ``Sequential``,
    does not count. A name that occurs several times is matched only if it does so equally often.
    """
    return _equal_names(ours, theirs) or _equal_names(_below_root(ours), _below_root(theirs))


def _equal_names(ours: Sequence[str], theirs: Sequence[str]) -> dict[int, int]:
    places, others = _places(ours), _places(theirs)
    return {
        number: other
        for name, numbers in places.items()
        if len(numbers) == len(others.get(name, ()))
        for number, other in zip(numbers, others[name], strict=True)
    }


def _below_root(names: Sequence[str]) -> list[str]:
    roots = {name.partition("/")[0] for name in names}
    if len(roots) == 1 and all(name.count("/") >= 2 for name in names):
        return [name.partition("/")[2] for name in names]
    return list(names)


def _places(names: Sequence[str]) -> dict[str, list[int]]:
    places: dict[str, list[int]] = {}
    for number, name in enumerate(names):
        places.setdefault(name, []).append(number)
    return places
