"""What tests leave behind is found, and what others have at the same time is not taken for it."""

from __future__ import annotations

import contextlib
import os
import re
import socket
import subprocess
import sys
import tempfile
import threading
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from tests.leftovers import MARK, await_nothing_left, inventory

# Says so once it runs; what it is given as an argument, it holds open and mapped.
HOLD = """
import mmap, sys, time
files = [open(path, "r+b") for path in sys.argv[1:]]
maps = [mmap.mmap(file.fileno(), 0) for file in files]
print("holds", flush=True)
time.sleep(600)
"""


@contextlib.contextmanager
def holder(*paths: Path, mark: str | None = None) -> Iterator[str]:
    """Run a process in a session of its own, as one of these tests or of others."""
    env = {**os.environ, **({} if mark is None else {MARK: mark})}
    # By a shell that ends: so it is the child of nobody here.
    command = [sys.executable, "-c", HOLD, *map(str, paths)]
    shell = subprocess.Popen(
        ["/bin/sh", "-c", 'setsid "$@" & echo $!', "sh", *command],
        stdout=subprocess.PIPE,
        text=True,
        env=env,
    )
    assert shell.stdout is not None
    said = {shell.stdout.readline().strip(), shell.stdout.readline().strip()}
    pid = int((said - {"holds"}).pop())
    shell.wait()
    try:
        yield f"process {pid} "
    finally:
        process = psutil.Process(pid)
        process.kill()
        process.wait(10)
        shell.stdout.close()


@contextlib.contextmanager
def file_in_temporary_folder() -> Iterator[str]:
    with tempfile.NamedTemporaryFile(prefix="prte.") as file:
        yield file.name


@contextlib.contextmanager
def listening() -> Iterator[str]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"port={server.getsockname()[1]})"


@contextlib.contextmanager
def thread() -> Iterator[str]:
    over = threading.Event()
    thread = threading.Thread(target=over.wait, name="hsr-test")
    thread.start()
    yield thread.name
    over.set()
    thread.join()


@contextlib.contextmanager
def shared_memory(user: str | None = None) -> Iterator[str]:
    """Leave a segment, which a process of others' holds or nobody does."""
    folder = Path("/dev/shm", f"hsr-{uuid.uuid4().hex[:8]}")
    folder.mkdir()
    segment = folder / "sm_segment"
    segment.write_bytes(bytes(4096))
    try:
        with contextlib.nullcontext() if user is None else holder(segment, mark=user):
            yield str(folder)
    finally:
        segment.unlink()
        folder.rmdir()


@pytest.mark.parametrize(
    "left", [holder, file_in_temporary_folder, listening, thread, shared_memory]
)
def test_what_stays_is_found(left: Callable[[], contextlib.AbstractContextManager[str]]) -> None:
    before = inventory()
    # Tests beside this one have something at the same time, so what is there is asked for by name.
    with left() as name:
        assert any(name in found for found in inventory() - before)
        with pytest.raises(AssertionError, match=re.escape(name)):
            await_nothing_left(0, before=before)
    assert not any(name in found for found in inventory())


def test_what_others_have_is_none_of_ours() -> None:
    with holder(mark="others") as process, shared_memory("others") as folder:
        assert not any(process in found or folder in found for found in inventory())
