"""Lend the MPI identity of a rank to the Spark task's worker; mpirun starts one shim per rank.

Run as ``python -S -E shim.py``. The shim connects to its own rank's Unix socket (``HSR_DOORS``
lists those of this host's ranks, by local rank), sends the environment MPI gave it, and waits for
one byte: the exit code to end with. If the socket closes without one, the task is gone and the
shim fails, which makes mpirun end the other ranks. Standard library only: it starts in
milliseconds.
"""

import json
import os
import socket
import sys

_PREFIXES = ("PMIX_", "OMPI_", "PRTE_", "OPAL_")


def main() -> int:
    """Lend this process's MPI identity to the rank, and end with it."""
    path = json.loads(os.environ["HSR_DOORS"])[int(os.environ["OMPI_COMM_WORLD_LOCAL_RANK"])]
    environment = {k: v for k, v in os.environ.items() if k.startswith(_PREFIXES)}
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.connect(path)
        connection.sendall(json.dumps({"environment": environment}).encode() + b"\n")
        code = connection.recv(1)
    return code[0] if code else 1


if __name__ == "__main__":
    sys.exit(main())
