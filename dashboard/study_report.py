"""The result of a study, or a family, as one HTML file to send: no scripts, nothing fetched, printable."""

from __future__ import annotations

import json
import shlex
from importlib.resources import files

from markupsafe import Markup

from nas.infra.store.store import Store
from nas.search.analysis.plot import front_svg
from nas.search.analysis.report import study_report
from nas.search.analysis.snapshot import StudySnapshot
from nas.search.spaces.yaml_text import dump_yaml
from nas.search.study.events import Calibrated, notes
from nas.serve.dashboard.pages import render
from nas.serve.views.family import family_page
from nas.serve.views.study import study_view

_STYLES = ("dashboard.css", "plots.css", "study.css", "report.css")


def study_report_html(store: Store, study: StudySnapshot) -> str:
    """Returns the report of a study as one HTML page; raises UnknownName if the study is gone."""
    report = study_report(store, study)
    picture = front_svg(report)
    calibrations = {
        (calibration.device, calibration.runtime): calibration
        for calibration in notes(study.record.log.notes, Calibrated)
    }
    return render(
        "report.html",
        view=study_view(store, study, {}),
        report=report,
        calibrations=list(calibrations.values()),
        picture=Markup(picture[picture.index("<svg") :]),  # without the XML declaration, which HTML does not have
        style=_style(),
        space=dump_yaml(json.loads(json.dumps(study.record.study.space))),
        study=shlex.quote(study.name),
    )


def family_report_html(name: str) -> str:
    """Returns the report of a family as one HTML page; raises UnknownName and InvalidInput as `family_page` does."""
    return render("family_report.html", view=family_page(name), style=_style())


def _style() -> Markup:
    assets = files("nas.serve.dashboard") / "assets"
    return Markup("\n".join((assets / style).read_text(encoding="utf-8") for style in _STYLES))
