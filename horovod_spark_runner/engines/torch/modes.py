"""Training and evaluation mode of a module's parts."""

from __future__ import annotations

from torch import nn


class Modes:
    """Brings a module into evaluation mode and back.

    Args:
        module: the module.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        # What was in training mode, while the module is evaluated.
        self._trained: list[nn.Module] | None = None

    def evaluate(self) -> None:
        """Bring all parts into evaluation mode."""
        if self._trained is None:
            self._trained = [each for each in self._module.modules() if each.training]
            self._module.eval()

    def train(self) -> None:
        """Bring each part back into the mode it had before."""
        if self._trained is not None:
            for each in self._trained:
                each.training = True
            self._trained = None
