"""Finds phrases in the documents that readers stumble over; docs/contributing/style.md says what to write instead.

    python .ci/check_prose.py [FILE ...]

Reads README, CHANGELOG's unreleased part, and every page. Code and comments are left out; so is what stands between
`<!-- prose: off -->` and `<!-- prose: on -->`. Prints `file:line: phrase: advice`, and exits with 1 if there is any.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

# What is not to be written, as a regular expression of words, and what is.
PHRASES = {
    r"mean(?:s|ing)? nothing": "are ignored",
    r"(?:was|were) wanted|\*\*missed\*\*": "known limits, in benchmarks/README.md, without the target",
    r"of copy(?! bandwidth)": "% of the GPU's copy bandwidth",
    r"(?:that )?training does not feel": "in the background; the cost in seconds, with the length of a step",
    r"how to come from|come over from": "migrate from",
    r"when to take|take another one": "when to choose",
    r"go(?:es|ing)? on(?! to\b)|went on|gone on": "continue",
    r"anew": "again; start with new states",
    r"in place of": "instead of",
    r"beside": "next to, in addition to, separate",
    r"mended": "fixed",
    r"in the rotating way": "by rotating rounding",
    r"hand(?:s|ed)? over": "pass",
    r"without a word": "silently",
    r"for ever": "forever",
    r"whatever way|by whatever": "in any way",
    r"told of|tells? of": "report, name",
    r"lacks? words|has no words|have words": "cannot express",
    r"is worth(?! it)": "needs",
    r"what (?:is|are) whole|that (?:is|are) whole": "complete",
    r"somewhat|rather|quite|very": "leave it out, or say how much",
    r"simply|just|easily|obviously|of course": "leave it out",
    r"utili[sz]e": "use",
    r"in order to": "to",
    r"(?:initial|recogn|optim|quant|serial|synchron|normal)is(?:e|ed|es|ing|ation)": "American spelling: -ize",
}
HASH = re.compile(r"(?:\bcommits? |\bat |\bsince |, )`(?=[0-9a-f]*\d)(?=\d*[a-f])[0-9a-f]{7,40}`")


def blanked(text: str, pattern: str) -> str:
    """The text with what the pattern matches as blank lines, so that the others keep their numbers."""
    return re.sub(pattern, lambda match: "\n" * match[0].count("\n"), text, flags=re.DOTALL | re.MULTILINE)


def running_text(page: str) -> str:
    page = blanked(page, r"^<!-- prose: off -->.*?<!-- prose: on -->")
    return blanked(blanked(page, r"^ *<!--.*?-->"), r"^ *```.*?^ *```$")


def found_in(page: str) -> Iterator[tuple[int, str, str]]:
    """The line, the phrase and the advice. A phrase may go over the end of a line."""
    text = running_text(page)
    for match in HASH.finditer(text):
        yield text.count("\n", 0, match.start()) + 1, match[0], "commits belong into the results' README"
    prose = blanked(text, r"`(?:[^`\n]|\n(?!\n))+`|\]\([^)]*\)")
    for phrase, advice in PHRASES.items():
        words = phrase.replace(" ", r"\s+")
        for match in re.finditer(rf"(?<!\w)(?:{words})(?!\w)", prose, re.IGNORECASE):
            yield prose.count("\n", 0, match.start()) + 1, " ".join(match[0].split()), advice


def pages() -> list[Path]:
    return [*sorted(ROOT.glob("*.md")), *sorted(ROOT.glob("docs/**/*.md")), ROOT / "benchmarks" / "README.md"]


def main(names: list[str]) -> int:
    count = 0
    for path in map(Path, names) if names else pages():
        text = path.read_text()
        if path.name == "CHANGELOG.md":
            text = text.split("\n## [0")[0]
        for line, phrase, advice in sorted(found_in(text)):
            print(f"{path.resolve().relative_to(ROOT)}:{line}: {phrase!r}: {advice}")
            count += 1
    return min(count, 1)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
