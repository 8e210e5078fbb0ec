"""Checks the built site in a headless Chromium, from the disk: `make docs-check`.

    python .ci/check_site.py build/site build/screenshots

Of every page at three widths: nothing is wider than the window; on a wide screen tables and code of 90 characters are
not cut off. Links lead somewhere, pictures load, dark mode is dark, nothing is asked of the net, searches find what
they should first. Facts of the layout are compared, never pixels; the screenshots are for people.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from html import unescape
from pathlib import Path
from urllib.parse import unquote, urlsplit

from browser import Browser, browser

WIDTHS = {"phone": 390, "tablet": 834, "desktop": 1440}
CODE = 90  # characters of a line
SHOWN = ("index", "docs/start", "docs/options", "docs/concepts", "docs/performance", "docs/how_to/fsdp2")
# What is searched for, and the page that is first; None: some page.
SEARCHES: dict[str, str | None] = {
    "exp_avg_dtype": "docs/options.html",
    "state_dtype": "docs/options.html",
    "master_bits": "docs/options.html",
    "stochastic_rounding": "docs/options.html",
    "A100": None,
    "FSDP2": None,
    "Checkpointer": None,
    "torchtitan": None,
}

# Of one page, as it is laid out: what is wider than its room, and pictures that are not there.
FACTS = """(() => {
  const code = [...document.querySelectorAll(".md-content pre > code")];
  const longest = (element) => Math.max(...element.innerText.split("\\n").map((line) => line.length));
  return {
    page: document.scrollingElement.scrollWidth - innerWidth,
    tables: [...document.querySelectorAll(".md-content .md-typeset__table, .md-content .md-typeset__scrollwrap")]
      .filter((each) => each.scrollWidth > each.clientWidth + 1).map((each) => each.innerText.slice(0, 60)),
    code: code.filter((each) => each.scrollWidth > each.clientWidth + 1 && longest(each) <= CODE)
      .map((each) => each.innerText.slice(0, 60)),
    pictures: [...document.images].filter((each) => !each.naturalWidth).map((each) => each.src),
  };
})()""".replace("CODE", str(CODE))
# The three numbers of a colour.
GROUND = "getComputedStyle(document.body).backgroundColor.match(/\\d+/g).slice(0, 3).map(Number)"

SEARCH = """(async () => {
  const input = document.querySelector(".md-search__input");
  document.querySelector("#__search").click();
  input.focus();
  input.value = %r;
  for (let tries = 0; tries < 200; tries++) {
    input.dispatchEvent(new Event("input", { bubbles: true }));
    input.dispatchEvent(new KeyboardEvent("keyup", { bubbles: true }));
    await new Promise((next) => setTimeout(next, 100));
    const links = [...document.querySelectorAll(".md-search-result__item > .md-search-result__link")];
    if (links.length) return links.map((link) => link.href);
  }
  return [];
})()"""


def main() -> None:
    site, screenshots = (Path(argument).resolve() for argument in sys.argv[1:3])
    screenshots.mkdir(parents=True, exist_ok=True)
    pages = sorted(path for path in site.rglob("*.html") if path.name != "404.html")
    wrong = [*check_links(site, pages)]
    with browser() as tab:
        for name, width in WIDTHS.items():
            for page in pages:
                wrong += check_layout(tab, site, page, name, width)
        wrong += check_searches(tab, site)
        for page in SHOWN:
            wrong += check_colours(tab, site, page, screenshots)
        wrong += sorted({f"asks the net for {url}" for url in tab.requested if not url.startswith(("file:", "data:"))})
    print(f"{len(pages)} pages at {len(WIDTHS)} widths, {len(SEARCHES)} searches; screenshots in {screenshots}")
    if wrong:
        sys.exit("\n".join(["error: the site", *wrong]))


def check_layout(tab: Browser, site: Path, page: Path, name: str, width: int) -> Iterator[str]:
    tab.show(width)
    tab.open(page.as_uri())
    facts = tab.evaluate(FACTS)
    where = f"{page.relative_to(site)} on a {name}"
    if facts["page"] > 0:
        yield f"{where}: is {facts['page']} pixels wider than the window"
    if name == "desktop":
        yield from (f"{where}: cuts off the {kind} {text!r}" for kind in ("tables", "code") for text in facts[kind])
    yield from (f"{where}: has no picture {source}" for source in facts["pictures"])


def check_searches(tab: Browser, site: Path) -> Iterator[str]:
    tab.show(WIDTHS["desktop"])
    for words, first in SEARCHES.items():
        tab.open((site / "index.html").as_uri())
        found = [Path(unquote(urlsplit(url).path)).relative_to(site).as_posix() for url in tab.evaluate(SEARCH % words)]
        if not found or (first and found[0] != first):
            yield f"searched for {words}: finds {', '.join(found[:3]) or 'nothing'}, not {first or 'a page'} first"


def check_links(site: Path, pages: list[Path]) -> Iterator[str]:
    """Of links within the site: that the file is there, and the place in it."""
    texts = {page: page.read_text() for page in pages}
    names = {page: set(re.findall(r'\bid="([^"]+)"', text)) for page, text in texts.items()}
    for page, text in texts.items():
        for link in sorted(set(re.findall(r'<a\b[^>]*?\bhref="([^"]*)"', text))):
            parts = urlsplit(unescape(link))
            if parts.scheme or parts.netloc:
                continue
            target = (page.parent / unquote(parts.path)).resolve() if parts.path else page
            target = target / "index.html" if target.is_dir() else target
            if not target.exists():
                yield f"{page.relative_to(site)}: {link} leads nowhere"
            elif parts.fragment and target in names and unquote(parts.fragment) not in names[target] | {"__top"}:
                yield f"{page.relative_to(site)}: {link}: no such place"


def check_colours(tab: Browser, site: Path, page: str, folder: Path) -> Iterator[str]:
    """With a screenshot of each width in each mode."""
    for name, width in WIDTHS.items():
        for dark in (False, True):
            tab.show(width, dark=dark)
            tab.open((site / f"{page}.html").as_uri())
            tab.evaluate("new Promise((next) => setTimeout(next, 300))")
            tab.screenshot(folder / f"{page.replace('/', '-')}-{name}-{'dark' if dark else 'light'}.png")
            if (max(tab.evaluate(GROUND)) < 100) != dark:
                yield f"{page} on a {name}: is not {'dark' if dark else 'light'} where the system is"


if __name__ == "__main__":
    main()
