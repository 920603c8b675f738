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

BUCKET = "benchmark"


@contextlib.contextmanager
def object_store(latency: float) -> Iterator[str]:
    """Run it meanwhile and set the environment that leads to it; give the bucket's URL.

    Args:
        latency: seconds before an answer begins.
    """
    command = [sys.executable, __file__, str(latency)]
    server = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
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


def pass_on(source: socket.socket, target: socket.socket, latency: float) -> None:
    """Pass bytes on; those that follow a pause, the beginning of an answer, come late."""
    last = 0.0
    with contextlib.suppress(OSError):
        while data := source.recv(1 << 20):
            if time.monotonic() - last > latency / 4:
                time.sleep(latency)
            target.sendall(data)
            last = time.monotonic()
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
            for source, target, seconds in ((client, upstream, 0.0), (upstream, client, latency)):
                threading.Thread(
                    target=pass_on, args=(source, target, seconds), daemon=True
                ).start()

    threading.Thread(target=take, daemon=True).start()
    keys = {"aws_access_key_id": "somebody", "aws_secret_access_key": "something"}
    url = f"http://127.0.0.1:{port}"
    client = boto3.client("s3", endpoint_url=url, region_name="us-east-1", **keys)
    client.create_bucket(Bucket=BUCKET)
    print(f"http://127.0.0.1:{door.getsockname()[1]}", flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    serve(float(sys.argv[1]))
