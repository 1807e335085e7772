"""What a device is: data only. Behaviour is in `nas.devices`."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field


class Device(BaseModel):
    """A registered device, read from the device itself."""

    model_config = ConfigDict(extra="forbid")

    id: str = Field(pattern=r"^[a-z0-9][a-z0-9._-]{0,63}$", description="stable over reboots")
    transport: str = "local"
    model: str
    cpu: str
    target: str = Field(description="ABI, such as 'x86_64-linux'")
    cpu_features: tuple[str, ...] = ()
    cores: int
    memory_mb: int
    os: str
    tags: tuple[str, ...] = ()
