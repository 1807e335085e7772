"""Injects faults of many kinds into a whole farm, and checks after each that no wrong result was accepted.

    python benchmarks/fault_campaign.py --faults 300 --seed 0 --state campaign.jsonl > result.json

The farm is real: `nas serve` over TLS on a network of its own, `nas agent run`, and machines with sshd, adbd or
dropbear made of namespaces (as root; see tests/integration/device_lab.py). The right end of each job is known. Each
fault hits the job of one device at a moment of its life: while its files are fetched or pushed, while it runs, when it
ends; some hit all devices. Killed agents and coordinators are started again after a second, as systemd does it, and
nothing else is done for them. Faults of different devices overlap.

Checked after each fault, and all again at the end: the job ends with the right result, or failed for a reason that is
true; nothing accepted is lost, changed or counted twice; nothing of an old epoch is accepted; no runner is alive 5 s
after its deadline on the device.

The state file records the campaign, one JSON object a line. A campaign that was itself killed, or that ended because of
`--seconds`, is continued with `--resume FILE`. `--only N,N` does these faults of a campaign again. Exit code 1 if
anything was found; then the folder with logs and databases stays.

    python benchmarks/fault_campaign.py --page docs/measured/faults.md benchmarks/recorded/faults-*.json

writes the table of campaigns, whose results are given, into a page.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import NoReturn

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "tests" / "integration"), str(ROOT)]

ISOLATED = "HILNAS_FAULT_CAMPAIGN"
NAMESPACES = ("unshare", "--mount", "--net", "--pid", "--fork", "--kill-child", "--mount-proc")
ENTER = 'mkdir -p /run/netns && mount -t tmpfs tmpfs /run/netns && ip link set lo up && "$@"'


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--faults", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--machines", type=int, default=4, help="number of devices")
    parser.add_argument("--kinds", default="sshd,adbd", help="of devices, in turn: sshd, adbd, board, account")
    parser.add_argument("--longest", type=float, default=60.0, help="seconds that a link may be down")
    parser.add_argument("--database", choices=("sqlite", "postgresql"), default="sqlite", help="of the coordinator")
    parser.add_argument("--state", type=Path, help="file that remembers what was done; default: in a temporary folder")
    parser.add_argument("--resume", type=Path, help="state file of a campaign to continue; its options hold")
    parser.add_argument("--only", help="numbers of faults, with commas between")
    parser.add_argument("--seconds", type=float, default=math.inf, help="begin no fault after this time")
    parser.add_argument("--page", type=Path, help="Markdown page that gets the table of results; nothing is run")
    parser.add_argument("results", type=Path, nargs="*", help="what campaigns printed, for --page")
    options = parser.parse_args()
    if options.page:
        from benchmarks.faults.table import campaign_table
        from benchmarks.page import fill

        results = [json.loads(path.read_text()) for path in options.results]
        fill(options.page, "measured: fault_campaign", f"\n{campaign_table(results)}\n")
        return 0
    if ISOLATED not in os.environ:
        go_apart()
    from benchmarks.faults.campaign import Campaign
    from benchmarks.faults.journal import Journal, Terms

    if options.resume:
        journal = Journal.open(options.resume)
    else:
        folder = Path(tempfile.mkdtemp(prefix="hilnas-faults-"))
        terms = Terms(
            options.seed,
            options.faults,
            options.machines,
            options.longest,
            str(folder),
            options.database,
            options.kinds.split(","),
        )
        journal = Journal.begin(options.state or folder / "campaign.jsonl", terms)
    only = [int(part) for part in options.only.split(",")] if options.only else None
    report = Campaign(journal, only, options.seconds).run()
    if report["violations"]:
        report["folder"] = journal.terms.folder
    print(json.dumps(report, indent=1))
    if not report["violations"] and not report["left"]:
        shutil.rmtree(journal.terms.folder)
    return 1 if report["violations"] else 0


def go_apart() -> NoReturn:
    """Runs this script in new namespaces of network, processes and mounts, so that nothing remains after its end."""
    from device_image import image

    image()  # needs the network that is closed next
    argv = [*NAMESPACES, "sh", "-c", ENTER, "sh", sys.executable, *sys.argv]
    os.execvpe(argv[0], argv, os.environ | {ISOLATED: "1"})


if __name__ == "__main__":
    sys.exit(main())
