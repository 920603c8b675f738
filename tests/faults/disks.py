"""File systems of their own for tests, that can be full and can hang."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest


@contextlib.contextmanager
def memory_disk(place: Path, size: str) -> Iterator[Path]:
    """Mount a file system of ``size`` at ``place``; skips the test where that is not permitted."""
    place.mkdir()
    _run("mount", "-t", "tmpfs", "-o", f"size={size}", "none", str(place))
    try:
        yield place
    finally:
        subprocess.run(["umount", "--lazy", str(place)], check=True)


@contextlib.contextmanager
def freezable_disk(place: Path) -> Iterator[Path]:
    """Mount a file system at ``place`` that ``fsfreeze`` can stop; thawed again at the end."""
    image = place.with_suffix(".image")
    with image.open("wb") as file:
        file.truncate(64 * 2**20)
    place.mkdir()
    _run("mkfs.ext4", "-q", str(image))
    _run("mount", "-o", "loop", str(image), str(place))
    try:
        yield place
    finally:
        thaw(place)
        subprocess.run(["umount", "--lazy", str(place)], check=True)


def thaw(place: Path) -> None:
    """Let go on what hangs; does nothing if nothing does."""
    subprocess.run(["fsfreeze", "--unfreeze", str(place)], check=False, capture_output=True)


def _run(*command: str) -> None:
    try:
        done = subprocess.run(command, check=False, capture_output=True, text=True)
    except FileNotFoundError:
        pytest.skip(f"{command[0]} is not installed")
    if done.returncode:
        pytest.skip(f"{' '.join(command)}: {done.stderr.strip()}")
