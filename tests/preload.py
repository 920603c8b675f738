"""Libraries in C that are loaded into programs before their own: see the heads of their files."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

PATIENT = Path(__file__).with_name("patient.c")


def build(source: Path, folder: Path) -> Path | None:
    """Compile ``source`` into a library in ``folder``; ``None`` without a compiler."""
    compiler = shutil.which("cc")
    if compiler is None:
        return None
    library = folder / source.with_suffix(".so").name
    command = [compiler, "-O2", "-shared", "-fPIC", "-o", str(library), str(source), "-ldl"]
    subprocess.run(command, check=True)
    return library
