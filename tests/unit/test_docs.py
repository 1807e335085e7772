"""Checks of the documentation: links resolve, snippets work, generated parts are current, indexes are complete."""

from __future__ import annotations

import re
import shlex
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from nas.cli.main import app
from nas.core.block import BLOCKS
from nas.core.layout import Layout
from nas.core.registry import Registry
from nas.core.task import TASKS
from nas.measure.devices.transports import TRANSPORTS
from nas.measure.runtimes import RUNTIMES
from nas.measure.runtimes.executorch.kinds import KINDS as EXECUTORCH_KINDS
from nas.measure.runtimes.llama_cpp.kinds import KINDS as LLAMA_CPP_KINDS
from nas.model.nn.kinds import MODULES
from nas.search.proposers import PROPOSERS
from nas.search.spaces import parse_space

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
LINK = re.compile(r"\]\(([^)\s]+)\)")
FENCE = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
CODE = re.compile(r"`([^`\n]+)`")
FILE = re.compile(r"(?:nas|devices|runtimes|search_spaces|docs|scripts|tests)/[\w./-]+\.(?:py|c|yaml|md)")
TEST = re.compile(r"`((?:tests|nas/testing)/[\w/]+\.py)::((?:\w+::)?)(\w+)`")
LAYOUT = re.compile(r"d\d+ v\d+ (?:untied )?ffn=\S+ \[[^\]\n]+\]")


def page_id(path: Path) -> str:
    return str(path.relative_to(ROOT))


def anchors(text: str) -> set[str]:
    """Anchors of a page's headings, as GitHub makes them."""
    heads = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}


def snippets(language: str) -> Iterator[tuple[str, str]]:
    for page in PAGES:
        for tag, body in FENCE.findall(page.read_text(encoding="utf-8")):
            if tag == language:
                yield page_id(page), body


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_links_to_files_and_headings_resolve(page: Path) -> None:
    for target in LINK.findall(page.read_text(encoding="utf-8")):
        if target.startswith(("http://", "https://", "mailto:")):
            continue
        name, _, anchor = target.partition("#")
        path = (page.parent / name).resolve() if name else page
        assert path.exists(), f"{page_id(page)}: {target}"
        if anchor:
            assert anchor in anchors(path.read_text(encoding="utf-8")), f"{page_id(page)}: {target}"


def test_files_that_are_named_exist() -> None:
    named = [
        (page_id(page), code)
        for page in PAGES
        for code in CODE.findall(page.read_text(encoding="utf-8"))
        if FILE.fullmatch(code) and "average" not in code  # the example of adding-a-block.md
    ]
    assert named
    assert [(page, code) for page, code in named if not (ROOT / code).exists()] == []


MESSAGES = [path for package in ("nas", "devices", "runtimes", "dashboard") for path in (ROOT / package).rglob("*.py")]


def test_nobody_is_told_to_install_a_package_of_this_name_from_an_index() -> None:
    """There is none yet, and somebody else could take the name."""
    command = re.compile(r"""pip install ['"]?hilnas""")
    assert [page_id(page) for page in (*PAGES, *MESSAGES) if command.search(page.read_text(encoding="utf-8"))] == []


def test_every_threat_is_tested() -> None:
    page = (ROOT / "docs/reference/security.md").read_text("utf-8")
    rows = [line for line in page.splitlines() if line.startswith("|")]
    heads = {rows[place - 1] for place, row in enumerate(rows) if row.startswith("|---")}
    tested = [row for row in rows if not row.startswith("|---") and row not in heads]
    assert len(tested) > 30
    for row in tested:
        assert "::test_" in row


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_tests_that_are_named_exist(page: Path) -> None:
    text = page.read_text("utf-8")
    named = TEST.findall(text)
    assert len(named) == text.count("::test_")
    for file, owner, test in named:
        indented = "    " if owner else ""
        definition = re.search(rf"^{indented}def {test}\(", (ROOT / file).read_text("utf-8"), re.MULTILINE)
        assert definition, f"{file}: {owner}{test}"


def test_layouts_that_are_shown_parse() -> None:
    layouts = [(page_id(page), text) for page in PAGES for text in LAYOUT.findall(page.read_text(encoding="utf-8"))]
    assert layouts
    for page, text in layouts:
        assert Layout.parse(text).format() == text, page


def test_yaml_snippets_are_search_spaces() -> None:
    examples = list(snippets("yaml"))
    assert examples
    for name, body in examples:
        parse_space(body, name)


def test_python_snippets_compile() -> None:
    examples = list(snippets("python"))
    assert examples
    for name, body in examples:
        compile(body, name, "exec")


def test_the_guide_to_blocks_shows_the_files_of_the_package_that_is_tested() -> None:
    package = ROOT / "tests" / "plugin_package"
    files = [path.read_text(encoding="utf-8") for path in package.rglob("*") if path.suffix in (".py", ".toml")]
    page = "docs/how-to/adding-a-block.md"
    bodies = [body for language in ("python", "toml") for name, body in snippets(language) if name == page]
    parts = [part.strip("\n") for body in bodies for part in re.split(r"^ *# \.\.\.$", body, flags=re.MULTILINE)]
    assert len(bodies) >= 7
    assert [part for part in parts if not any(part in text for text in files)] == []


def test_the_example_of_the_search_engine_runs() -> None:
    (example,) = (body for name, body in snippets("python") if name == "docs/explanation/search-engine.md")
    exec(compile(example, "docs/explanation/search-engine.md", "exec"), {"__name__": "example"})


def test_toml_snippets_name_known_groups() -> None:
    groups = {registry.group for registry in REGISTRIES}
    examples = list(snippets("toml"))
    assert examples
    for name, body in examples:
        assert set(tomllib.loads(body)["project"]["entry-points"]) <= groups, name


REGISTRIES: tuple[Registry[object], ...] = (  # type: ignore[assignment]
    BLOCKS,
    MODULES,
    EXECUTORCH_KINDS,
    LLAMA_CPP_KINDS,
    RUNTIMES,
    TRANSPORTS,
    TASKS,
    PROPOSERS,
)


@pytest.mark.parametrize("registry", REGISTRIES, ids=lambda registry: registry.group)
def test_every_extension_point_is_documented(registry: Registry[object]) -> None:
    assert f"`{registry.group}`" in (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")


def test_the_layers_are_those_of_the_import_contract() -> None:
    config = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    layers = config["tool"]["importlinter"]["contracts"][0]["layers"]
    drawn = next(body for name, body in snippets("text") if name == "ARCHITECTURE.md")
    assert drawn.splitlines() == layers


def test_every_picture_is_on_a_page() -> None:
    linked = {(page.parent / target).resolve() for page in PAGES for target in LINK.findall(page.read_text("utf-8"))}
    assert set() < {path for path in (ROOT / "docs/img").rglob("*.*") if path.is_file()} <= linked


def test_the_index_lists_every_page() -> None:
    index = ROOT / "docs/README.md"
    linked = {(index.parent / target.partition("#")[0]).resolve() for target in LINK.findall(index.read_text("utf-8"))}
    assert {page for page in PAGES if (ROOT / "docs") in page.parents} - {index} <= linked


def test_modules_with_contract_tests_exist() -> None:
    named = re.findall(r"`nas\.testing\.(\w+)`", (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8"))
    assert named
    assert set(named) == {path.stem for path in (ROOT / "nas" / "testing").glob("*_contract.py")}


def test_every_make_target_in_the_readme_is_one() -> None:
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    named = set(re.findall(r"\bmake ([a-z]+)", (ROOT / "README.md").read_text(encoding="utf-8")))
    assert set() < named <= targets


def test_cleaning_sets_up_nothing() -> None:
    assert re.search(r"^clean:$", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)


README = (ROOT / "README.md").read_text(encoding="utf-8")
COMMANDS = sorted({
    command.strip()
    for line in [*CODE.findall(README), *"".join(body for _, body in FENCE.findall(README)).splitlines()]
    for command in [line.partition("#")[0]]
    if command.startswith("nas ")
})  # fmt: skip


def test_the_readme_is_short_and_opens_with_the_four_doors() -> None:
    assert len(README.split()) <= 900
    first = README.partition("## ")[0]
    assert all(f"`nas {door}" in first for door in ("compare", "adapt", "launch", "serve"))


def parse(command: str) -> None:
    """Parses a command line without running it."""
    group: Any = typer.main.get_command(app)
    name, rest, context = "nas", shlex.split(command)[1:], None
    while rest or not isinstance(group, typer.core.TyperGroup):  # a group alone prints its help
        context = group.make_context(name, rest, parent=context)
        if not isinstance(group, typer.core.TyperGroup):
            return
        name, group, rest = group.resolve_command(context, [*context._protected_args, *context.args])


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_of_the_readme_parses(command: str) -> None:
    parse(command)


@pytest.mark.parametrize("command", ["nas launch --spaec lfm2", "nas studdy show lfm2", "nas compare --zzz a.gguf"])
def test_commands_that_do_not_exist_do_not_parse(command: str) -> None:
    with pytest.raises(Exception, match="No such"):
        parse(command)


def test_the_readme_quotes_the_sentence_of_the_study_as_it_is() -> None:
    (quote,) = re.findall("^> (.*)$", README, re.MULTILINE)
    assert f"> {quote}\n" in (ROOT / "docs/measured/fronts.md").read_text(encoding="utf-8")
