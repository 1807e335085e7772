"""`nas device add` and `remove`: the devices that are attached to this host."""

from __future__ import annotations

import re
import sys
from typing import Annotated

import typer

from nas.cli.output import JsonFlag, print_fields, print_json, say
from nas.core import paths
from nas.core.cores import parse_cores, show_cores
from nas.core.device import Device
from nas.core.errors import InvalidInput
from nas.devices.attachments import LOCAL, TAG, Attachment, open_transport, scheme_of
from nas.devices.find import find
from nas.devices.host import own_attachments
from nas.devices.places import agent_cache
from nas.devices.transports.base import NotTrusted
from nas.devices.transports.ssh import SshAddress, host_key, pin, pinned_fingerprints


def add(
    address: Annotated[
        str, typer.Argument(metavar="ADDRESS", help="ssh://USER@HOST[:PORT], adb:SERIAL or adb:HOST:PORT.")
    ],
    tag: Annotated[
        list[str] | None, typer.Option("--tag", help="A name for spaces: tag:NAME. May be repeated.")
    ] = None,
    cores: Annotated[str | None, typer.Option("--cores", help="Measure on these only, such as 4-7.")] = None,
    trusted: Annotated[
        str | None, typer.Option("--host-key", help="Fingerprint, SHA256:..., that the ssh machine must show.")
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Trust the ssh host key that is shown.")] = False,
    json: JsonFlag = False,
) -> None:
    """Attach a device to this host: look at it, and serve it from now on.

    A launch on this host measures on it, and so does `nas agent run` here, within seconds, for its coordinator.
    """
    if address == LOCAL:
        raise InvalidInput("this machine needs no adding: launches measure on it, and 'nas agent run --this-machine'")
    if scheme_of(address) == "ssh":
        address = str(SshAddress.parse(address))
        _trust(SshAddress.parse(address), trusted, yes)
    wanted = Attachment(address=address, tags=_tags(tag or []), cores=parse_cores(cores) if cores else ())
    device = _look(wanted)
    own_attachments().add(wanted.model_copy(update={"id": device.id}))
    if json:
        print_json({"address": address, "device": device.model_dump(mode="json")})
    else:
        print_fields(_described(address, device))


def remove(
    name: Annotated[str, typer.Argument(metavar="ADDRESS|ID", help="The device, as it was added or by its id.")],
) -> None:
    """Detach a device from this host: it is served no more, and its ssh host key is forgotten.

    A running job is finished first. What was measured stays.
    """
    gone = own_attachments().remove(name)
    if gone.address.startswith("ssh:"):
        pin(SshAddress.parse(gone.address), None, paths.home() / "keys")
    say(f"{gone.address} is detached" + (f"; it was device {gone.id}" if gone.id else ""))


def _look(wanted: Attachment) -> Device:
    transport = open_transport(wanted.address, agent_cache())
    try:
        return find(wanted, transport).device
    finally:
        transport.close()


def _trust(address: SshAddress, wanted: str | None, yes: bool) -> None:
    """Pins the machine's host key, after somebody said that it is the right one."""
    keys = paths.home() / "keys"
    shown, pinned = host_key(address), pinned_fingerprints(address, keys)
    told = f"{address} shows the host key {shown.fingerprint} ({shown.get_name()})"
    if wanted is not None and wanted != shown.fingerprint:
        raise NotTrusted(f"{told}, not {wanted}: another machine, or somebody stands in between")
    if shown.fingerprint in pinned:
        return
    if wanted is None and pinned:
        raise NotTrusted(
            f"{told}, but {' and '.join(pinned)} is pinned: another machine, or its key was changed. If it was, say so "
            f"with --host-key {shown.fingerprint}"
        )
    say(told)
    if wanted is None and not yes:
        _ask(address, shown.fingerprint)
    pin(address, shown, keys)


def _ask(address: SshAddress, fingerprint: str) -> None:
    if not sys.stdin.isatty():
        raise InvalidInput(
            f"is that {address.host}'s key? Compare (there: ssh-keygen -lf /etc/ssh/ssh_host_ed25519_key.pub), then "
            f"give --host-key {fingerprint}, or --yes to trust it as it is"
        )
    if not typer.confirm(f"Is that {address.host}'s key?", err=True):
        raise NotTrusted(f"{address} was not added")


def _tags(given: list[str]) -> tuple[str, ...]:
    for tag in given:
        if not re.fullmatch(TAG, tag):
            raise InvalidInput(f"{tag!r}: up to 32 letters, digits and ._- are wanted", where="--tag")
    return tuple(dict.fromkeys(given))


def _described(address: str, device: Device) -> list[tuple[str, object]]:
    chosen = show_cores(device.pinned_to) if device.pinned_to else None
    return [
        ("device", device.id),
        ("address", address),
        ("model", device.model),
        ("SoC", device.soc),
        ("cpu", device.cpu),
        ("cores", f"{device.cores}, measured on {chosen}" if chosen else device.cores),
        ("memory", f"{device.memory_mb} MB"),
        ("os", device.os),
        ("runners", device.target),
        ("energy", device.energy_counter),
        ("tags", ", ".join(device.tags) or None),
    ]
