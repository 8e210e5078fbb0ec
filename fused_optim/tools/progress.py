"""Progress bars on long work, where somebody watches and tqdm is installed."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

T = TypeVar("T")


def progress(items: Iterable[T], doing: str, size: Callable[[T], int]) -> Iterator[T]:
    """The items one after the other; a bar on stderr counts the bytes, ``size(item)``, of those that are done."""
    items = list(items)
    if not sys.stderr.isatty() or importlib.util.find_spec("tqdm") is None:
        yield from items
        return
    from tqdm import tqdm

    with tqdm(total=sum(map(size, items)), desc=doing, unit="B", unit_scale=True, leave=False) as bar:
        for item in items:
            yield item
            bar.update(size(item))
