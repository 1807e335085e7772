"""Linux machines over ssh, with paramiko: `ssh://USER@HOST:PORT`.

Keys are this agent's own, below `$NAS_HOME/keys`: `known_hosts` holds the host keys that were pinned, and
`id_ed25519`, where it is there, is the only key that is offered; else those of ssh-agent and of `~/.ssh`.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import paramiko
from paramiko.ssh_exception import (
    AuthenticationException,
    BadHostKeyException,
    IncompatiblePeer,
    NoValidConnectionsError,
    SSHException,
)

from nas.core import paths
from nas.core.durable import locked
from nas.core.errors import InfrastructureFailed, InvalidInput, Unsupported
from nas.devices.transports.base import STDERR_TAIL, NotTrusted
from nas.devices.transports.shell import ShellTransport
from nas.devices.transports.wire import CONNECT_S, SILENT_S, Stream, open_socket

# What goes wrong is raised; its own lines would be noise in an agent's log.
logging.getLogger("paramiko").setLevel(logging.CRITICAL)

_CIPHERS = ("aes128-gcm@openssh.com", "aes256-gcm@openssh.com", "aes256-ctr", "aes128-ctr")
"""GCM first: it carries a fifth more than counter mode with its separate digest."""

_WINDOW, _PACKET = 16 << 20, 1 << 17
_CHUNK = 1 << 16


def connect(address: str, cache: Path) -> ShellTransport:
    """The transport of the machine at `address`.

    Raises:
        InvalidInput: not of the form `ssh://USER@HOST[:PORT]`.
    """
    return ShellTransport(SshWire(SshAddress.parse(address), paths.home() / "keys"))


@dataclass(frozen=True, slots=True)
class SshAddress:
    """Where to log in."""

    user: str
    host: str
    port: int

    @classmethod
    def parse(cls, text: str) -> SshAddress:
        """Reads `ssh://USER@HOST[:PORT]`.

        Raises:
            InvalidInput: another form, or a password in it.
        """
        try:
            parts = urlsplit(text)
            user, host, port = parts.username, parts.hostname, parts.port or 22
        except ValueError as error:
            raise InvalidInput(f"device address {text!r}: {error}") from error
        if parts.scheme != "ssh" or not (user and host) or parts.password or parts.path.strip("/") or parts.query:
            raise InvalidInput(f"device address {text!r}: ssh://USER@HOST or ssh://USER@HOST:PORT is wanted")
        return cls(user, host, port)

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"ssh://{self.user}@{host}:{self.port}"

    @property
    def known_as(self) -> str:
        """The name in `known_hosts`."""
        return self.host if self.port == 22 else f"[{self.host}]:{self.port}"


def host_key(address: SshAddress) -> paramiko.PKey:
    """The key that the machine shows now, for a person to compare and `pin`.

    Raises:
        InfrastructureFailed: it cannot be reached.
    """
    with _errors_of(str(address)), _transport(open_socket(address.host, address.port)) as transport:
        transport.start_client(timeout=CONNECT_S)
        return transport.get_remote_server_key()


def pinned_fingerprints(address: SshAddress, keys: Path) -> list[str]:
    """Fingerprints, `SHA256:...`, of the keys that are trusted for the machine: one for each type of key."""
    known = _known_hosts(keys).lookup(address.known_as)
    return [key.fingerprint for key in known.values()] if known else []


def pin(address: SshAddress, key: paramiko.PKey | None, keys: Path) -> None:
    """Trusts `key`, and no other, for the machine at `address` from now on; None: none.

    Args:
        address: the machine.
        key: of `host_key`.
        keys: folder of `known_hosts`.
    """
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
    path = keys / "known_hosts"
    return paramiko.HostKeys(str(path) if path.exists() else None)


class SshWire:
    """See `Wire`.

    Args:
        address: the machine.
        keys: folder of the agent's keys.
    """

    folder = ".cache/hilnas"

    def __init__(self, address: SshAddress, keys: Path) -> None:
        self.name = str(address)
        self._address, self._keys = address, keys
        self._client: paramiko.SSHClient | None = None
        self._files: paramiko.SFTPClient | None = None

    def connect(self) -> None:
        """See `Wire.connect`."""
        if self._client is not None and _active(self._client):
            return
        self.close()
        client = paramiko.SSHClient()
        client.set_missing_host_key_policy(_Refuse(self._keys / "known_hosts"))
        if (self._keys / "known_hosts").exists():
            client.load_host_keys(str(self._keys / "known_hosts"))
        with contextlib.ExitStack() as on_failure:
            on_failure.callback(client.close)
            with _errors_of(self.name):
                self._log_in(client)
            on_failure.pop_all()
        self._client = client

    def _log_in(self, client: paramiko.SSHClient) -> None:
        own = self._keys / "id_ed25519"
        client.connect(
            self._address.host,
            self._address.port,
            self._address.user,
            sock=open_socket(self._address.host, self._address.port),
            key_filename=str(own) if own.exists() else None,
            allow_agent=not own.exists(),
            look_for_keys=not own.exists(),
            banner_timeout=CONNECT_S,
            auth_timeout=CONNECT_S,
            channel_timeout=CONNECT_S,
            transport_factory=_transport,
        )
        transport = client.get_transport()
        assert transport is not None
        transport.set_keepalive(SILENT_S // 3)

    def close(self) -> None:
        """See `Wire.close`."""
        if self._client is not None:
            self._client.close()
        self._client = self._files = None

    @property
    def cipher(self) -> str:
        """What encrypts the way there; wants a connection."""
        return str(self._transport().local_cipher)

    def start(self, command: str) -> Stream:
        """See `Wire.start`."""
        with _errors_of(self.name):
            channel = self._transport().open_session(_WINDOW, _PACKET, CONNECT_S)
            channel.settimeout(SILENT_S)
            channel.exec_command(command)
        return _ChannelStream(channel, self.name)

    def put(self, local: Path, remote: str) -> None:
        """See `Wire.put`."""
        with _errors_of(self.name):
            self._sftp().put(str(local), remote)

    def _sftp(self) -> paramiko.SFTPClient:
        if self._files is None:
            try:
                self._files = paramiko.SFTPClient.from_transport(self._transport(), _WINDOW, _PACKET)
            except SSHException as error:
                if self._transport().is_active():
                    raise Unsupported(f"{self.name}: no SFTP there: {error}") from error
                raise
            assert self._files is not None
            channel = self._files.get_channel()
            assert channel is not None
            channel.settimeout(SILENT_S)
        return self._files

    def _transport(self) -> paramiko.Transport:
        transport = self._client.get_transport() if self._client else None
        if transport is None:
            raise InfrastructureFailed(f"{self.name}: not connected")
        return transport


class _ChannelStream:
    """See `Stream`. Scripts send their errors to standard output: what comes as errors is the login shell's."""

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
            # The command did not even start; the reason is worth telling.
            piece, self._errors = self._errors, b""
        self._silent = self._silent and not piece
        return piece

    def write(self, data: bytes) -> None:
        with _errors_of(self._name):
            self._channel.settimeout(SILENT_S)
            self._channel.sendall(data)

    def close(self) -> None:
        self._channel.close()


class _Refuse(paramiko.MissingHostKeyPolicy):
    """Nothing is trusted on first use."""

    def __init__(self, known_hosts: Path) -> None:
        self._known_hosts = known_hosts

    def missing_host_key(self, client: paramiko.SSHClient, hostname: str, key: paramiko.PKey) -> None:
        raise NotTrusted(f"{hostname} shows the key {key.fingerprint}, which is not pinned in {self._known_hosts}")


def _transport(sock: Any, /, **options: Any) -> paramiko.Transport:
    transport = paramiko.Transport(sock, default_window_size=_WINDOW, default_max_packet_size=_PACKET, **options)
    transport.get_security_options().ciphers = _CIPHERS
    return transport


def _active(client: paramiko.SSHClient) -> bool:
    transport = client.get_transport()
    return transport is not None and transport.is_active()


@contextlib.contextmanager
def _errors_of(name: str) -> Iterator[None]:
    """Paramiko's errors as ours."""
    try:
        yield
    except BadHostKeyException as error:
        told = f"the pinned key is {error.expected_key.fingerprint}, it shows {error.key.fingerprint}"
        raise NotTrusted(f"{name}: another machine, or its host key changed: {told}") from error
    except AuthenticationException as error:
        raise NotTrusted(f"{name}: no key of this agent is accepted: {error}") from error
    except IncompatiblePeer as error:
        raise Unsupported(f"{name}: no cipher or key type in common: {error}") from error
    except (SSHException, NoValidConnectionsError, OSError, EOFError) as error:
        raise InfrastructureFailed(f"{name}: {error or type(error).__name__}") from error
