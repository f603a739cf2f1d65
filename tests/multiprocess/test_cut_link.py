"""A link that is cut: a connection that waits for an answer does not wait for ever."""

import errno
import subprocess

# The request arrives and is acknowledged; then the link goes down. Nothing is left to
# send, so that no missing acknowledgement ends the connection.
PROGRAM = """
import socket, subprocess, sys, time
from gradparity.multiprocess import linux

subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
server = socket.create_server(("127.0.0.1", 0))
before = linux.sockets()
client = socket.create_connection(server.getsockname())
linux.give_up_silent(2.0, except_for=before)
other, _ = server.accept()
client.sendall(b"request")
assert other.recv(100) == b"request"
time.sleep(0.2)  # it is acknowledged
subprocess.run(["ip", "link", "set", "lo", "down"], check=True)
client.settimeout(30.0)
start = time.monotonic()
try:
    client.recv(1)
except OSError as error:
    print(error.errno, round(time.monotonic() - start))
"""


def test_a_host_that_answers_no_more_is_given_up(
    in_namespaces: tuple[str, ...],
) -> None:
    done = subprocess.run(
        [*in_namespaces, "-c", PROGRAM], capture_output=True, text=True, timeout=60.0
    )
    assert done.returncode == 0, done.stderr
    found, seconds = done.stdout.split()
    assert int(found) == errno.ETIMEDOUT  # the kernel's; Python's own has no number
    assert int(seconds) < 20
