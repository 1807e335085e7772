"""How much an ssh server may say before paramiko looks at it: paramiko itself takes any length at its word."""

from __future__ import annotations

from paramiko.packet import Packetizer
from paramiko.ssh_exception import SSHException

LARGEST_PACKET = 1 << 20
"""Bytes; RFC 4253 section 6.1 asks for 35,000, OpenSSH sends up to 256 KiB."""

LONGEST_BANNER = 1 << 16
"""Bytes of all lines before the server's version."""


class BoundedPackets(Packetizer):
    """Ends a connection whose other side announces too much. Lengths are not encrypted: anybody on the way can."""

    _banner = 0

    def read_all(self, n: int, check_rekey: bool = False) -> bytes:
        """See `Packetizer.read_all`."""
        if n > LARGEST_PACKET:
            raise SSHException(f"a packet of {n} bytes is announced")
        return super().read_all(n, check_rekey)

    def _read_timeout(self, timeout: float) -> bytes:
        """Part of the banner, which comes before all packets."""
        piece: bytes = super()._read_timeout(timeout)  # type: ignore[misc]
        self._banner += len(piece)
        if self._banner > LONGEST_BANNER:
            raise SSHException("a banner without end")
        return piece
