"""The site: its diagrams, its hooks, and what `make docs-check` finds. Building it needs the extra `docs`."""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture
def tool(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A module of .ci/, or the one that draws."""

    def load(name: str) -> ModuleType:
        for folder in (".ci", "docs/pictures"):
            monkeypatch.syspath_prepend(ROOT / folder)
        return importlib.import_module(name)

    return load


def test_diagrams_are_those_that_are_drawn(tool: Any) -> None:
    diagrams = tool("diagrams")
    concepts = (ROOT / "docs/concepts.md").read_text()
    for name, draw in diagrams.DIAGRAMS.items():
        picture = draw()
        assert (ROOT / f"docs/pictures/{name}.svg").read_text() == picture, "python docs/pictures/diagrams.py"
        assert f"(pictures/{name}.svg)" in concepts and "prefers-color-scheme: dark" in picture
    assert not re.search("^```mermaid", concepts, re.MULTILINE)  # which is drawn by a script from elsewhere


def page(source: str) -> Any:
    return SimpleNamespace(file=SimpleNamespace(src_uri=source), meta={})


def test_searches_look_at_the_options_first(tool: Any) -> None:
    hooks = tool("site_hooks")
    pages = {name: page(name) for name in ("docs/options.md", "docs/reference/compat.md", "docs/faq.md", "README.md")}
    for each in pages.values():
        assert hooks.on_page_markdown("text", each) == "text"
    boosts = {name: each.meta.get("search", {"boost": 1})["boost"] for name, each in pages.items()}
    assert max(boosts, key=lambda name: boosts[name]) == "docs/options.md"
    assert boosts["docs/reference/compat.md"] < boosts["docs/faq.md"] == 1
    assert pages["README.md"].meta["hide"] == ["navigation", "toc"]


@pytest.mark.parametrize("repository", ["", "https://example.org/fused_optim"])
def test_edit_links_lead_into_the_repository(tool: Any, repository: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FUSED_OPTIM_REPOSITORY", repository)
    config = SimpleNamespace(repo_url=None, edit_uri=None, site_url=None)
    tool("site_hooks").on_config(config)
    assert (config.repo_url or "", config.edit_uri or "") == (repository, "edit/main/" if repository else "")


def test_broken_links_are_found(tool: Any, tmp_path: Path) -> None:
    (tmp_path / "a.html").write_text('<a href="b.html#there">1</a><a href="#here"></a><a href="https://x.org/y">2</a>')
    (tmp_path / "b.html").write_text('<p id="there"><a href="a.html#here">3</a><a class="x" href="c.html">4</a>')
    wrong = [*tool("check_site").check_links(tmp_path, sorted(tmp_path.glob("*.html")))]
    assert wrong == [
        "a.html: #here: no such place",
        "b.html: a.html#here: no such place",
        "b.html: c.html leads nowhere",
    ]


SCROLLS = "display: block; overflow: auto"
WIDE = f'<!DOCTYPE html><div class="md-content"><pre style="{SCROLLS}"><code style="{SCROLLS}">{{}}</code></pre>'


@pytest.fixture
def tab(tool: Any) -> Any:
    module = tool("browser")
    if not any(map(module.shutil.which, module.PROGRAMS)):
        pytest.skip("needs Chromium")
    with module.browser() as opened:
        yield opened


def test_what_is_cut_off_is_found(tool: Any, tab: Any, tmp_path: Path) -> None:
    """Too wide a page, code of 90 characters that does not fit; longer code may scroll."""
    site, found = tool("check_site"), {}
    bodies = {
        "fits": WIDE.format("x" * 90),
        "scrolls": WIDE.format("x" * 400),
        "cut": WIDE.format("x" * 90).replace('<code style="', '<code style="width: 300px; '),
        "wide": '<!DOCTYPE html><div style="width: 2000px">wide</div>',
        "picture": '<!DOCTYPE html><img src="missing.png">',
    }
    for name, body in bodies.items():
        (tmp_path / f"{name}.html").write_text(body)
        found[name] = [*site.check_layout(tab, tmp_path, tmp_path / f"{name}.html", "desktop", 1440)]
    assert found["fits"] == found["scrolls"] == []
    assert "cuts off the code" in found["cut"][0] and "wider than the window" in found["wide"][0]
    assert "has no picture" in found["picture"][0]
    assert [url for url in tab.requested if "missing.png" in url]
