"""What mkdocs calls while it builds the site."""

from __future__ import annotations

import os
import re
import tomllib
from pathlib import Path
from typing import Any

PROJECT = Path(__file__).parents[1] / "pyproject.toml"
# Where a search looks first: how much more a hit on such a page counts than elsewhere. A word in a title counts as much
# as 1000 in a text, and titles of the reference are names.
BOOSTS = {"README.md": 2.0, "docs/options.md": 50.0, "docs/start.md": 2.0, "docs/reference/": 0.01, "benchmarks/": 0.3}
BOOSTS |= {"docs/development.md": 0.3, "CHANGELOG.md": 0.1, "CONTRIBUTING.md": 0.3, "docs/contributing/": 0.3}


def on_config(config: Any, **_: Any) -> Any:
    """The addresses that pyproject.toml has, or FUSED_OPTIM_REPOSITORY and FUSED_OPTIM_SITE; without them no links."""
    publication = tomllib.loads(PROJECT.read_text())["tool"]["publication"]
    repository = os.environ.get("FUSED_OPTIM_REPOSITORY", publication["repository"])
    config.site_url = os.environ.get("FUSED_OPTIM_SITE", publication["site"])
    if repository:
        config.repo_url, config.repo_name = repository, "Repository"
        config.edit_uri = f"edit/{publication['branch']}/"
    return config


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    source = page.file.src_uri
    boost = max((prefix for prefix in BOOSTS if source.startswith(prefix)), key=len, default=None)
    if boost is not None:
        page.meta.setdefault("search", {})["boost"] = BOOSTS[boost]
    if source == "README.md":
        page.meta.setdefault("hide", ["navigation", "toc"])
    return markdown


def on_page_content(html: str, **_: Any) -> str:
    """Docstrings name code as Sphinx does, :class:`FusedAdam`, which Markdown knows nothing of: the code stays."""
    return re.sub(r":(?:attr|class|func|meth|mod):(?=<code>)", "", html)
