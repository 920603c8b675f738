"""A sample of what a trained model gives, by which a model that is built anew is known again."""

from __future__ import annotations

from collections.abc import Sequence

import keras
import numpy as np
from numpy.typing import ArrayLike

from ...storage.arrays import dump_arrays, load_arrays
from ..likeness import check_close, check_like
from .outputs import call_model, fixed_batch, output_leaves, repeat_rows, unchanged
from .protocols import Nest


def try_out(model: keras.Model, example: Nest) -> tuple[Nest, Nest]:
    """Return inputs that tell models apart, and what the model gives for them.

    Args:
        model: a model with its weights.
        example: one row of inputs.
    """
    inputs = repeat_rows(example, fixed_batch(model) or 2)
    random = np.random.default_rng(0)
    varied = keras.tree.map_structure(
        lambda a: random.random(a.shape).astype(a.dtype) if a.dtype.kind == "f" else a, inputs
    )
    try:
        return varied, call_model(model, varied)
    except Exception:  # values outside the model's domain
        return inputs, call_model(model, inputs)


def take_sample(model: keras.Model, example: Nest) -> memoryview | None:
    """Return inputs and outputs as the bytes of a file.

    ``None`` where they tell nothing: strings, and models that give something else each time.
    """
    try:
        with unchanged(model):
            inputs, given = try_out(model, example)
            again = call_model(model, inputs)
        pairs = zip(output_leaves(given), output_leaves(again), strict=True)
        for (_, value), (_, other) in pairs:
            check_close(np.array(value), np.array(other))
        arrays = _named("input", keras.tree.flatten(inputs))
        arrays.update(_named("output", [value for _, value in output_leaves(given)]))
    except Exception:  # the user's own call may do anything
        return None
    if any(array.dtype.kind in "OSU" for array in arrays.values()):
        return None
    return dump_arrays(arrays)


def check_sample(model: keras.Model, example: Nest, sample: bytes) -> None:
    """Check that ``model`` gives what the trained one gave.

    Args:
        model: with the trained weights.
        example: one row of inputs, for their structure.
        sample: what `take_sample` returned.

    Raises:
        ModelError: it gives something else.
    """
    arrays = load_arrays(sample)
    inputs = [array for name, array in sorted(arrays.items()) if name.startswith("input/")]
    expected = [array for name, array in sorted(arrays.items()) if name.startswith("output/")]
    found = call_model(model, keras.tree.pack_sequence_as(example, inputs))
    leaves = [np.array(value) for _, value in output_leaves(found)]
    check_like(expected, leaves)


def _named(kind: str, values: Sequence[ArrayLike]) -> dict[str, np.ndarray]:
    return {f"{kind}/{number:05d}": np.array(value) for number, value in enumerate(values)}
