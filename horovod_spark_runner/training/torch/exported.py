"""What a PyTorch module can be exported to. Loads no framework."""

from __future__ import annotations

import keyword
from collections.abc import Collection, Sequence

from ...errors import ModelError
from ..engine import TORCH_EXPORT


def check_exportable(format: str, names: Sequence[str], transformed: Collection[str]) -> None:
    """Check as much of an export as shows without the module; see `Engine.check_export`."""
    for name in names:
        if format == TORCH_EXPORT and (not name.isidentifier() or keyword.iskeyword(name)):
            raise ModelError(
                f"a program cannot take feature column {name!r}: PyTorch makes it the name of a "
                "Python parameter. Call it otherwise, in the rows that are trained on, or only "
                "there: TorchTransformer.setFeatureCols([…]), then export"
            )
    for name in transformed:
        raise ModelError(
            f"a program cannot take feature column {name!r}: the model was trained with a "
            "transform of it, which is a function of Python's; transform the rows before, in a "
            "column of their own, or put it into the module's forward"
        )
