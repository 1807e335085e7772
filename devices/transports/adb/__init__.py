"""Android devices over adb: `adb:HOST:PORT` straight to the device, `adb:SERIAL` through the adb server of this host.

- `wire`: what `ShellTransport` needs, on top of either way
- `connection`: the protocol between host and device, over TCP, with the agent's own key (`key`)
- `server`: the protocol between a client and the adb server, which owns USB and wireless debugging
- `sync`: file transfer, the same on both ways

Source: docs/dev of AOSP's packages/modules/adb (protocol.md, services.md, sync.md). Commands run by the service
`exec:`, which every adbd since Android 5 has: exit code and both streams are in what `supervise.sh` says, so nothing
depends on the shell protocol of Android 7. The output is a terminal in raw mode: bytes pass as they are.
"""
