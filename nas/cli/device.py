"""`nas device`: attach devices to this host; list, show and manage the devices of a database or coordinator.

A device host may have no database packages, so commands that need them import them when they run.
"""

from __future__ import annotations

import re
import sys
from contextlib import closing
from typing import TYPE_CHECKING, Annotated, Any

import typer

from nas.cli.lazy import command_app
from nas.cli.options import DatabaseOption
from nas.cli.output import JsonFlag, print_fields, print_json, print_table, say, when
from nas.cli.remote import Fleet, ServerOption, open_fleet
from nas.core import paths
from nas.core.device import GPU_FEATURES, MOST_TAGS, Device, parse_cores, show_cores
from nas.core.errors import InvalidInput, UnknownName
from nas.core.units import parse_duration, show_number, show_share
from nas.measure.devices.agent.connection import find
from nas.measure.devices.attachments import (
    LOCAL,
    TAG,
    Attachment,
    agent_cache,
    open_transport,
    own_attachments,
    scheme_of,
)
from nas.measure.devices.describe import ISA_FEATURES
from nas.measure.devices.transports.base import NotTrusted
from nas.measure.devices.transports.ssh import SshAddress, host_key, pin, pinned_fingerprints

if TYPE_CHECKING:
    from nas.serve.api.devices import DeviceOrder


app = command_app(help="Attach, list, show and manage devices.")

DeviceArgument = Annotated[str, typer.Argument(metavar="DEVICE", help="Device id, tag:NAME or local.")]
ReasonOption = Annotated[str, typer.Option("--reason", help="Reason, shown with the device.")]

_ORDERS: dict[DeviceOrder, str] = {
    "check": "Require a new health check before the device is used again.",
    "drain": "Let a device finish its current job and accept no other.",
    "resume": "Resume a drained device.",
    "quarantine": "Exclude a device from all work until it is released.",
    "release": "Return a quarantined, unhealthy or retired device to service after a health check.",
}


@app.command("list")
def list_devices(server: ServerOption = None, db: DatabaseOption = None, json: JsonFlag = False) -> None:
    """List devices with their state and health.

    Devices attached to this host but not served yet have state "attached".
    """
    attached = own_attachments().read() if server is None else ()
    registered = _registered(server, db, any_attached=bool(attached))
    ids = {device["id"] for device in registered["devices"]}
    waiting = [attachment for attachment in attached if attachment.id not in ids]
    if json:
        extra = {"attached": [attachment.model_dump(mode="json") for attachment in waiting]} if waiting else {}
        print_json(registered | extra)
        return
    columns = (
        *("device", "name", "state", "health", "condition", "used by", "reserved", "waiting"),
        *("model", "agent", "tags", "note", "last seen"),
    )
    rows = [
        [one.id, None, "attached", *[None] * 5, one.address, None, " ".join(one.tags), None, "never"] for one in waiting
    ]
    print_table(columns, [*(_list_row(device) for device in registered["devices"]), *rows])
    if waiting:
        say("attached devices are served by the next 'nas launch', 'nas bench' or 'nas agent run' on this host")


@app.command()
def show(
    device: DeviceArgument, server: ServerOption = None, db: DatabaseOption = None, json: JsonFlag = False
) -> None:
    """Show a device with its lease, calibrations, history and latest jobs."""
    with open_fleet(server, db) as fleet:
        entry = fleet.device(_id(fleet, device))
    if json:
        print_json(entry)
        return
    print_fields(_device_fields(entry))
    if entry["calibrations"]:
        typer.echo()
        rows = [
            [*_calibrated(calibration), show_number(calibration["reference_ms"]), when(calibration["created"])]
            for calibration in entry["calibrations"]
        ]
        print_table(("runtime", "build", "calibration", "reference [ms]", "measured"), rows)
    if entry["drift"]:
        typer.echo()
        heads = ("runtime", "build", "calibration", "runs", "off its calibration")
        print_table(heads, [_drift_row(drift) for drift in entry["drift"]])
    if entry["history"]:
        typer.echo()
        rows = [[when(event["at"]), event["kind"], event["what"], event["reason"]] for event in entry["history"]]
        print_table(("at", "what", "", "reason"), rows)
    if entry["jobs"]:
        typer.echo()
        columns = ("job", "kind", "study", "trial", "state", "updated", "message")
        print_table(columns, [_job_row(job) for job in entry["jobs"]])


@app.command()
def add(
    address: Annotated[
        str,
        typer.Argument(
            metavar="ADDRESS",
            help="ssh://USER@HOST[:PORT], adb:SERIAL, adb:HOST:PORT, adb:usb:SERIAL, or local with --isa, --gpu or"
            " --threads.",
        ),
    ],
    tag: Annotated[list[str] | None, typer.Option("--tag", help="Tag, used in spaces as tag:NAME. Repeatable.")] = None,
    cores: Annotated[str | None, typer.Option("--cores", help="Measure on these cores only, such as 4-7.")] = None,
    isa: Annotated[
        str | None,
        typer.Option("--isa", help=f"Restrict this machine to the instructions of {', '.join(ISA_FEATURES)}."),
    ] = None,
    gpu: Annotated[
        str | None, typer.Option("--gpu", help=f"Compute on this machine's GPU: {', '.join(GPU_FEATURES)}.")
    ] = None,
    threads: Annotated[
        int | None,
        typer.Option("--threads", min=1, max=1024, help="Run every workload on this machine with so many threads."),
    ] = None,
    trusted: Annotated[
        str | None, typer.Option("--host-key", help="Expected fingerprint of the ssh host key, SHA256:....")
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Trust the ssh host key without asking.")] = False,
    json: JsonFlag = False,
) -> None:
    """Attach a device to this host.

    `nas launch` and `nas bench` on this host can then measure on it; a running `nas agent run` serves it within
    seconds. `local --isa x86-64-v3` adds this machine as one with older instructions: runtimes whose builds fix the
    kernels (llama.cpp) are measured as an older processor would run them. `local --threads 2` adds it as one that
    runs every workload with two threads, `local --gpu vulkan` as one whose GPU computes everything.
    """
    if address == LOCAL and not (isa or gpu or threads):
        raise InvalidInput("no need to add this machine: launches use it, and 'nas agent run --this-machine' serves it")
    for option, value in (("--isa", isa), ("--gpu", gpu), ("--threads", threads)):
        if value is not None and address != LOCAL:
            form = f"nas device add local {option} {value}"
            raise InvalidInput(f"is of this machine only: {form}", where=option)
    if isa is not None and isa not in ISA_FEATURES:
        raise UnknownName("instruction set", isa, ISA_FEATURES, where="--isa")
    if gpu is not None and gpu not in GPU_FEATURES:
        raise UnknownName("kind of GPU", gpu, GPU_FEATURES, where="--gpu")
    if address == LOCAL:
        address = ":".join(filter(None, (LOCAL, isa, gpu, f"threads={threads}" if threads else None)))
    tags, chosen = _tags(tag or []), parse_cores(cores) if cores else ()
    if scheme_of(address) == "ssh":
        address = str(SshAddress.parse(address))
        _trust(SshAddress.parse(address), trusted, yes)
    attachment = Attachment(address=address, tags=tags, cores=chosen)
    with closing(open_transport(attachment.address, agent_cache())) as transport:
        device = find(attachment, transport).device
    own_attachments().add(attachment.model_copy(update={"id": device.id}))
    if json:
        print_json({"address": address, "device": device.model_dump(mode="json")})
    else:
        print_fields(_attached_fields(address, device))
        name = f"tag:{device.tags[0]}" if device.tags else device.id
        say(f"attached; next: nas bench LAYOUT --device {name}, or in a space file: devices: [{name!r}]")


@app.command()
def remove(
    name: Annotated[str, typer.Argument(metavar="ADDRESS|ID", help="Address or id of the device.")],
) -> None:
    """Detach a device from this host and forget its ssh host key.

    A running job is finished first. Measurements are kept.
    """
    attachment = own_attachments().remove(name)
    if attachment.address.startswith("ssh:"):
        pin(SshAddress.parse(attachment.address), None, paths.home() / "keys")
    say(f"{attachment.address}: detached" + (f" (device {attachment.id})" if attachment.id else ""))


@app.command("name")
def set_name(
    device: DeviceArgument,
    name: Annotated[str, typer.Argument(help="Name to show beside the id; none removes it.", show_default=False)] = "",
    server: ServerOption = None,
    db: DatabaseOption = None,
    json: JsonFlag = False,
) -> None:
    """Give a device a name that is shown beside its id."""
    _label(device, {"name": name}, server, db, json)


@app.command("note")
def set_note(
    device: DeviceArgument,
    text: Annotated[str, typer.Argument(help="Note; none removes it.", show_default=False)] = "",
    server: ServerOption = None,
    db: DatabaseOption = None,
    json: JsonFlag = False,
) -> None:
    """Write a note on a device, such as where it stands. Earlier notes stay in its history."""
    _label(device, {"note": text}, server, db, json)


@app.command("tag")
def set_tags(
    device: DeviceArgument,
    tags: Annotated[
        list[str] | None, typer.Argument(metavar="[TAG]...", help="All tags; none removes them.", show_default=False)
    ] = None,
    server: ServerOption = None,
    db: DatabaseOption = None,
    json: JsonFlag = False,
) -> None:
    """Set the tags of a device in the database, used in spaces as tag:NAME; those of 'nas device add' stay."""
    _label(device, {"tags": [*_tags(tags or [], "TAG")]}, server, db, json)


@app.command()
def reserve(
    device: DeviceArgument,
    duration: Annotated[str, typer.Option("--for", help="How long, such as 90min, 2h or 3d; at most 7d.")],
    reason: Annotated[str, typer.Option("--reason", help="What for; shown to everybody.")],
    study: Annotated[
        str | None, typer.Option("--study", help="Study that may use it meanwhile. Default: it takes no jobs.")
    ] = None,
    server: ServerOption = None,
    db: DatabaseOption = None,
    json: JsonFlag = False,
) -> None:
    """Reserve a device: jobs of other studies wait until the reservation ends. A running job is finished."""
    try:
        seconds = parse_duration(duration)
    except InvalidInput as error:
        raise InvalidInput(error.message, where="--for") from None
    _reserve(device, {"for_s": seconds, "reason": reason, "study": study}, server, db, json)


@app.command()
def unreserve(
    device: DeviceArgument, server: ServerOption = None, db: DatabaseOption = None, json: JsonFlag = False
) -> None:
    """End the reservation of a device."""
    _reserve(device, {"for_s": 0}, server, db, json)


def _reserve(device: str, request: dict[str, Any], server: str | None, db: str | None, json: bool) -> None:
    with open_fleet(server, db) as fleet:
        entry = fleet.reserve(_id(fleet, device), request)
    if json:
        print_json(entry)
    else:
        say(f"{entry['id']}: {_reserved(entry) or 'not reserved'}")


@app.command()
def retire(device: DeviceArgument, server: ServerOption = None, db: DatabaseOption = None) -> None:
    """Retire a device. Measurements are kept, calibrations are deleted; 'release' reverts it."""
    with open_fleet(server, db) as fleet:
        fleet.retire(_id(fleet, device))
    say(f"{device}: retired")


def _label(device: str, labels: dict[str, Any], server: str | None, db: str | None, json: bool) -> None:
    with open_fleet(server, db) as fleet:
        entry = fleet.label(_id(fleet, device), labels)
    if json:
        print_json(entry)
    else:
        print_fields(_label_fields(entry))


def _label_fields(entry: dict[str, Any]) -> list[tuple[str, object]]:
    """Returns what people wrote about a device."""
    return [
        ("device", entry["id"]),
        ("name", entry["name"]),
        ("note", entry["note"]),
        ("tags", " ".join(entry["tags"]) or None),
    ]


def _register(name: DeviceOrder, summary: str) -> None:
    @app.command(name, help=summary)
    def steer(
        device: DeviceArgument,
        reason: ReasonOption = "",
        server: ServerOption = None,
        db: DatabaseOption = None,
        json: JsonFlag = False,
    ) -> None:
        with open_fleet(server, db) as fleet:
            entry = fleet.order(_id(fleet, device), name, reason)
        if json:
            print_json(entry)
        else:
            why = f" ({entry['health_reason']})" if entry["health_reason"] else ""
            say(f"{device}: {entry['state']}, health {entry['health']}{why}")


for _name, _summary in _ORDERS.items():
    _register(_name, _summary)


def _registered(server: str | None, db: str | None, *, any_attached: bool) -> dict[str, Any]:
    """Returns the devices of a coordinator or database; none if a host with attached devices has no database."""
    try:
        with open_fleet(server, db) as fleet:
            return fleet.devices()
    except (InvalidInput, ModuleNotFoundError):  # no database yet, or no database packages
        if server is not None or not any_attached:
            raise
        return {"devices": []}


def _list_row(device: dict[str, Any]) -> list[object]:
    _, name, note, tags = (value for _, value in _label_fields(device))
    return [
        device["id"],
        name,
        device["state"],
        device["health"],
        _condition(device),
        _used_by(device),
        _reserved(device),
        _waiting(device),
        device["device"]["model"],
        device["agent"],
        tags,
        note,
        when(device["last_seen"]),
    ]


def _device_fields(entry: dict[str, Any]) -> list[tuple[str, object]]:
    device, lease = entry["device"], entry["lease"]
    health = f"{entry['health']}: {entry['health_reason']}" if entry["health_reason"] else entry["health"]
    return [
        *_label_fields(entry),
        ("model", device["model"]),
        ("cpu", f"{device['cpu']}, {device['cores']} cores, {device['memory_mb']} MB"),
        ("system", f"{device['os']}, {device['target']}"),
        ("agent", entry["agent"]),
        ("state", entry["state"]),
        ("health", health),
        ("condition", _condition(entry)),
        ("checked", when(entry["checked_at"])),
        ("last seen", when(entry["last_seen"])),
        ("lease", f"epoch {entry['epoch']}, until {when(lease['until'])}" if lease else None),
        ("used by", _used_by(entry)),
        ("reserved", _reserved(entry)),
        ("waiting", _waiting(entry)),
    ]


def _condition(entry: dict[str, Any]) -> str | None:
    """Returns what the sensors of a device said last, such as '42 °C, battery 83 %'; None without any."""
    read = entry["condition"] or {"temperature_c": None, "battery_percent": None}
    temperature, battery = read["temperature_c"], read["battery_percent"]
    parts = [] if temperature is None else [f"{temperature:.0f} °C"]
    return ", ".join(parts if battery is None else [*parts, f"battery {battery:.0f} %"]) or None


def _used_by(entry: dict[str, Any]) -> str | None:
    """Returns whose job a device runs; None if it runs none."""
    if (lease := entry["lease"]) is None:
        return None
    return (lease["study"] or "no study") + (f" of {lease['submitted_by']}" if lease["submitted_by"] else "")


def _reserved(entry: dict[str, Any]) -> str | None:
    if (reservation := entry["reservation"]) is None:
        return None
    study = reservation["study"] or "no study"
    return f"by {reservation['by']} for {study} until {when(reservation['until'])}: {reservation['reason']}"


def _waiting(entry: dict[str, Any]) -> str | None:
    """Returns who waits for a device, first come first; None if nobody does."""
    waiting = [
        f"{line['study'] or 'health checks'} ({line['jobs']} job{'s' * (line['jobs'] != 1)})" for line in entry["queue"]
    ]
    return ", then ".join(waiting) or None


def _drift_row(drift: dict[str, Any]) -> list[object]:
    off = "too few runs" if drift["off"] is None else show_share(drift["off"], signed=True)
    text = f"{off}: will be recalibrated by the next study" if drift["recalibrate"] else off
    return [*_calibrated(drift), len(drift["runs"]), text]


def _id(fleet: Fleet, name: str) -> str:
    """Returns the id of the device that a name means: an id, the unique start of one, or tag:NAME of only one."""
    from nas.measure.farm.farm import find_name, this_machine

    if name == LOCAL:
        return this_machine().id
    return find_name(name, {entry["id"]: entry["tags"] for entry in fleet.devices()["devices"]})


def _calibrated(calibration: dict[str, Any]) -> list[str]:
    """Returns runtime, build and calibration."""
    return [calibration["runtime"], (calibration["build"] or "not known")[:12], calibration["calibration"][:12]]


def _job_row(job: dict[str, Any]) -> list[object]:
    name = f"{job['id'][:12]}{job['id'][job['id'].rfind('.') :]}"
    return [name, job["kind"], job["study"], job["trial"], job["state"], when(job["updated"]), job["message"]]


def _trust(address: SshAddress, fingerprint: str | None, yes: bool) -> None:
    """Pins the host key of the machine once `fingerprint`, `yes` or the user confirms it."""
    keys = paths.home() / "keys"
    server_key, pinned = host_key(address), pinned_fingerprints(address, keys)
    key = f"{address} has host key {server_key.fingerprint} ({server_key.get_name()})"
    if fingerprint is not None and fingerprint != server_key.fingerprint:
        raise NotTrusted(f"{key}, not {fingerprint}: this may be another machine or a man-in-the-middle")
    if server_key.fingerprint in pinned:
        return
    if fingerprint is None and pinned:
        raise NotTrusted(
            f"{key}, but {' and '.join(pinned)} is pinned: another machine, or its key has changed. To accept the "
            f"new key, give --host-key {server_key.fingerprint}"
        )
    say(key)
    if fingerprint is None and not yes:
        _ask(address, server_key.fingerprint)
    pin(address, server_key, keys)


def _ask(address: SshAddress, fingerprint: str) -> None:
    if not sys.stdin.isatty():
        raise InvalidInput(
            f"confirm the host key: on {address.host}, compare ssh-keygen -lf /etc/ssh/ssh_host_ed25519_key.pub; then "
            f"give --host-key {fingerprint}, or --yes to trust it unchecked"
        )
    if not typer.confirm(f"Is this the host key of {address.host}?", err=True):
        raise NotTrusted(f"{address} was not added")


def _tags(words: list[str], where: str = "--tag") -> tuple[str, ...]:
    for tag in words:
        if not re.fullmatch(TAG, tag):
            raise InvalidInput(f"{tag!r}: a tag has up to 32 letters, digits and ._-", where=where)
    tags = tuple(dict.fromkeys(words))
    if len(tags) > MOST_TAGS:
        raise InvalidInput(f"a device has at most {MOST_TAGS} tags, not {len(tags)}", where=where)
    return tags


def _attached_fields(address: str, device: Device) -> list[tuple[str, object]]:
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
