"""Linux machines over ssh, with paramiko: `ssh://USER@HOST:PORT`.

Keys are this agent's own, in `$NAS_HOME/keys`: `known_hosts` holds the pinned host keys, and `id_ed25519`, if it
exists, is the only key that is offered; otherwise those of ssh-agent and of `~/.ssh`.
"""

from __future__ import annotations

import contextlib
import logging
import re
import struct
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import paramiko
from cryptography.exceptions import UnsupportedAlgorithm
from paramiko.hostkeys import InvalidHostKey
from paramiko.packet import Packetizer
from paramiko.pkey import UnknownKeyType
from paramiko.ssh_exception import (
    AuthenticationException,
    BadHostKeyException,
    ChannelException,
    IncompatiblePeer,
    NoValidConnectionsError,
    SSHException,
)

from nas.core import paths
from nas.core.durable import locked
from nas.core.errors import InfrastructureFailed, InvalidInput, Unsupported
from nas.measure.devices.transports.base import STDERR_TAIL, NotTrusted
from nas.measure.devices.transports.shell import ShellTransport
from nas.measure.devices.transports.wire import CONNECT_S, SILENT_S, Stream, open_socket

# Errors are raised; paramiko's own log lines would be noise.
logging.getLogger("paramiko").setLevel(logging.CRITICAL)

_CIPHERS = ("aes128-gcm@openssh.com", "aes256-gcm@openssh.com", "aes256-ctr", "aes128-ctr")
"""GCM first: it is a fifth faster than counter mode with its separate digest."""

_HOST = re.compile(r"[\w.:%-]+", re.ASCII)
"""Names and addresses: no character that has a meaning in `known_hosts`."""

_WINDOW = 16 << 20
_PACKET = 1 << 17
_CHUNK = 1 << 16
_PAUSES_S = (0.02, 0.1, 0.5, 2.0, 0.0)
"""After each refusal of a session."""


def connect(address: str, cache: Path) -> ShellTransport:
    """Returns the transport of the machine at `address`, `ssh://USER@HOST[:PORT]`."""
    return ShellTransport(SshWire(SshAddress.parse(address), paths.home() / "keys"))


@dataclass(frozen=True, slots=True)
class SshAddress:
    """Login address."""

    user: str
    host: str
    port: int

    @classmethod
    def parse(cls, text: str) -> SshAddress:
        """Parses `ssh://USER@HOST[:PORT]`.

        Raises:
            InvalidInput: another form, or a password in it.
        """
        try:
            parts = urlsplit(text)
            user, host, port = parts.username, parts.hostname, parts.port or 22
        except ValueError as error:
            raise InvalidInput(f"device address {text!r}: {error}") from error
        more = parts.password or parts.path.strip("/") or parts.query
        if parts.scheme != "ssh" or more or not (user and host and _HOST.fullmatch(host)):
            raise InvalidInput(f"device address {text!r}: ssh://USER@HOST or ssh://USER@HOST:PORT is expected")
        return cls(user, host, port)

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"ssh://{self.user}@{host}:{self.port}"

    @property
    def known_as(self) -> str:
        """Returns the name in `known_hosts`."""
        return self.host if self.port == 22 else f"[{self.host}]:{self.port}"


def host_key(address: SshAddress) -> paramiko.PKey:
    """Fetches the key that the machine presents now, for a person to compare and `pin`."""
    with _errors_of(str(address)), _transport(open_socket(address.host, address.port)) as transport:
        transport.start_client(timeout=CONNECT_S)
        return transport.get_remote_server_key()


def pinned_fingerprints(address: SshAddress, keys: Path) -> list[str]:
    """Returns fingerprints, `SHA256:...`, of the keys that are trusted for the machine: one per key type."""
    host_keys = _known_hosts(keys).lookup(address.known_as)
    return [key.fingerprint for key in host_keys.values()] if host_keys else []


def pin(address: SshAddress, key: paramiko.PKey | None, keys: Path) -> None:
    """Trusts `key` (of `host_key`), and no other, for the machine at `address` from now on; None: no key."""
    keys.mkdir(mode=0o700, parents=True, exist_ok=True)
    with locked(keys / "known_hosts.lock"):
        pinned = _known_hosts(keys)
        while address.known_as in pinned:  # an entry for each type of key
            del pinned[address.known_as]
        if key is not None:
            pinned.add(address.known_as, key.get_name(), key)
        temporary = keys / ".known_hosts.new"
        pinned.save(str(temporary))
        temporary.replace(keys / "known_hosts")


def _known_hosts(keys: Path) -> paramiko.HostKeys:
    """Returns the pinned keys.

    Raises:
        NotTrusted: the file is damaged.
    """
    path = keys / "known_hosts"
    try:
        return paramiko.HostKeys(str(path) if path.exists() else None)
    except (SSHException, InvalidHostKey, ValueError, TypeError, LookupError, struct.error) as error:
        line = f"the line {error.line.strip()[:60]!r}" if isinstance(error, InvalidHostKey) else str(error)
        raise NotTrusted(f"{path} is damaged: {line}; remove what is not a line of OpenSSH's known_hosts") from error


class SshWire:
    """A `Wire` over ssh.

    Args:
        address: the machine.
        keys: folder of the agent's keys.
    """

    folder = ".cache/hilnas"

    def __init__(self, address: SshAddress, keys: Path) -> None:
        self.name = str(address)
        self._address, self._keys = address, keys
        self._client: paramiko.SSHClient | None = None

    def connect(self) -> None:
        if self._client is not None and _active(self._client):
            return
        self.close()
        client = paramiko.SSHClient()
        client.set_missing_host_key_policy(_Refuse(self._keys / "known_hosts"))
        client.get_host_keys().update(_known_hosts(self._keys))
        with contextlib.ExitStack() as on_failure:
            on_failure.callback(client.close)
            key = self._key()
            with _errors_of(self.name):
                try:
                    self._log_in(client, key)
                except AuthenticationException as error:
                    raise NotTrusted(
                        f"{self.name}: no key is accepted ({error}); this agent's is {self._key_file}"
                    ) from error
                except (SSHException, EOFError) as error:
                    transport = client.get_transport()
                    if key is not None or transport is None or not transport.initial_kex_done:
                        raise
                    raise NotTrusted(
                        f"{self.name}: hung up while keys of ssh-agent and ~/.ssh were tried ({error}), maybe because "
                        f"they are too many for it; put the right one, without a passphrase, into {self._key_file}"
                    ) from error
            on_failure.pop_all()
        self._client = client

    @property
    def _key_file(self) -> Path:
        return self._keys / "id_ed25519"

    def _key(self) -> paramiko.PKey | None:
        """Returns this agent's key; None where it has none.

        Raises:
            NotTrusted: the file is no key that can be used.
        """
        if not self._key_file.exists():
            return None
        try:
            return paramiko.PKey.from_path(self._key_file)
        except (ValueError, TypeError, UnsupportedAlgorithm, SSHException, UnknownKeyType, OSError) as error:
            raise NotTrusted(
                f"{self._key_file} is no private key without a passphrase ({error}); "
                f"make one: ssh-keygen -t ed25519 -N '' -f {self._key_file}"
            ) from error

    def _log_in(self, client: paramiko.SSHClient, key: paramiko.PKey | None) -> None:
        client.connect(
            self._address.host,
            self._address.port,
            self._address.user,
            sock=open_socket(self._address.host, self._address.port),
            pkey=key,
            allow_agent=key is None,
            look_for_keys=key is None,
            timeout=CONNECT_S,
            banner_timeout=CONNECT_S,
            auth_timeout=CONNECT_S,
            channel_timeout=CONNECT_S,
            transport_factory=_transport,
        )
        transport = client.get_transport()
        assert transport is not None
        transport.set_keepalive(SILENT_S // 3)

    def close(self) -> None:
        if self._client is not None:
            self._client.close()
        self._client = None

    def start(self, command: str) -> Stream:
        with _errors_of(self.name):
            channel = self._session()
            channel.settimeout(SILENT_S)
            channel.exec_command(command)
        return _ChannelStream(channel, self.name)

    def _session(self) -> paramiko.Channel:
        """Opens a session. The last one may not have ended there yet, and sshd may allow one at a time."""
        for pause_s in _PAUSES_S:
            try:
                return self._transport().open_session(_WINDOW, _PACKET, CONNECT_S)
            except ChannelException as error:
                refusal = error
                time.sleep(pause_s)
        raise InfrastructureFailed(
            f"{self.name}: its sshd refuses a session ({refusal.text}): MaxSessions of its sshd_config is 0?"
        ) from refusal

    def _transport(self) -> paramiko.Transport:
        transport = self._client.get_transport() if self._client else None
        if transport is None:
            raise InfrastructureFailed(f"{self.name}: not connected")
        return transport


class _ChannelStream:
    """A `Stream` of a command. Scripts write errors to standard output; stderr is the login shell's."""

    def __init__(self, channel: paramiko.Channel, name: str) -> None:
        self._channel, self._name = channel, name
        self._silent, self._errors = True, b""

    def read(self, timeout_s: float) -> bytes | None:
        with _errors_of(self._name):
            self._channel.settimeout(timeout_s)
            try:
                piece = self._channel.recv(_CHUNK)
            except TimeoutError:
                piece = None
            if self._channel.recv_stderr_ready():
                self._errors = (self._errors + self._channel.recv_stderr(_CHUNK))[-STDERR_TAIL:]
        if piece == b"" and self._silent:
            # The command did not even start: report the reason.
            piece, self._errors = self._errors, b""
        self._silent = self._silent and not piece
        return piece

    def write(self, data: bytes) -> None:
        with _errors_of(self._name):
            self._channel.settimeout(SILENT_S)
            self._channel.sendall(data)

    def close(self) -> None:
        with contextlib.suppress(SSHException, OSError, EOFError):  # of a connection that is lost already
            self._channel.close()


class _Refuse(paramiko.MissingHostKeyPolicy):
    """Trusts nothing on first use."""

    def __init__(self, known_hosts: Path) -> None:
        self._known_hosts = known_hosts

    def missing_host_key(self, client: paramiko.SSHClient, hostname: str, key: paramiko.PKey) -> None:
        raise NotTrusted(f"{hostname} shows the key {key.fingerprint}, which is not pinned in {self._known_hosts}")


class _Transport(paramiko.Transport):
    """Asks nobody: paramiko would prompt on this process's terminal for a second factor."""

    def auth_interactive_dumb(self, *args: Any, **options: Any) -> list[str]:
        raise AuthenticationException("it asks for more than a key")


def _transport(sock: Any, /, **options: Any) -> paramiko.Transport:
    transport = _Transport(
        sock,
        default_window_size=_WINDOW,
        default_max_packet_size=_PACKET,
        packetizer_class=BoundedPackets,
        **options,
    )
    transport.get_security_options().ciphers = _CIPHERS
    return transport


def _active(client: paramiko.SSHClient) -> bool:
    transport = client.get_transport()
    return transport is not None and transport.is_active()


@contextlib.contextmanager
def _errors_of(name: str) -> Iterator[None]:
    """Converts paramiko's errors to ours."""
    try:
        yield
    except BadHostKeyException as error:
        keys = f"the pinned key is {error.expected_key.fingerprint}, it shows {error.key.fingerprint}"
        raise NotTrusted(f"{name}: another machine, or its host key changed: {keys}") from error
    except IncompatiblePeer as error:
        raise Unsupported(f"{name}: no cipher or key type in common: {error}") from error
    except (SSHException, NoValidConnectionsError, OSError, EOFError, ValueError) as error:
        raise InfrastructureFailed(f"{name}: {error or type(error).__name__}") from error


LARGEST_PACKET = 1 << 20
"""Bytes; RFC 4253 section 6.1 asks for 35,000, OpenSSH sends up to 256 KiB."""

LONGEST_BANNER = 1 << 16
"""Bytes of all lines before the server's version."""


class BoundedPackets(Packetizer):
    """Drops a connection that announces too much: lengths are not encrypted, and paramiko accepts any."""

    _banner = 0

    def read_all(self, n: int, check_rekey: bool = False) -> bytes:
        if n > LARGEST_PACKET:
            raise SSHException(f"a packet of {n} bytes is announced")
        return super().read_all(n, check_rekey)

    def _read_timeout(self, timeout: float) -> bytes:
        """Reads part of the banner, which precedes all packets."""
        piece: bytes = super()._read_timeout(timeout)  # type: ignore[misc]
        self._banner += len(piece)
        if self._banner > LONGEST_BANNER:
            raise SSHException("an endless banner")
        return piece
