"""Makes packages look as if they were not installed, in every process that inherits PYTHONPATH.

A test puts this folder there, and the names of modules and distributions into ``ABSENT``.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from importlib.machinery import ModuleSpec, PathFinder
from typing import Any

ABSENT = os.environ.get("ABSENT", "").split()


class Finder(PathFinder):
    """Finds what is installed, but for these."""

    @classmethod
    def find_spec(cls, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if fullname.partition(".")[0] in ABSENT:
            return None
        return super().find_spec(fullname, path, target)

    @classmethod
    def find_distributions(cls, *args: Any, **kwargs: Any) -> Iterator[Any]:
        for found in PathFinder.find_distributions(*args, **kwargs):
            if found.metadata["Name"].replace("_", "-") not in ABSENT:
                yield found


sys.meta_path[sys.meta_path.index(PathFinder)] = Finder
