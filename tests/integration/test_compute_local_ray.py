"""The Ray of a plain launch is for its own machine and its own process, and leaves nothing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

LIMIT_S = 240

CODE = """
import json, os, psutil
from nas.search.compute.ray import RayCompute

with RayCompute(1):
    ours = {os.getpid(), *(child.pid for child in psutil.Process().children(recursive=True))}
    listening = [each for each in psutil.net_connections("inet") if each.status == "LISTEN" and each.pid in ours]
    import ray
    niceness = ray.get(ray.remote(num_cpus=0)(lambda: os.nice(0)).remote(), timeout=120)
    print(json.dumps([sorted({each.laddr.ip for each in listening}), niceness]))
"""


def test_it_listens_on_loopback_only_and_leaves_no_token(tmp_path: Path) -> None:
    with tempfile.TemporaryDirectory() as folder:  # a short one, for Ray's sockets
        env = os.environ | {"HOME": str(tmp_path), "RAY_TMPDIR": folder}
        done = subprocess.run([sys.executable, "-c", CODE], env=env, capture_output=True, text=True, timeout=LIMIT_S)
        assert done.returncode == 0, done.stderr
        assert not [path for path in Path(folder).glob("ray/session_*") if path.is_dir()]
    listens, niceness = json.loads(done.stdout.splitlines()[-1])
    assert niceness == os.nice(0)
    assert listens and {address.removeprefix("::ffff:") for address in listens} == {"127.0.0.1"}
    assert not (tmp_path / ".ray" / "auth_token").exists()
