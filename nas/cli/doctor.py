"""`nas doctor`: what on this machine keeps hilnas from working, or makes its numbers worse, and how to fix it."""

from __future__ import annotations

import dataclasses
import itertools

import typer

from nas.cli.checks import Finding, run_checks, worst
from nas.cli.database import DatabaseOption
from nas.cli.executorch_check import executorch_findings
from nas.cli.lazy import command_app
from nas.cli.output import JsonFlag, print_json, say

MARKS = {"ok": "ok  ", "warning": "warn", "failure": "FAIL"}

app = command_app()


@app.command()
def doctor(db: DatabaseOption = None, json: JsonFlag = False) -> None:
    """Check this machine and say how to fix what is wrong.

    Exit code 1 where something keeps `nas launch` from working; warnings alone leave it 0.
    """
    findings = []
    for finding in itertools.chain(run_checks(db), executorch_findings()):
        findings.append(finding)
        if not json:
            _show(finding)
    if json:
        print_json({"status": worst(findings), "checks": [dataclasses.asdict(finding) for finding in findings]})
    if worst(findings) == "failure":
        say("something keeps hilnas from working here: see the fixes above")
        raise typer.Exit(1)


def _show(finding: Finding) -> None:
    typer.echo(f"{MARKS[finding.status]}  {finding.name:<12}{finding.detail}")
    if finding.fix:
        typer.echo(f"      {'':<12}fix: {finding.fix}")
