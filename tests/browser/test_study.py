"""The study's page in a browser: every interaction, and that the address keeps what was chosen."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from conftest import Watched
from playwright.sync_api import Page, expect
from study_page import brush, corner, drag, picked, query, ranges, show, state, until, where, within


@pytest.fixture
def wide(page: Page, finished: str) -> Page:
    """The page of the study `wide`."""
    show(page, f"{finished}/wide")
    page.locator("#choices summary").click()
    return page


def test_it_draws_what_it_is_told(wide: Page) -> None:
    assert state(wide, "page.panels.map((panel) => panel.cloud[0].filter(Number.isFinite).length)") == [42, 42, 42]
    colours = (
        "[...new Set(new Uint32Array(c.getContext('2d').getImageData(0, 0, c.width, c.height).data.buffer))].length"
    )
    for canvas in wide.locator("#panels canvas, #courses canvas").all():
        assert canvas.evaluate(f"(c) => {colours}") > 3
    assert wide.locator("#panels canvas, #courses canvas").count() == 6
    # Forty complete trials: the reference is none of them.
    assert state(wide, "document.getElementById('course-trials').plot.data[0].at(-1)") == 40


def test_a_box_in_one_panel_picks_everywhere(wide: Page, finished: str) -> None:
    brush(wide, 1, (0.1, 0.1), (0.6, 0.6))
    count = picked(wide)
    x, y = (wide.locator(f"select[name={name}]").input_value() for name in ("x1", "y1"))
    assert set(ranges(wide)) == {x, y}
    assert 0 < count < 42 and count == within(wide, f"{finished}/wide/points")
    fields = wide.locator("#parallel fieldset input").evaluate_all("(all) => all.filter((each) => each.value).length")
    assert fields == 4
    assert state(wide, "page.picked.reduce((sum, one) => sum + one)") == count
    front = state(wide, "page.data.front.filter(({ trial }) => page.picked[trial]).length")
    assert wide.locator("#ranked tr.picked:not(.reference)").count() == front


def test_a_brush_on_an_axis_of_all_picks_in_the_panels(wide: Page, finished: str) -> None:
    canvas = wide.locator("#parallel canvas")
    canvas.scroll_into_view_if_needed()
    box = canvas.bounding_box()
    assert box is not None
    axes = state(wide, "page.parallel.axes.map(({ key }) => key)")
    middle = box["x"] + box["width"] * 0.5 / len(axes)
    drag(wide, (middle, box["y"] + 0.3 * box["height"]), (middle, box["y"] + 0.7 * box["height"]))
    assert set(ranges(wide)) == {axes[0]}
    assert 0 < picked(wide) == within(wide, f"{finished}/wide/points")
    wide.mouse.click(middle, box["y"] + 0.5 * box["height"])
    expect(wide.locator("#picked")).to_be_empty()


def test_number_fields_pick_without_a_mouse(wide: Page, finished: str) -> None:
    field = wide.locator("#parallel fieldset").filter(has_text="quality").get_by_label("from")
    field.focus()
    wide.keyboard.type("1.0")
    wide.keyboard.press("Enter")
    assert 0 < picked(wide) == within(wide, f"{finished}/wide/points")
    wide.keyboard.press("Escape")
    expect(wide.locator("#picked")).to_be_empty()
    assert "pick" not in query(wide)


def test_clear_lets_everything_go(wide: Page) -> None:
    brush(wide, 2, (0.05, 0.05), (0.6, 0.6))
    picked(wide)
    wide.get_by_role("button", name="Clear selection").click()
    expect(wide.locator("#picked")).to_be_empty()
    assert "pick" not in query(wide) and wide.locator("#ranked tr.picked").count() == 0


def test_the_address_brings_everything_back(wide: Page) -> None:
    wide.select_option("select[name=x2]", "params_total")
    expect(wide.locator(".panel[data-panel='2'] .plot")).to_have_attribute(
        "aria-label", re.compile("parameters")
    )  # it was fetched and drawn
    wide.check("input[name=logx2]")
    wide.check("input[name=infeasible]")
    brush(wide, 3, (0.2, 0.2), (0.9, 0.9))
    count, address = picked(wide), wide.url
    wide.goto("about:blank")
    show(wide, address)
    wide.locator("#choices summary").click()
    assert wide.input_value("select[name=x2]") == "params_total"
    assert wide.is_checked("input[name=logx2]") and wide.is_checked("input[name=infeasible]")
    assert picked(wide) == count
    assert wide.url == address


def test_infeasible_trials_are_shown_when_asked_for(wide: Page) -> None:
    broken = state(wide, "page.data.feasible.subarray(0, page.data.trials).indexOf(0)")
    wide.get_by_label("Trials that break a budget").check()
    expect(wide).to_have_url(re.compile("infeasible=1"))
    place = where(wide, 2, broken)
    wide.mouse.move(*place)
    expect(wide.locator(".panel[data-panel='2'] .tip")).to_contain_text(f"trial {broken}, infeasible")
    wide.get_by_label("Trials that break a budget").uncheck()
    expect(wide).to_have_url(re.compile("infeasible=0"))
    wide.mouse.move(*corner(wide, 2, 0.5, 0.99))
    expect(wide.locator(".panel[data-panel='2'] .tip")).to_be_hidden()


def test_logarithms_are_of_an_axis_wherever_it_stands(wide: Page) -> None:
    x = wide.input_value("select[name=x1]")
    wide.check("input[name=logx1]")
    expect(wide).to_have_url(re.compile("log="))
    assert query(wide)["log"] == x
    same = state(
        wide, f"Object.keys(page.choice.controls).filter((name) => page.choice.controls[name].value === '{x}')"
    )
    assert len(same) > 1 and all(wide.is_checked(f"input[name=log{name}]") for name in same)
    assert state(wide, "page.panels[0].plot.scales.x.distr") == 3


def test_a_place_shows_its_own_figures(wide: Page) -> None:
    places = wide.locator("select[name=place] option").evaluate_all("(all) => all.map((each) => each.value)")
    keys = [key for key in state(wide, "page.data.axes.filter((axis) => axis.place).map((axis) => axis.key)")]
    assert len(places) == 3 and keys
    wide.select_option("select[name=x1]", keys[0])
    default = state(wide, f"page.data.axis('{keys[0]}').place")
    other = next(place for place in places if place not in ("", default))
    wide.select_option("select[name=place]", other)
    expect(wide).to_have_url(re.compile("place="))
    expect(wide.locator(".panel[data-panel='1'] .plot")).to_have_attribute("aria-label", re.compile(re.escape(other)))
    assert state(wide, "page.data.axis(page.panels[0].keys.x).place") == other


def test_a_point_tells_and_opens_its_trial(wide: Page) -> None:
    trial = state(wide, "page.data.front[0].trial")
    place = where(wide, 1, trial)
    wide.mouse.move(*place)
    tip = wide.locator(".panel[data-panel='1'] .tip")
    expect(tip).to_contain_text(re.compile(r"trial \d+, complete\n(on|tied with) the front, P\(front\)"))
    expect(tip).to_contain_text(re.compile(r"latency.*: [\d.]+ \([\d.]+ to [\d.]+\)"))
    expect(tip.locator("svg.picture-thumbnail rect").first).to_be_visible()
    expect(tip).to_contain_text("the tallest has")
    box = tip.bounding_box()
    assert box is not None
    apart = [
        max(low - at, at - low - size, 0)
        for at, low, size in zip(place, (box["x"], box["y"]), (box["width"], box["height"]), strict=True)
    ]
    assert max(apart) < 40, f"it is at the pointer: {place}, {box}"
    named = re.search(r"trial (\d+)", tip.text_content() or "")
    assert named
    with wide.expect_navigation():
        wide.mouse.click(*place)
    expect(wide).to_have_url(re.compile(rf"/studies/wide/trials/{named[1]}$"))
    wide.go_back()
    expect(wide.locator("#panels")).to_have_attribute("data-live", "yes")


def test_keys_move_and_zoom_a_panel(wide: Page) -> None:
    span = "(({ min, max }) => [min, max])(page.panels[0].plot.scales.x)"
    whole = state(wide, span)
    wide.locator(".panel[data-panel='1'] .plot").focus()
    wide.keyboard.press("+")
    zoomed = state(wide, span)
    assert whole[0] < zoomed[0] < zoomed[1] < whole[1]
    wide.keyboard.press("ArrowRight")
    moved = state(wide, span)
    assert moved[0] > zoomed[0] and moved[1] - moved[0] == pytest.approx(zoomed[1] - zoomed[0])
    wide.keyboard.press("0")
    assert state(wide, span) == whole


def test_the_wheel_zooms_and_a_double_click_shows_all(wide: Page) -> None:
    span = "(({ min, max }) => [min, max])(page.panels[0].plot.scales.y)"
    whole = state(wide, span)
    wide.mouse.move(*corner(wide, 1, 0.5, 0.5))
    wide.keyboard.down("Control")
    wide.mouse.wheel(0, -100)
    wide.keyboard.up("Control")
    until(wide, f"{span}[0] > {whole[0]}")
    wide.mouse.dblclick(*corner(wide, 1, 0.01, 0.01))
    until(wide, f"{span}[0] === {whole[0]}")
    assert "pick" not in query(wide)


def test_the_plots_can_be_saved_as_a_picture(wide: Page, tmp_path: Path) -> None:
    with wide.expect_download() as download:
        wide.get_by_role("button", name="Save as PNG").click()
    assert download.value.suggested_filename == "wide.png"
    download.value.save_as(tmp_path / "wide.png")
    content = (tmp_path / "wide.png").read_bytes()
    assert content.startswith(b"\x89PNG\r\n\x1a\n")
    width = int.from_bytes(content[16:20])
    box = wide.locator(".panels").bounding_box()
    assert box is not None and width > 0.9 * box["width"]


@pytest.mark.parametrize(
    "context", [{"viewport": {"width": 390, "height": 800}, "color_scheme": "dark"}], indirect=True
)
def test_on_a_phone_in_the_dark(wide: Page) -> None:
    assert wide.evaluate("document.documentElement.scrollWidth") <= 390
    assert wide.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(13, 17, 23)"
    wide.emulate_media(color_scheme="light")
    assert wide.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    expect(wide.locator("#panels canvas, #courses canvas")).to_have_count(6)


@pytest.mark.parametrize("context", [{"java_script_enabled": False}], indirect=True)
def test_without_scripts_the_front_can_be_read(page: Page, finished: str) -> None:
    page.goto(f"{finished}/wide")
    expect(page.locator("#panels noscript p")).to_be_visible()
    expect(page.locator("#panels noscript p")).to_contain_text("The ranked list below has the front")
    expect(page.locator("#ranked tbody tr").first).to_be_visible()


@pytest.mark.parametrize("context", [{"viewport": {"width": 1280, "height": 800}}], indirect=True)
def test_the_picture_is_on_the_first_screen(page: Page, finished: str) -> None:
    show(page, f"{finished}/wide")
    assert page.locator(".panel .plot").first.evaluate("(plot) => plot.getBoundingClientRect().top") < 400
    assert not page.locator("#png").is_visible(), "axes and filters are folded"


def test_the_best_trial_is_ringed_and_the_bound_reaches_the_edges(page: Page, finished: str) -> None:
    page.add_init_script("""
      const none = () => ({ arc: [], fillText: [], lineTo: [] });
      window.forget = () => { window.drawn = none(); };
      window.forget();
      const context = CanvasRenderingContext2D.prototype;
      for (const name of Object.keys(none())) {
        const draw = context[name];
        context[name] = function (...given) { window.drawn[name].push(given); return draw.apply(this, given); };
      }
    """)
    show(page, f"{finished}/wide")
    best = state(page, "page.data.best")
    assert f"trial {best}" in (page.locator(".headline").text_content() or "")
    state(page, "(window.forget(), page.panels[0].plot.redraw(false), true)")
    until(page, "window.drawn.fillText.length > 0")
    at = state(page, "page.panels[0].place(page.data.front.find(({ trial }) => trial === page.data.best))")
    drawn = state(page, "window.drawn")
    radii = {radius for x, y, radius, *_ in drawn["arc"] if [x, y] == at}
    assert len(radii) == 2, "a ring around its dot"
    assert f"trial {best}" in [text for text, *_ in drawn["fillText"]]
    left_edge, top_edge, width, height = (
        state(page, f"page.panels[0].plot.bbox.{side}") for side in ("left", "top", "width", "height")
    )
    xs, ys = zip(*drawn["lineTo"], strict=True)
    assert left_edge + width in xs and top_edge + height in ys, "less quality and more latency are worse"


@pytest.mark.parametrize(
    "context", [{"viewport": {"width": 390, "height": 844}, "has_touch": True, "is_mobile": True}], indirect=True
)
def test_the_first_tap_tells_of_a_trial_and_the_second_opens_it(page: Page, finished: str) -> None:
    show(page, f"{finished}/wide")
    trial = state(page, "page.data.best")
    place, tip = where(page, 1, trial), page.locator(".panel[data-panel='1'] .tip")
    page.touchscreen.tap(*place)
    expect(tip).to_contain_text(f"trial {trial}, complete")
    expect(tip.locator("svg")).to_be_visible()
    assert page.url.split("?")[0] == f"{finished}/wide"
    with page.expect_navigation():
        page.touchscreen.tap(*place)
    expect(page).to_have_url(re.compile(rf"/studies/wide/trials/{trial}$"))


def test_a_trial_off_the_front_says_why_it_ended(wide: Page) -> None:
    broken = state(wide, "page.data.feasible.subarray(0, page.data.trials).indexOf(0)")
    wide.get_by_label("Trials that break a budget").check()
    expect(wide).to_have_url(re.compile("infeasible=1"))
    wide.mouse.move(*where(wide, 1, broken))
    expect(wide.locator(".panel[data-panel='1'] .card")).to_contain_text("peak_rss over its budget")


def test_a_layout_that_did_not_come_is_fetched_again(wide: Page, watched: Watched) -> None:
    watched.expected = ["503"]
    place = where(wide, 1, state(wide, "page.data.front[0].trial"))
    wide.route("**/card", lambda route: route.fulfill(status=503, body=""))
    with wide.expect_response("**/card"):
        wide.mouse.move(*place)
    wide.unroute("**/card")
    wide.mouse.move(0, 0)
    expect(wide.locator(".panel[data-panel='1'] .tip")).to_be_hidden()
    wide.mouse.move(*place)
    expect(wide.locator(".panel[data-panel='1'] .card svg.picture-thumbnail rect").first).to_be_visible()
