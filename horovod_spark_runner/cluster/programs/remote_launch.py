"""Start MPI's daemon on another host; mpirun calls this program in place of ssh.

Run as ``remote_launch.py HOST COMMAND...``. It hands both to slot 0 over the Unix socket named in
``HSR_AGENT`` and ends with the exit code it is told. Standard library only.
"""

import json
import os
import socket
import sys


def main() -> int:
    """Hand the daemon's command to slot 0, and wait for its end."""
    request = {"host": sys.argv[1], "command": " ".join(sys.argv[2:])}
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.connect(os.environ["HSR_AGENT"])
        connection.sendall(json.dumps(request).encode() + b"\n")
        code = connection.recv(1)
    return code[0] if code else 1


if __name__ == "__main__":
    sys.exit(main())
