"""`nas device`: the devices of a database, or of a coordinator with --server; `add` and `remove`: those of this host.

Such a host may have no database packages: what needs them is imported by the command that does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from nas.cli import device_host
from nas.cli.database import DatabaseOption
from nas.cli.fleet import open_fleet
from nas.cli.lazy import command_app
from nas.cli.output import JsonFlag, print_fields, print_json, print_table, say, when
from nas.cli.remote import ServerOption
from nas.core.errors import InvalidInput
from nas.devices.host import own_attachments

if TYPE_CHECKING:
    from nas.service.fleet import DeviceOrder

app = command_app(help="Attach, list, show, check and steer devices.")
app.command("add")(device_host.add)
app.command("remove")(device_host.remove)

DeviceArgument = Annotated[str, typer.Argument(metavar="DEVICE", help="Id of a device; 'nas device list' shows them.")]
ReasonOption = Annotated[str, typer.Option("--reason", help="Why; shown to whoever asks about the device.")]


@app.command("list")
def list_devices(server: ServerOption = None, db: DatabaseOption = None, json: JsonFlag = False) -> None:
    """List devices: what they do, and what is thought of them.

    Those that are attached to this host, but were not served yet, are listed as attached.
    """
    attached = own_attachments().read() if server is None else ()
    found = _registered(server, db, any_attached=bool(attached))
    known = {device["id"] for device in found["devices"]}
    waiting = [each for each in attached if each.id not in known]
    if json:
        print_json(found | ({"attached": [each.model_dump(mode="json") for each in waiting]} if waiting else {}))
        return
    columns = ("device", "state", "health", "model", "agent", "last seen")
    rows = [[each.id, "attached", None, each.address, None, "never"] for each in waiting]
    print_table(columns, [*(_row(device) for device in found["devices"]), *rows])
    if waiting:
        say("what is only attached is served by the next 'nas launch' or 'nas bench' here, or by 'nas agent run'")


@app.command()
def show(
    device: DeviceArgument, server: ServerOption = None, db: DatabaseOption = None, json: JsonFlag = False
) -> None:
    """Show a device: its lease, its calibrations and its latest jobs."""
    with open_fleet(server, db) as fleet:
        found = fleet.device(device)
    if json:
        print_json(found)
        return
    print_fields(_fields(found))
    if found["calibrations"]:
        typer.echo()
        rows = [[each["runtime"], each["build"], f"{each['reference_ms']:.4g}", when(each["created"])]
                for each in found["calibrations"]]  # fmt: skip
        print_table(("runtime", "build", "reference [ms]", "measured"), rows)
    if found["drift"]:
        typer.echo()
        print_table(("runtime", "build", "runs", "off its calibration"), [_drift(each) for each in found["drift"]])
    if found["history"]:
        typer.echo()
        rows = [[when(each["at"]), each["kind"], each["what"], each["reason"]] for each in found["history"]]
        print_table(("at", "what", "", "reason"), rows)
    if found["jobs"]:
        typer.echo()
        columns = ("job", "kind", "study", "trial", "state", "updated", "message")
        print_table(columns, [_job(job) for job in found["jobs"]])


@app.command()
def retire(device: DeviceArgument, server: ServerOption = None, db: DatabaseOption = None) -> None:
    """Take a device out of use for good; what was measured stays, its calibrations go. 'release' takes it back."""
    with open_fleet(server, db) as fleet:
        fleet.retire(device)
    say(f"{device}: retired")


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
            found = fleet.order(device, name, reason)
        if json:
            print_json(found)
        else:
            why = f" ({found['health_reason']})" if found["health_reason"] else ""
            say(f"{device}: {found['state']}, health {found['health']}{why}")


_ORDERS: dict[DeviceOrder, str] = {
    "check": "Have a device pass a health check anew before it is trusted.",
    "drain": "Let a device finish its job and take no other.",
    "resume": "End a drain.",
    "quarantine": "Keep a device from all work until it is released.",
    "release": "Take a device back from quarantine, bad health or removal; it has to pass a check.",
}
for _name, _summary in _ORDERS.items():
    _register(_name, _summary)


def _registered(server: str | None, db: str | None, *, any_attached: bool) -> dict[str, Any]:
    """The devices of a coordinator or a database; none where a host with attached devices has no database."""
    try:
        with open_fleet(server, db) as fleet:
            return fleet.devices()
    except (InvalidInput, ModuleNotFoundError):  # not made yet, or an agent's host, without packages for one
        if server is not None or not any_attached:
            raise
        return {"devices": []}


def _row(device: dict[str, Any]) -> list[str]:
    return [device["id"], device["state"], device["health"], device["device"]["model"], device["agent"],
            when(device["last_seen"])]  # fmt: skip


def _fields(found: dict[str, Any]) -> list[tuple[str, object]]:
    device, lease = found["device"], found["lease"]
    health = f"{found['health']}: {found['health_reason']}" if found["health_reason"] else found["health"]
    return [
        ("device", found["id"]),
        ("model", device["model"]),
        ("cpu", f"{device['cpu']}, {device['cores']} cores, {device['memory_mb']} MB"),
        ("system", f"{device['os']}, {device['target']}"),
        ("tags", " ".join(device.get("tags", ())) or None),
        ("agent", found["agent"]),
        ("state", found["state"]),
        ("health", health),
        ("checked", when(found["checked_at"])),
        ("last seen", when(found["last_seen"])),
        ("lease", f"epoch {found['epoch']}, until {when(lease['until'])}" if lease else None),
    ]


def _drift(drift: dict[str, Any]) -> list[object]:
    off = "too few calm runs" if drift["off"] is None else f"{drift['off']:+.1%}"
    told = f"{off}: the next study calibrates it anew" if drift["recalibrate"] else off
    return [drift["runtime"], drift["build"][:12], len(drift["runs"]), told]


def _job(job: dict[str, Any]) -> list[object]:
    name = f"{job['id'][:12]}{job['id'][job['id'].rfind('.') :]}"
    return [name, job["kind"], job["study"], job["trial"], job["state"], when(job["updated"]), job["message"]]
