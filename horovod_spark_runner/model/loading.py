"""Making a trained model again in one of Spark's Python workers."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..training.engine import engine_named
from ..training.trained_model import Model, Recipe


def load_model(recipe: Recipe) -> Model:
    """Return the function from feature columns to the model's outputs.

    Raises:
        ModelError: what was built is not the model that was trained.
    """
    model = engine_named(recipe.engine).load(recipe)
    return model if recipe.batch_size is None else _in_batches_of(recipe.batch_size, model)


def describe_outputs(recipe: Recipe) -> tuple[list[dict[str, Any]], str]:
    """Return what the model of ``recipe`` gives, as JSON takes it, or nothing and why.

    Raises:
        ModelError: it is not the model that was trained.
    """
    return engine_named(recipe.engine).describe_outputs(recipe)


def _in_batches_of(size: int, model: Model) -> Model:
    """Call the model with exactly ``size`` rows: the last ones are repeated, and left out again."""

    def prepare(values: dict[str, np.ndarray]) -> list[tuple[Any, int]]:
        rows = len(next(iter(values.values())))
        parts = []
        for begin in range(0, rows, size):
            some = {name: v[begin : begin + size] for name, v in values.items()}
            padding = size - min(size, rows - begin)
            if padding:
                some = {n: np.concatenate([v, v[-1:].repeat(padding, 0)]) for n, v in some.items()}
            parts.append((model.prepare(some), size - padding))
        return parts

    def compute(parts: list[tuple[Any, int]]) -> list[np.ndarray]:
        given = [[output[:rows] for output in model.compute(some)] for some, rows in parts]
        return [np.concatenate(output) for output in zip(*given, strict=True)]

    return Model(prepare, compute, slow=model.slow)
