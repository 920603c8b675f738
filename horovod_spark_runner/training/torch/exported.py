"""What a PyTorch module can be exported to. Loads no framework."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from ...data.manifest import Column
from ...errors import ModelError
from ..engine import check_format

TORCH_EXPORT = "torch_export"


def check_exportable(
    format: str,
    names: Sequence[str],
    transformed: Collection[str],
    columns: Sequence[Column] = (),
) -> None:
    """Check as much of an export as shows without the module; see `Engine.check_export`."""
    check_format(format, (TORCH_EXPORT,))
    for name in transformed:
        raise ModelError(
            f"a program cannot take feature column {name!r}: the model was trained with a "
            "transform of it, which is a function of Python's; transform the rows before, in a "
            "column of their own, or put it into the module's forward"
        )
