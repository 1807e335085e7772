"""`nas device`: the devices that candidates are measured on.

`add` and `remove` are for the host that a device is attached to, which may have no database: what needs one is
imported by the command that does.
"""

from __future__ import annotations

from nas.cli import device_host
from nas.cli.lazy import command_app

app = command_app(help="Devices that candidates are measured on.")
app.command("add")(device_host.add)
app.command("remove")(device_host.remove)
