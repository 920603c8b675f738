"""Names of the columns that a transformer adds. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ..config.prediction import DEFAULT, ClassCol, PredictionSettings
from ..errors import DataError
from ..formatting import quote_all


def surely_added(settings: PredictionSettings, outputs: int | None) -> list[str]:
    """Return the names of columns that will be added, as far as they are known before the model is.

    Args:
        settings: what is asked for.
        outputs: how many outputs are compared with labels; ``None`` if that is not known. Of one,
            that it is the model's only output is taken for granted.
    """
    names: list[str] = []
    for given in (settings.probability_col, settings.raw_prediction_col):
        if given is not None:
            names += [given] if isinstance(given, str) else given.values()
    asked = settings.prediction_col
    if isinstance(asked, Mapping):
        return [*names, *asked.values()]
    if asked is None or isinstance(asked, str):
        single = outputs == 1 or settings.output_form == "struct"
        return [*names, asked or DEFAULT] if single else names
    return [*names, *asked]


def check_added(
    added: Sequence[str],
    existing: Sequence[str],
    settings: PredictionSettings,
    *,
    by_case: bool,
    outputs: Sequence[str] = (),
) -> None:
    """Check that the added columns replace nothing, as Spark compares names.

    Args:
        added: names of the columns to add.
        existing: columns of the DataFrame.
        settings: what named the columns to add.
        by_case: whether Spark tells upper from lower case.
        outputs: the model's outputs, where they are known.

    Raises:
        DataError: a name is taken.
    """
    kept = {_plain(name, by_case): name for name in existing}
    clashing = [name for name in added if _plain(name, by_case) in kept]
    if clashing:
        taken = [kept[_plain(name, by_case)] for name in clashing]
        raise DataError(
            f"the DataFrame already has a column {quote_all(taken)}, which a prediction is to be "
            "called; drop it, or name the predictions otherwise: "
            + _advice(clashing, settings, outputs)
        )
    seen: set[str] = set()
    twice = [n for n in added if (key := _plain(n, by_case)) in seen or seen.add(key)]  # type: ignore[func-returns-value]
    if twice:
        raise DataError(
            f"several predictions would be called {quote_all(twice)}; name them otherwise: "
            + _advice(twice, settings, outputs)
        )


def _plain(name: str, by_case: bool) -> str:
    return name if by_case else name.lower()


def _advice(clashing: Sequence[str], settings: PredictionSettings, outputs: Sequence[str]) -> str:
    """Return how other names are given, by the setting that names those in the way."""
    for setting in ("probability_col", "raw_prediction_col"):
        given: ClassCol = getattr(settings, setting)
        if isinstance(given, str) and given in clashing:
            return f'{setting}="…"'
        for output, name in given.items() if isinstance(given, Mapping) else ():
            if name in clashing:
                return f'{setting}={{{output!r}: "…"}}'
    if len(outputs) < 2:
        return 'prediction_col="…"'
    example = {name: f"predicted_{name}" for name in outputs}
    return f"prediction_col={example!r}, or prediction_col='predicted' for these very names"
