"""``signature.json``: what a trained model takes and gives, and what it needs. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from ..data.manifest import Column
from .spec import Binding, OutputSpec


@dataclass(frozen=True)
class Signature:
    """What is known of a trained model without loading it.

    Attributes:
        inputs: which column feeds which input.
        columns: the feature columns as they were trained on.
        outputs: what it gives; ``None`` if it cannot be called.
        weights: paths of its weights, in their order.
        transforms: image columns that were trained with a transform.
        archive: whether there is a ``model.keras``.
        self_contained: whether it loads and predicts the same without the user's code.
        needs_source: whether it does not with the user's code either, but must be built anew.
        problem: why it does not, or why the model cannot be called; ``""`` if it does and can.
        run_eagerly: whether it was compiled to run without a graph.
        batch_size: rows it has to be called with; ``None`` for any number.
        state: Keras' global settings it was trained under, by name.
        keras: version of Keras.
    """

    inputs: Binding
    columns: tuple[Column, ...]
    outputs: tuple[OutputSpec, ...] | None
    weights: tuple[str, ...] = ()
    transforms: tuple[str, ...] = ()
    archive: bool = False
    self_contained: bool = False
    needs_source: bool = False
    problem: str = ""
    run_eagerly: bool = False
    batch_size: int | None = None
    state: Mapping[str, str] | None = None
    keras: str = ""

    def to_fields(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_fields(cls, fields: Mapping[str, Any]) -> Signature:
        """Rebuild a signature; what an older one did not record has its default.

        Raises:
            ValueError: they are of none.
        """
        try:
            names = fields["inputs"]["names"]
            outputs = fields["outputs"]
            known = {
                **{name: value for name, value in fields.items() if name in cls.__annotations__},
                "inputs": Binding(
                    tuple(tuple(slot) for slot in fields["inputs"]["slots"]),
                    None if names is None else tuple(names),
                ),
                "columns": tuple(
                    Column(**{**c, "shape": tuple(c["shape"])}) for c in fields["columns"]
                ),
                "outputs": None if outputs is None else tuple(output_from(o) for o in outputs),
                "weights": tuple(fields.get("weights", ())),
                "transforms": tuple(fields.get("transforms", ())),
            }
            return cls(**known)
        except (KeyError, TypeError) as error:
            raise ValueError(f"not a model's signature: {error!r}") from error


def output_from(fields: Mapping[str, Any]) -> OutputSpec:
    """Return the output whose fields JSON gave back."""
    return OutputSpec(
        fields["name"], tuple(fields["shape"]), fields["dtype"], tuple(fields.get("path", ()))
    )
