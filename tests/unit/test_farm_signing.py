"""The coordinator's key: one for all processes of a home, and for nobody else's eyes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

from nas.core.errors import InfrastructureFailed
from nas.core.trust import RunnerManifest, fingerprint
from nas.measure.devices.agent.trust import verified
from nas.measure.farm.trust import KEY_FILE, SigningKey, find_key, open_key

OPEN = """
import sys
from pathlib import Path
from nas.measure.farm.trust import open_key
print(open_key(Path(sys.argv[1])).public)
"""


def test_it_is_made_once_and_found_again(tmp_path: Path) -> None:
    assert find_key(tmp_path) is None
    key = open_key(tmp_path)
    copy = find_key(tmp_path)
    assert copy is not None
    assert key.public == copy.public == open_key(tmp_path).public
    manifest = RunnerManifest(serial=1, issued_at=0.5, runners=())
    assert verified(copy.sign(manifest), key.public) == manifest


def test_only_its_owner_may_read_it(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        open_key(tmp_path)
    finally:
        os.umask(before)
    assert (tmp_path / KEY_FILE).stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660])
def test_one_that_others_may_read_is_refused(tmp_path: Path, mode: int) -> None:
    open_key(tmp_path)
    (tmp_path / KEY_FILE).chmod(mode)
    with pytest.raises(InfrastructureFailed, match=f"mode {mode:04o}: run `chmod 600"):
        open_key(tmp_path)


def test_processes_that_start_together_agree(tmp_path: Path) -> None:
    command = [sys.executable, "-c", OPEN, str(tmp_path)]
    opened = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(4)]
    keys = {process.communicate(timeout=60)[0].strip() for process in opened}
    assert keys == {open_key(tmp_path).public}
    assert sorted(path.name for path in tmp_path.iterdir()) == [KEY_FILE, f"{KEY_FILE}.lock"]


@pytest.mark.parametrize(
    "content",
    [b"", b"no key", X25519PrivateKey.generate().private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())],
    ids=["empty", "text", "another kind"],
)
def test_what_is_no_key_is_not_replaced(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / KEY_FILE
    path.write_bytes(content)
    path.chmod(0o600)
    with pytest.raises(InfrastructureFailed, match="no Ed25519 key: restore it"):
        open_key(tmp_path)
    assert path.read_bytes() == content


def test_fingerprints_tell_keys_apart() -> None:
    one, other = (fingerprint(SigningKey.generate().public) for _ in range(2))
    assert one != other
    assert len(one) == 64
