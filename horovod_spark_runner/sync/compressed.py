"""Allreduce of gradients that are made smaller on the way, by a `Codec`.

A rank's gradients, weighted by its rows, are its term of the sum that all ranks get. What a codec
does not send of it stays with the rank and is added to its next term; so the sum over all steps of
what optimizers are given, and of what ranks still keep, is that of the gradients.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence

import numpy as np

from ..config.sync import Compression, PowerSGD, Threshold, TopK
from ..errors import ModelError, RunDirectoryError
from .allreduce import AllreduceSynchroniser
from .codec import (
    Codec,
    HalfCodec,
    Place,
    PowerCodec,
    Shape,
    ThresholdCodec,
    TopKCodec,
    Wire,
    names_of,
    parts_like,
)
from .synchroniser import Collectives, Share, Tensor, Traffic, bytes_of_sum

# A sign and an index are sent as 32 bits.
_MOST_ENTRIES = 1 << 31


class CompressedSynchroniser(AllreduceSynchroniser):
    """All ranks hold the same model after every step; see `Synchroniser`.

    Args:
        compression: how gradients are made smaller.
        collectives: runs functions of arrays on the framework's tensors.
        wire: leads to the other ranks.
    """

    def __init__(self, compression: Compression, collectives: Collectives, wire: Wire) -> None:
        super().__init__("none", collectives)
        self._codec = _codec_of(compression)
        self.delays_gradients = bool(self._codec.keeps)
        self._wire = wire
        self._step = 0
        self._places: dict[str, Place] = {}
        # Restored state of places that no step has used yet.
        self._restored: dict[str, np.ndarray] = {}
        self._whole = 0.0

    def before_step(self, step: int) -> None:
        self._step = step

    def gradients(
        self,
        gradients: Sequence[Tensor | None],
        share: Share,
        name: str,
        place: str,
        along: Sequence[Tensor] = (),
    ) -> tuple[list[Tensor | None], list[Tensor]]:
        present = [i for i, gradient in enumerate(gradients) if gradient is not None]
        local = [share.total(share.term(gradients[i])) for i in present]
        self._note(place, [tuple(int(n) for n in tensor.shape) for tensor in local])
        exchange = functools.partial(self._exchange, place, len(local))
        summed = self._collectives.on_host(exchange, [*local, *along])
        result: list[Tensor | None] = [None] * len(gradients)
        for i, tensor in zip(present, summed, strict=False):
            result[i] = tensor
        return result, summed[len(local) :]

    def _note(self, name: str, shapes: Sequence[Shape]) -> None:
        """Create a place, or check that the shapes of one from an earlier step are unchanged."""
        place = self._places.get(name)
        if place is None or not self.delays_gradients:
            place = self._places[name] = Place(name, list(shapes))
            if self._codec.sends_places and sum(place.sizes) >= _MOST_ENTRIES:
                raise ModelError(
                    f"an optimizer has {sum(place.sizes):,} weights; compressions that send places "
                    f"know {_MOST_ENTRIES:,}. Use Allreduce(compression='bf16') or PowerSGD(…)"
                )
            self._fill(place)
        elif list(place.shapes) != list(shapes):
            raise ModelError(
                "an optimizer is given gradients of other variables than in the step before "
                f"({_shown(shapes)} instead of {_shown(place.shapes)}), to which what a rank has "
                "not sent yet cannot be added. Give it the gradients of all its variables in every "
                "step, or use sync=Allreduce() without such a compression"
            )

    def _exchange(self, name: str, count: int, arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Return gradients for the first ``count`` arrays, and the sums of the others."""
        place, summed = self._places[name], []
        if count:
            flat = np.concatenate([array.reshape(-1) for array in arrays[:count]])
            self._whole += bytes_of_sum(flat.nbytes, self._wire.size)
            total = self._codec.total(flat, place, self._wire, self._step)
            # Not the place's shapes: another trace of the step may have set them.
            summed = parts_like(total, arrays[:count])
        for array in arrays[count:]:
            self._whole += bytes_of_sum(array.nbytes, self._wire.size)
            summed.append(self._wire.sum(array))
        return summed

    def traffic(self) -> Traffic:
        plain = super().traffic()  # statistics
        return Traffic(plain.sent + self._wire.sent, plain.whole + self._whole)

    def capture(self, rank: int) -> dict[str, np.ndarray]:
        place_arrays = [names_of(place) for place in self._places.values()]
        saved = {n: a for names in (self._restored, *place_arrays) for n, a in names.items()}
        return {n: a.copy() for n, a in saved.items() if rank == 0 or not n.startswith("shared/")}

    def restore(self, arrays: Mapping[str, np.ndarray]) -> None:
        # State that this compression does not use would not be updated.
        prefixes = tuple(f"{name}/" for name in self._codec.keeps)
        self._restored = {
            name: array for name, array in arrays.items() if name.startswith(prefixes)
        }
        for place in self._places.values():
            self._fill(place)

    def _fill(self, place: Place) -> None:
        """Fill a place from a checkpoint."""
        end = f"/{place.name}"
        for name in [name for name in self._restored if name.endswith(end)]:
            array = self._restored.pop(name)
            kind, _, key = name.removesuffix(end).partition("/")
            if kind == "shared":
                place.shared[key] = np.array(array)
                continue
            if array.size != sum(place.sizes):
                raise RunDirectoryError(
                    f"the checkpoint has {array.size:,} entries of gradients that ranks have not "
                    f"sent yet, of an optimizer that changes {sum(place.sizes):,} now; let the "
                    "same weights be trained, or go on with sync=Allreduce(), which forgets them"
                )
            place.local[key] = np.array(array)


def _codec_of(compression: Compression) -> Codec:
    """Return the codec of a compression."""
    if isinstance(compression, TopK):
        return TopKCodec(compression)
    if isinstance(compression, Threshold):
        return ThresholdCodec(compression)
    if isinstance(compression, PowerSGD):
        return PowerCodec(compression)
    return HalfCodec()


def _shown(shapes: Sequence[Shape]) -> str:
    return ", ".join(map(str, shapes[:3])) + (" …" if len(shapes) > 3 else "")
