"""`python -S deploy/health.py`: exit 0 when this container's service is ready. Costs as little as it can."""

import os
import socket
import sys

TIMEOUT_S = 2.0


def ready(port: int) -> bool:
    """Whether `/readyz` answers 200."""
    try:
        with socket.create_connection(("127.0.0.1", port), TIMEOUT_S) as connection:
            connection.sendall(b"GET /readyz HTTP/1.0\r\nHost: localhost\r\n\r\n")
            return connection.recv(32).split(b" ")[1:2] == [b"200"]
    except OSError:
        return False


if __name__ == "__main__":
    sys.exit(0 if ready(int(os.environ.get("CHORUS_HTTP_PORT") or 8080)) else 1)
