"""Under which names and addresses a server is reached."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Sequence

import psutil

_LOOPBACK = ("localhost", "127.0.0.1", "::1")
_WILDCARDS = ("0.0.0.0", "::")
_FAMILIES = (socket.AF_INET, socket.AF_INET6)


def names_of(host: str, more: Sequence[str] = ()) -> list[str]:
    """What the certificate of a server that listens on `host` must be good for: `more`, and what its host means."""
    if host in _WILDCARDS:
        return [*more, socket.gethostname(), *_LOOPBACK, *own_addresses()]
    return [*more, *(_LOOPBACK if host in _LOOPBACK else (host,))]


def url_of(host: str, port: int, more: Sequence[str] = ()) -> str:
    """The URL that others are told: with the first of `more`, else an address that other machines can reach."""
    if more:
        shown = more[0]
    elif host in _WILDCARDS:
        shown = next((each for each in own_addresses() if each not in _LOOPBACK), "localhost")
    else:
        shown = host
    return f"https://[{shown}]:{port}" if ":" in shown else f"https://{shown}:{port}"


def own_addresses() -> list[str]:
    """Of this machine's interfaces, IPv4 first. Link-local ones are left out: they mean something on one wire only."""
    every = {each.address for cards in psutil.net_if_addrs().values() for each in cards if each.family in _FAMILIES}
    parsed = [ipaddress.ip_address(address) for address in every if "%" not in address]
    return [str(each) for each in sorted(parsed, key=lambda each: (each.version, int(each))) if not each.is_link_local]
