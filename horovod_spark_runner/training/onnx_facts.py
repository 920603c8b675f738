"""Metadata of a model in its ONNX file, whatever the framework."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from .._version import __version__
from ..data.manifest import Column
from .onnx_session import BOUNDS, METADATA
from .spec import OutputSpec

FORMAT = 1
# What the first dimension of all that goes in and out is called.
ROWS = "rows"
# Protocol buffers hold less than 2 GiB; the graph itself needs little beside the weights.
MOST_BYTES = 2**31 - 2**24


def tell_facts(
    model: Any,
    columns: Sequence[Column],
    outputs: Sequence[OutputSpec],
    added: Sequence[str],
    bounds: Mapping[str, tuple[int, int]],
) -> None:
    """Write into an ONNX model what its columns hold and what it gives.

    Args:
        model: the ``onnx.ModelProto``.
        columns: the inputs, by their names in the file.
        outputs: what the model gives.
        added: the names of the outputs in the file.
        bounds: the least and largest integer of inputs that take fewer than their columns hold.
    """
    import onnx

    facts = {
        "format": FORMAT,
        "version": __version__,
        "columns": [asdict(column) for column in columns],
        "outputs": [
            {
                "name": name,
                "shape": spec.shape,
                "dtype": spec.dtype,
                "activation": spec.activation,
            }
            for name, spec in zip(added, outputs, strict=True)
        ],
        BOUNDS: dict(bounds),
    }
    onnx.helper.set_model_props(model, {METADATA: json.dumps(facts)})
