"""A store process without torch: has a port, and ends with its controller.

Fails with FP8_TEST_BROKEN_STORE in its environment.
"""

import os
import socket
import sys

if __name__ == "__main__":
    if "FP8_TEST_BROKEN_STORE" in os.environ:
        sys.exit("no such port")
    controller = socket.socket(fileno=int(sys.argv[1]))
    controller.sendall(b"4711")
    controller.recv(1)
