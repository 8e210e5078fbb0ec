"""Which blocks of results the clusters of a product make: each block once, and all clusters for about as long."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from build_script import load_build_script

ROOT = Path(__file__).parents[2]
BLOCK = 256
CLUSTERS = 66  # of an H100


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("c++") or shutil.which("clang++")
    if compiler is None:
        pytest.skip("no C++ compiler")
    folder = tmp_path_factory.mktemp("blocks")
    source = Path(__file__).with_name("product_blocks.cpp")
    includes = [f"-I{ROOT / 'csrc/multi_tensor'}", f"-I{folder}"]
    with pytest.MonkeyPatch.context() as patch:
        script = load_build_script(patch)
        script.write_rules(script.read_rules(), folder)
        command = [compiler, "-std=c++17", "-Wall", "-Wextra", "-Werror", *includes]
        subprocess.run([*command, str(source), "-o", str(folder / "product_blocks")], check=True)
        yield folder / "product_blocks"


def shares(
    program: Path, batch: int, rows: int, columns: int, symmetric: bool, clusters: int = CLUSTERS
) -> tuple[Counter[tuple[int, ...]], list[float]]:
    """How often each block is made; blocks that each cluster makes, those on diagonals as five eighths."""
    command = [str(program), *(str(int(each)) for each in (batch, rows, columns, symmetric, clusters))]
    made: Counter[tuple[int, ...]] = Counter()
    times = [0.0] * clusters
    for line in subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines():
        cluster, matrix, row, column, is_halved = map(int, line.split())
        assert bool(is_halved) == (symmetric and row == column)
        made[matrix, row, column] += 1
        times[cluster] += 0.625 if is_halved else 1.0
    return made, times


@pytest.mark.parametrize("clusters", [1, 2, 7, 66])
@pytest.mark.parametrize(
    ("batch", "rows", "columns"),
    [(1, 8, 8), (3, 256, 264), (70, 256, 256), (2, 520, 520), (5, 1024, 300), (4, 2048, 2048), (1, 14336, 4096)],
)
def test_each_block_is_made_once(program: Path, batch: int, rows: int, columns: int, clusters: int) -> None:
    down, across = -(-rows // BLOCK), -(-columns // BLOCK)
    whole = {(matrix, i, j) for matrix in range(batch) for i in range(down) for j in range(across)}
    made, times = shares(program, batch, rows, columns, False, clusters)
    assert made == Counter(whole) and max(times) == -(-len(whole) // clusters)
    lower = {(matrix, i, j) for matrix in range(batch) for i in range(down) for j in range(i + 1)}
    made, _ = shares(program, batch, rows, rows, True, clusters)
    assert made == Counter(lower)


@pytest.mark.parametrize(
    ("batch", "size", "longest"),
    [
        (1, 2048, 1.0),
        (2, 2048, 1.25),
        (4, 2048, 2.25),
        (6, 2048, 3.125),
        (16, 2048, 8.0),
        (1, 4096, 2.0),
        (2, 4096, 4.0),
    ],
)
def test_clusters_take_about_as_long(program: Path, batch: int, size: int, longest: float) -> None:
    """With whole blocks alone four of 2048 x 2048 take three rounds, two of 4096 x 4096 five."""
    _, times = shares(program, batch, size, size, True)
    assert max(times) == longest
