"""What says which version this is, and what a release needs, without building one: `make release-check` does that."""

from __future__ import annotations

import importlib
import json
import os
import re
import shutil
import tarfile
import tomllib
import warnings
import zipfile
from pathlib import Path
from typing import Any

import pytest

import fused_optim

ROOT = Path(__file__).parents[1]
PACKAGE = Path(fused_optim.__file__).parent  # elsewhere where a wheel is tested
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PROJECT, PUBLICATION = PYPROJECT["project"], PYPROJECT["tool"]["publication"]
# Page of the reference, module whose public names it lists.
REFERENCE = {"fused_optim": "fused_optim", "quantized": "fused_optim.quantized", "checkpoint": "fused_optim.checkpoint"}


def cff() -> dict[str, str]:
    """The top-level scalars of CITATION.cff, whose YAML needs no more to be read."""
    lines = (ROOT / "CITATION.cff").read_text().splitlines()
    return dict(line.split(": ", 1) for line in lines if re.match(r"[a-z-]+: \S", line))


def test_the_version_is_in_one_place() -> None:
    """And those that must repeat it for their readers do."""
    assert "version" not in PROJECT and PROJECT["dynamic"] == ["version"]
    assert cff()["version"] == fused_optim.__version__
    newest = re.findall(r"^## \[(\d\S+)\] - (\S+)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)[0]
    assert newest == (fused_optim.__version__, cff()["date-released"])


def test_the_sdist_is_told_of_every_folder() -> None:
    """setuptools finds the package and csrc/ by itself; the rest must be named. `make wheel` compares file by file."""
    named = set((ROOT / "MANIFEST.in").read_text().split())
    found = {
        ".clang-format",
        ".ci",
        ".github",
        "benchmarks",
        "docs",
        "examples",
        "tests",
        *map(str, PROJECT["license-files"]),
    }
    found |= {path.name for path in ROOT.glob("*.md")} | {"CITATION.cff", "Makefile", "mkdocs.yml"}
    automatic = {PROJECT["readme"], *PROJECT["license-files"]}
    assert found - automatic <= named and all((ROOT / name).exists() for name in found)


@pytest.mark.parametrize("page", REFERENCE)
def test_the_reference_lists_every_public_name(page: str) -> None:
    module = importlib.import_module(REFERENCE[page])
    listed = re.findall(r"^::: (\S+)$", (ROOT / f"docs/reference/{page}.md").read_text(), re.MULTILINE)
    listed = [name for name in listed if ".options.table." not in name]  # tables of options, not names
    assert sorted(listed) == sorted(f"{module.__name__}.{name}" for name in module.__all__ if name != "__version__")


@pytest.mark.parametrize("page", ["compat", "integrations"])
def test_the_reference_lists_names_that_are_there(page: str) -> None:
    listed = re.findall(r"^::: (\S+)$", (ROOT / f"docs/reference/{page}.md").read_text(), re.MULTILINE)
    for name in listed:
        module, _, attribute = name.rpartition(".")
        source = (PACKAGE.parent / f"{module.replace('.', '/')}.py").read_text()
        assert re.search(rf"^(class|def) {attribute}\b", source, re.MULTILINE), name
    assert len(listed) >= 2


def test_every_page_is_in_the_navigation() -> None:
    """The strict build says so, too, where it can run."""
    navigation = (ROOT / "mkdocs.yml").read_text()
    pages = [path.relative_to(ROOT) for path in (*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"))]
    assert not [str(page) for page in pages if f": {page}\n" not in navigation]


# --- before and after publication -----------------------------------------------------------------------------------


def texts() -> dict[str, str]:
    """Everything that users read or run, by its path."""
    folders = ("fused_optim", "docs", "examples", "benchmarks", ".ci", ".github")
    files = [path for folder in folders for path in (ROOT / folder).rglob("*") if path.suffix in SUFFIXES]
    files += [*ROOT.glob("*.md"), ROOT / "pyproject.toml", ROOT / "mkdocs.yml", ROOT / "Makefile", ROOT / "setup.py"]
    return {str(path.relative_to(ROOT)): path.read_text() for path in files}


SUFFIXES = {".py", ".md", ".yml", ".toml", ".html"}
REGISTRIES = (
    r"\b(?:pypi\.org|pythonhosted\.org|anaconda\.org|conda\.io|ghcr\.io|docker\.io|quay\.io|nvcr\.io|npmjs\.com)\b"
)


def test_nothing_is_installed_by_a_name_that_no_registry_has() -> None:
    """Until `repository` is filled in: from a checkout or a wheel."""
    by_name = re.compile(r"pip3? (?:install|download)[^\n`]*?\s['\"]?fused[_-]optim\b(?![\w./-]*(?:\.whl|/))")
    found = {path: by_name.findall(text) for path, text in texts().items()}
    assert PUBLICATION["repository"] or not {path: names for path, names in found.items() if names}
    assert by_name.search("pip install 'fused_optim[tools]'") and by_name.search("pip install -U fused-optim")
    assert not by_name.search("pip install dist/fused_optim-0.2.0-cp312-cp312-linux_x86_64.whl")


def test_no_file_names_the_host_of_a_registry() -> None:
    assert not [path for path, text in texts().items() if re.search(REGISTRIES, text)]


@pytest.mark.parametrize("key", ["repository", "site"])
def test_addresses_are_those_of_the_publication(key: str) -> None:
    """They stand in one place; those files that must repeat them agree, and none has another."""
    address = PUBLICATION[key]
    label = {"repository": "Repository", "site": "Documentation"}[key]
    assert PROJECT.get("urls", {}).get(label, "") == address
    if key == "repository":
        assert cff().get("repository-code", "").strip("'\"") == address
    assert not address or re.fullmatch(r"https://\S+[^/]" if key == "repository" else r"https://\S+/", address)


def test_the_tag_of_a_release(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / ".ci")
    check_tag = importlib.import_module("check_tag")
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    (tmp_path / "fused_optim").symlink_to(PACKAGE)
    monkeypatch.setattr(check_tag, "ROOT", tmp_path)
    assert check_tag.expected() == f"v{fused_optim.__version__}"


# --- wheels -------------------------------------------------------------------------------------------------------


@pytest.fixture
def build_wheels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(ROOT / ".ci")
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    module = importlib.import_module("build_wheels")
    monkeypatch.setattr(module, "BUILD", tmp_path / "build")
    return module


@pytest.mark.parametrize("lost", [None, "cpu", "cuda"])
def test_a_wheel_holds_the_engines_that_it_says_it_has(
    lost: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.syspath_prepend(ROOT / ".ci")
    check_wheel = importlib.import_module("check_dist").check_wheel
    built = {"built": True, "reason": None, "compiler": "", "archs": ["80", "90"], "isas": ["avx2"]}
    with zipfile.ZipFile(tmp_path / "a.whl", "w") as archive:
        archive.writestr("fused_optim/_build_info.json", json.dumps({"cpu": built, "cuda": built}))
        for name in {"cpu", "cuda"} - {lost}:
            archive.writestr(f"fused_optim/_engine_{name}.cpython-312-x86_64-linux-gnu.so", "code")
    if lost is None:
        check_wheel(tmp_path / "a.whl")
        assert "a.whl: cuda: 80, 90" in capsys.readouterr().out
    else:
        with pytest.raises(AssertionError, match=f"says that .*'_engine_{lost}'.* were built"):
            check_wheel(tmp_path / "a.whl")


@pytest.mark.filterwarnings("error")
def test_wheels_are_built_from_the_unpacked_sdist(build_wheels: Any, tmp_path: Path, monkeypatch: Any) -> None:
    """By what every Python from 3.11.0 on has: `filter` of tarfile came with 3.11.4, and 3.12 warns without it."""
    run, (dist, packed) = build_wheels.run, (tmp_path / "dist", tmp_path / "package-1")
    for folder in (build_wheels.BUILD, dist, packed):
        folder.mkdir()
    (packed / "setup.py").write_text("as packed")
    pack = ["tar", "-czf", str(dist / "package-1.tar.gz"), "-C", str(tmp_path), "package-1"]
    monkeypatch.setattr(build_wheels, "run", lambda command: run(pack if "build" in command else command))
    monkeypatch.setattr(tarfile.TarFile, "extractall", lambda self, path: warnings.warn("no filter", stacklevel=2))
    assert (build_wheels.build_sdist(dist) / "setup.py").read_text() == "as packed"
