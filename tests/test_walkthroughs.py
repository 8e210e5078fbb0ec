"""Pages whose commands are run as they stand there, and what they print is compared."""

from __future__ import annotations

from pathlib import Path

import pytest

from walkthrough import follow

pytestmark = pytest.mark.timeout(900)  # many processes, each of which imports torch


# The tutorial trains with the script of how_to/fsdp2.md, which goes on on another number of ranks, too: three times.
PAGES = ["how_to/fsdp2.md", "tutorials/resume_on_another_cluster.md", "tutorials/8b_on_one_gpu.md"]


@pytest.mark.long
@pytest.mark.parametrize("page", PAGES)
def test_pages_can_be_followed(page: str, tmp_path: Path) -> None:
    follow(page, tmp_path)
