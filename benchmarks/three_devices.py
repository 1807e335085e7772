"""Runs the demo search on three devices at once: this machine, one over ssh, one over adb; JSON.

    sudo .venv/bin/python benchmarks/three_devices.py [--trials 6] > result.json

Needs root: the two others are machines made of namespaces with Debian's real sshd and adbd
(tests/integration/device_lab.py), attached by `nas device add` as a user would. They run under this machine's kernel,
so the agent gives all three the host lock, and they take turns. The space is lfm2-demo with three devices, and one
budget that holds on the phone only. Printed is what each device measured of each layout on the front, and how many
layouts each budget rejected.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import yaml
from runs import print_json, say

from nas.core import paths
from nas.measure.devices.transports.adb_device import AdbKey
from nas.measure.devices.transports.ssh import SshAddress, host_key
from nas.search.spaces import space_text

sys.path.append(str(Path(__file__).parents[1] / "tests" / "integration"))

import device_lab

NAS = (sys.executable, "-c", "from nas.cli.main import main; main()")
DEVICES = ("local", "tag:box", "tag:phone")
PHONE_ONLY = {"metric": "decode_p50", "max": "1.05x", "workload": "chat", "device": "tag:phone"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=6)
    options = parser.parse_args()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="hilnas-benchmark-")))
        env = os.environ | {"NAS_HOME": str(folder / "home"), "NAS_CACHE": str(paths.cache())}
        _attach(stack, folder, env)
        space = folder / "three.yaml"
        space.write_text(yaml.safe_dump(_space(), sort_keys=False))
        asked = (
            "launch",
            "--space",
            str(space),
            "--study",
            "three",
            "--trials",
            str(options.trials),
            "--yes",
            "--json",
        )
        print_json(_told(json.loads(_nas(env, *asked))))


def _attach(stack: ExitStack, folder: Path, env: dict[str, str]) -> None:
    keys = folder / "home" / "keys"
    box = stack.enter_context(device_lab.sshd(folder / "box", keys))
    phone = stack.enter_context(device_lab.adbd(folder / "phone", AdbKey.load(keys / "adb").public()))
    for name, machine in (("box", box), ("phone", phone)):
        (machine.root / "etc/machine-id").write_text(name)
    address = SshAddress("root", box.address, box.port)
    trusted = ("--host-key", host_key(address).fingerprint)
    _nas(env, "device", "add", str(address), "--tag", "box", *trusted)
    _nas(env, "device", "add", f"adb:{phone.address}:{phone.port}", "--tag", "phone")


def _space() -> dict[str, Any]:
    space: dict[str, Any] = yaml.safe_load(space_text("lfm2-demo"))
    return space | {"name": "three-devices", "devices": list(DEVICES), "budgets": [*space["budgets"], PHONE_ONLY]}


def _nas(env: dict[str, str], *arguments: str) -> str:
    say(f"nas {' '.join(arguments)}")
    return subprocess.run([*NAS, *arguments], env=env, stdout=subprocess.PIPE, text=True, check=True).stdout


def _told(report: dict[str, Any]) -> dict[str, Any]:
    figures = ("ttft", "decode_p50", "peak_rss")
    front = [
        {
            "layout": member["layout"],
            "objectives": member["objectives"],
            "measured": {
                each["place"]["device"]: {name: each["figures"][name]["value"] for name in figures}
                for each in member["measurements"]
            },
        }
        for member in report["front"]
    ]
    return {
        "elapsed_s": report["elapsed_s"],
        "trials": report["trials"],
        "budgets": report["budgets"],
        "front": front,
        "measurements_by_device": Counter(
            each["place"]["device"] for member in report["ranking"] for each in member["measurements"]
        ),
    }


if __name__ == "__main__":
    main()
