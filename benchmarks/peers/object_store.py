"""An S3 server whose every answer takes a while, as a distant one's does: moto behind a proxy.

`object_store` runs it as a process of its own: it must not take turns with what is measured.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

BUCKET = "benchmark"


@contextlib.contextmanager
def object_store(latency: float) -> Iterator[str]:
    """Run it meanwhile and set the environment that leads to it; give the bucket's URL.

    Args:
        latency: seconds before an answer begins.
    """
    with running("peers.object_store", str(latency)) as url:
        yield url


@contextlib.contextmanager
def running(module: str, *arguments: str) -> Iterator[str]:
    """Run a module that prints its endpoint and serves, and lead the environment to it.

    Args:
        module: as ``python -m`` takes it in the folder of the benchmarks.
        arguments: of its command.
    """
    server = subprocess.Popen(
        [sys.executable, "-m", module, *arguments],
        cwd=Path(__file__).resolve().parent.parent,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert server.stdout is not None
    variables = {
        "AWS_ENDPOINT_URL": server.stdout.readline().strip(),
        "AWS_ACCESS_KEY_ID": "somebody",
        "AWS_SECRET_ACCESS_KEY": "something",
        "AWS_DEFAULT_REGION": "us-east-1",
    }
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield f"s3://{BUCKET}"
    finally:
        for name, value in before.items():
            os.environ.pop(name)
            if value is not None:
                os.environ[name] = value
        server.kill()
        server.wait()


def pass_on(source: socket.socket, target: socket.socket, asked: threading.Event) -> None:
    """Pass requests on, and note that one has been made."""
    with forwarding(target):
        while data := source.recv(1 << 20):
            asked.set()
            target.sendall(data)


def answer(
    source: socket.socket, target: socket.socket, asked: threading.Event, latency: float
) -> None:
    """Pass answers on; the beginning of each, and nothing else of it, comes late."""
    with forwarding(target):
        while data := source.recv(1 << 20):
            if asked.is_set():
                asked.clear()
                time.sleep(latency)
            target.sendall(data)


@contextlib.contextmanager
def forwarding(target: socket.socket) -> Iterator[None]:
    """Let a connection that breaks end, and tell the other side."""
    with contextlib.suppress(OSError):
        yield
    with contextlib.suppress(OSError):
        target.shutdown(socket.SHUT_WR)


def serve(latency: float) -> None:
    """Be the server until the input ends."""
    import boto3
    from moto.server import ThreadedMotoServer

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer("127.0.0.1", port=0, verbose=False)
    server.start()
    _, port = server.get_host_and_port()
    door = socket.create_server(("127.0.0.1", 0), backlog=256)

    def take() -> None:
        while True:
            client, _ = door.accept()
            upstream = socket.create_connection(("127.0.0.1", port))
            asked = threading.Event()
            for way, arguments in (
                (pass_on, (client, upstream, asked)),
                (answer, (upstream, client, asked, latency)),
            ):
                threading.Thread(target=way, args=arguments, daemon=True).start()

    threading.Thread(target=take, daemon=True).start()
    keys = {"aws_access_key_id": "somebody", "aws_secret_access_key": "something"}
    url = f"http://127.0.0.1:{port}"
    client = boto3.client("s3", endpoint_url=url, region_name="us-east-1", **keys)
    client.create_bucket(Bucket=BUCKET)
    print(f"http://127.0.0.1:{door.getsockname()[1]}", flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    serve(float(sys.argv[1]))
