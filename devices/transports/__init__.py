"""Ways to reach a device, by the name in `Device.transport`."""

from __future__ import annotations

from nas.core.registry import Registry
from nas.measure.devices.transports.base import Connect

TRANSPORTS: Registry[Connect] = Registry(
    "transport",
    "nas.transports",
    {
        "adb": "nas.measure.devices.transports.adb:connect",
        "local": "nas.measure.devices.transports.local:connect",
        "ssh": "nas.measure.devices.transports.ssh:connect",
    },
)
