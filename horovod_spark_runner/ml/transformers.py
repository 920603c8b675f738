"""Which transformer holds the models of an engine."""

from __future__ import annotations

from ..frameworks import TORCH
from .torch_transformer import TorchTransformer
from .transformer import TFTransformer


def transformer_class(engine: str) -> type[TFTransformer] | type[TorchTransformer]:
    """Return the class for an engine's dotted name; `TFTransformer` for one of nobody's."""
    return TorchTransformer if engine == TORCH else TFTransformer
