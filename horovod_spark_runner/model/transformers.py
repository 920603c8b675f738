"""The transformer class of each engine."""

from __future__ import annotations

from ..frameworks import transformer_of
from .torch_transformer import TorchTransformer
from .transformer import TFTransformer

_CLASSES: dict[str, type[TFTransformer] | type[TorchTransformer]] = {
    cls.__name__: cls for cls in (TFTransformer, TorchTransformer)
}


def transformer_class(engine: str) -> type[TFTransformer] | type[TorchTransformer]:
    """Return the class for an engine's dotted name; `TFTransformer` for one of nobody's."""
    return _CLASSES[transformer_of(engine)]
