"""What mkdocs calls while it builds the site."""

import re
from typing import Any


def on_page_content(html: str, **_: Any) -> str:
    """Docstrings name code as Sphinx does, :class:`FusedAdam`, which Markdown knows nothing of: the code stays."""
    return re.sub(r":(?:attr|class|func|meth|mod):(?=<code>)", "", html)
