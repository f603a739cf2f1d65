"""Two hosts on one machine: ``hosts.py LINK FOLDER PROGRAM...`` runs torchrun on both.

Must be started by ``unshare`` as test_ranks_on_hosts.py does. Then this process is root
in new namespaces, and all processes in them end with it, however it ends. A host is
a network namespace with its own loopback and one link, 10.77.0.1 or 10.77.0.2. LINK is

- ``veth``: a pair of virtual Ethernet devices;
- ``slow``: two TUN devices and a wire between them in Python, which takes 10 ms each
  way and loses 1 % of the packets (the kernel's netem is not available everywhere).

When a file ``cut`` appears in the folder, the second host's end of the link goes down.
"""

from __future__ import annotations

import fcntl
import heapq
import os
import random
import select
import struct
import subprocess
import sys
import threading
import time
from pathlib import Path

DELAY_S, LOSS = 0.010, 0.01
END_S = 60.0
"""Seconds for processes of the second host to end after the first host's torchrun."""

_TUNSETIFF = 0x400454CA
_IFF_TUN, _IFF_NO_PI = 0x0001, 0x1000


class Host:
    """A network namespace, held open by a process that sleeps in it."""

    def __init__(self, number: int, holder: int) -> None:
        self.address = f"10.77.0.{number + 1}"
        self.number = number
        self.enter = ("nsenter", f"--net=/proc/{holder}/ns/net")
        self.holder = holder
        self.ip("link", "set", "lo", "up")

    def ip(self, *words: str) -> None:
        """Run ``ip`` on this host."""
        subprocess.run([*self.enter, "ip", *words], check=True)

    def plug(self) -> None:
        """Give the link its address."""
        self.ip("addr", "add", f"{self.address}/24", "dev", "link0")
        self.ip("link", "set", "link0", "up")

    def torchrun(self, folder: Path, program: list[str]) -> subprocess.Popen[bytes]:
        """Start this host's agent; the first host holds the rendezvous."""
        log = (folder / f"host{self.number}.log").open("wb")
        agent = ["-m", "torch.distributed.run", "--nnodes", "2", "--rdzv-id", "hosts"]
        agent += ["--nproc-per-node", "2", "--rdzv-backend", "c10d"]
        agent += ["--rdzv-endpoint", "10.77.0.1:29400", "--local-addr", self.address]
        agent += ["--rdzv-conf", f"is_host={int(self.number == 0)}"]
        env = {**os.environ, "GLOO_SOCKET_IFNAME": "link0", "OMP_NUM_THREADS": "1"}
        return subprocess.Popen(
            [*self.enter, sys.executable, *agent, *program],
            env=env,
            stdout=log,
            stderr=log,
        )


def two_hosts() -> tuple[Host, Host]:
    """Return two hosts: this process's namespace, and a new one."""
    holder = subprocess.Popen(["unshare", "--net", "sleep", "infinity"])
    ours = os.readlink("/proc/self/ns/net")
    while os.readlink(f"/proc/{holder.pid}/ns/net") == ours:
        time.sleep(0.01)
    return Host(0, os.getpid()), Host(1, holder.pid)


def join_by_veth(hosts: tuple[Host, Host]) -> None:
    """Connect the hosts by a pair of virtual Ethernet devices."""
    peer = ("peer", "name", "link0", "netns", str(hosts[1].holder))
    hosts[0].ip("link", "add", "link0", "type", "veth", *peer)
    for host in hosts:
        host.plug()


def join_by_wire(hosts: tuple[Host, Host]) -> None:
    """Connect the hosts by TUN devices, with delays and lost packets."""
    ends = [tun(host) for host in hosts]
    for host in hosts:
        host.plug()
    threading.Thread(target=carry, args=(ends,), daemon=True).start()


def tun(host: Host) -> int:
    """Make a TUN device on a host; return its descriptor."""
    made = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(made, _TUNSETIFF, struct.pack("16sH", b"link0", _IFF_TUN | _IFF_NO_PI))
    if host.holder != os.getpid():
        host_net = str(host.holder)
        subprocess.run(["ip", "link", "set", "link0", "netns", host_net], check=True)
    return made


def carry(ends: list[int]) -> None:
    """Forward packets between both ends, with a delay and losses."""
    dice = random.Random(0)
    waiting: list[tuple[float, int, int, bytes]] = []
    for number in range(sys.maxsize):
        due = waiting[0][0] - time.monotonic() if waiting else 1.0
        for end in select.select(ends, [], [], max(0.0, due))[0]:
            packet = os.read(end, 1 << 16)
            if dice.random() >= LOSS:
                other = ends[1 - ends.index(end)]
                late = time.monotonic() + DELAY_S
                heapq.heappush(waiting, (late, number, other, packet))
        while waiting and waiting[0][0] <= time.monotonic():
            _, _, end, packet = heapq.heappop(waiting)
            os.write(end, packet)


def wait_for_the_others(
    agent: subprocess.Popen[bytes], holder: int, cut: bool
) -> list[str]:
    """Wait until other processes have ended; describe those that are left.

    If the link was cut, torchrun's own agent may stay.
    """
    known = {1, os.getpid(), holder, agent.pid}
    deadline = time.monotonic() + END_S
    while True:
        pids = {int(name) for name in os.listdir("/proc") if name.isdigit()}
        left = [text for pid in pids - known if (text := command_line(pid))]
        if agent.poll() is None and not cut:
            left.append("torchrun")
        if not left or time.monotonic() > deadline:
            return left
        time.sleep(0.05)


def command_line(pid: int) -> str:
    """Return the command line of a process; empty if it has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")[:200]
    except OSError:
        return ""


def main(link: str, where: str, *program: str) -> int:
    """Run the program on both hosts; return the first host's exit code."""
    folder = Path(where)
    hosts = two_hosts()
    if link == "slow":
        # The second one first: for a moment both are called the same, here.
        join_by_wire((hosts[1], hosts[0]))
    else:
        join_by_veth(hosts)
    agents = [host.torchrun(folder, list(program)) for host in hosts]
    cut = folder / "cut"
    while agents[0].poll() is None:
        time.sleep(0.05)
        if cut.exists():
            hosts[1].ip("link", "set", "link0", "down")
            cut.rename(folder / "was-cut")
    left = wait_for_the_others(
        agents[1], hosts[1].holder, (folder / "was-cut").exists()
    )
    if left:
        print("the second host goes on:", *left, sep="\n  ")
    print(*(agent.poll() for agent in agents))
    return agents[0].returncode


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
