"""Two hosts on one machine: network namespaces joined by a cable of limited rate. Needs root, and iproute2 on Linux."""

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

NAMES = ("egeria-a", "egeria-b")
ADDRESSES = ("10.77.0.1", "10.77.0.2")


@dataclass(frozen=True, kw_only=True, slots=True)
class Host:
    """Where a process runs, and how it is reached."""

    prefix: tuple[str, ...]
    """What stands before its command."""
    address: str
    interface: str


LOCAL = Host(prefix=(), address="127.0.0.1", interface="lo")


def why_not() -> str | None:
    """Return why there can be no two hosts here; None if there can."""
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if missing:
        return f"two hosts need {' and '.join(missing)} of iproute2, which is not installed"
    if os.geteuid() != 0:
        return "two hosts need root, to make network namespaces"
    tried = subprocess.run(["ip", "netns", "add", "egeria-try"], capture_output=True, text=True, check=False)
    subprocess.run(["ip", "netns", "del", "egeria-try"], capture_output=True, check=False)
    return tried.stderr.strip() or None


@contextmanager
def two_hosts(rate_mbit: int | None) -> Iterator[tuple[Host, Host]]:
    """Make two hosts joined by a cable, and take both away afterwards.

    Args:
        rate_mbit: what the cable carries in each direction, in Mbit/s; None for no limit.
    """
    _remove()
    cables = tuple(f"veth-{name[-1]}" for name in NAMES)
    try:
        for name in NAMES:
            _run("ip", "netns", "add", name)
        _run("ip", "link", "add", cables[0], "type", "veth", "peer", "name", cables[1])
        for name, cable, address in zip(NAMES, cables, ADDRESSES, strict=True):
            _run("ip", "link", "set", cable, "netns", name)
            _run("ip", "-n", name, "addr", "add", f"{address}/24", "dev", cable)
            _run("ip", "-n", name, "link", "set", cable, "up")
            _run("ip", "-n", name, "link", "set", "lo", "up")
            if rate_mbit is not None:
                limit = ("rate", f"{rate_mbit}mbit", "burst", "256kb", "latency", "50ms")
                _run("tc", "-n", name, "qdisc", "add", "dev", cable, "root", "tbf", *limit)
        yield tuple(  # type: ignore[misc]
            Host(prefix=("ip", "netns", "exec", name), address=address, interface=cable)
            for name, cable, address in zip(NAMES, cables, ADDRESSES, strict=True)
        )
    finally:
        _remove()


def _remove() -> None:
    for name in NAMES:
        subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)


def _run(*command: str) -> None:
    subprocess.run(command, capture_output=True, text=True, check=True)
