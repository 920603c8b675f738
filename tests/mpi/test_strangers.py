"""A training whose driver is reached by strangers all the time."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.faults.training import EPOCHS, make_frame, metrics_of, train

pytestmark = [pytest.mark.thorough, pytest.mark.mpi, pytest.mark.spark]

# A thousand connections at a time: half of them say nothing, half announce a frame of 4 MB.
KNOCKS = """
import resource, socket, sys, time

_, most = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (min(most, 2048), most))
announced = bytes(32) + (4 * 2**20 - 1).to_bytes(4, "big") + bytes(4096)
held, reached = {}, 0
while True:
    while len(held) < 1000:
        stranger = socket.socket()
        stranger.setblocking(False)
        stranger.connect_ex(("127.0.0.1", int(sys.argv[1])))
        held[stranger] = len(held) % 2
    time.sleep(0.02)
    for stranger, says in list(held.items()):
        try:
            if says:
                stranger.send(announced)
            data = stranger.recv(32)
            reached += len(data) == 32
            if reached == 2000:
                print("reached", flush=True)
            if not data:
                raise ConnectionError
        except BlockingIOError:
            pass
        except OSError:  # dropped, or nobody listens
            stranger.close()
            del held[stranger]
"""


@pytest.fixture
def port(spark: Any) -> Iterator[int]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        found = free.getsockname()[1]
    spark.conf.set("spark.horovod.controlPort", str(found))
    yield found
    spark.conf.unset("spark.horovod.controlPort")


def test_a_training_goes_on_while_a_thousand_strangers_knock(
    spark: Any, tmp_path: Path, port: int
) -> None:
    command = [sys.executable, "-c", KNOCKS, str(port)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as strangers:
        try:
            train(make_frame(spark), tmp_path / "run")
            assert len(metrics_of(tmp_path / "run")) == EPOCHS
        finally:
            strangers.kill()
        assert strangers.stdout is not None
        assert strangers.stdout.read().startswith(b"reached")
