"""Whether a git tag is this version's, in the form that pyproject.toml gives it: python .ci/check_tag.py v0.2.0"""

import re
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]


def expected() -> str:
    publication = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["publication"]
    source = (ROOT / "fused_optim/__init__.py").read_text()
    (version,) = re.findall(r'^__version__ = "(.+)"$', source, re.MULTILINE)
    tag: str = publication["tag"].format(version=version)
    return tag


if __name__ == "__main__":
    if sys.argv[1:] != [expected()]:
        sys.exit(f"error: the tag of this version is {expected()}, not {' '.join(sys.argv[1:]) or 'empty'}")
