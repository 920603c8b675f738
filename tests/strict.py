"""Where every warning is an error, whoever gives it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest


def make_warnings_errors(items: Sequence[pytest.Item], folder: Path) -> None:
    """Make errors of all warnings in the tests of ``folder``, but for those that setup.cfg names.

    Files and sockets that are left open are errors if no other tests run as well: garbage
    collection finds them in whatever test runs then, and Spark leaves some of its own.
    """
    alone = all(folder in item.path.parents for item in items)
    for item in items:
        if folder in item.path.parents:
            named = [rule for rule in item.config.getini("filterwarnings") if rule.count(":") > 1]
            left_open = ["error::pytest.PytestUnraisableExceptionWarning"] if alone else []
            item.add_marker(pytest.mark.filterwarnings("error", *named, *left_open))
