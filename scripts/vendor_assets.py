"""Fetches the front-end libraries that pages load, with the user's npm client, and holds them to `assets.lock`.

    python scripts/vendor_assets.py            fetch what the lock names; refuse what has another hash
    python scripts/vendor_assets.py --relock   fetch the versions below, and write a new lock

No Node program is run, and none is needed to build, test or serve: what was fetched is committed.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import subprocess
import tarfile
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

ASSETS = Path(__file__).resolve().parent.parent / "dashboard" / "assets"
LOCK = ASSETS / "assets.lock"


class Asset(NamedTuple):
    """A file of a package; `member` is its path there, `name` what it is called here."""

    package: str
    version: str
    member: str
    name: str


FILES = (
    Asset("uplot", "1.6.32", "dist/uPlot.esm.js", "uplot.esm.js"),
    Asset("uplot", "1.6.32", "dist/uPlot.min.css", "uplot.min.css"),
)


def main() -> None:
    """Fetches, verifies, and writes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--relock", action="store_true", help="write a new lock from what is fetched")
    relock = parser.parse_args().relock
    locked = {} if relock else {entry["file"]: entry for entry in json.loads(LOCK.read_text())}
    entries = []
    with tempfile.TemporaryDirectory() as folder:
        for asset in FILES:
            content, licence = _fetch(asset, Path(folder))
            entry = _entry(asset, licence, content)
            if not relock and locked.get(asset.name) != entry:
                raise SystemExit(f"{asset.name}: not what assets.lock says: {entry} != {locked.get(asset.name)}")
            (ASSETS / asset.name).write_bytes(content)
            entries.append(entry)
    if relock:
        LOCK.write_text(json.dumps(entries, indent=2) + "\n")


def _fetch(asset: Asset, folder: Path) -> tuple[bytes, str]:
    """Returns the file, and its package's licence."""
    archive = folder / f"{asset.package}-{asset.version}.tgz"
    if not archive.exists():
        _pack(asset, folder)
    with tarfile.open(archive) as packed:
        package = json.loads(_read(packed, "package.json"))
        assert (package["name"], package["version"]) == (asset.package, asset.version), package["name"]
        return _read(packed, asset.member), package["license"]


def _pack(asset: Asset, folder: Path) -> None:
    spec = f"{asset.package}@{asset.version}"
    command = ["npm", "pack", "--ignore-scripts", "--silent", "--pack-destination", str(folder), spec]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, timeout=300)


def _read(packed: tarfile.TarFile, member: str) -> bytes:
    file = packed.extractfile(f"package/{member}")
    assert file is not None, f"{member} is no file"
    return file.read()


def _entry(asset: Asset, licence: str, content: bytes) -> dict[str, Any]:
    return {
        "file": asset.name,
        "package": asset.package,
        "version": asset.version,
        "source": asset.member,
        "licence": licence,
        "sha256": hashlib.sha256(content).hexdigest(),
    }


if __name__ == "__main__":
    main()
