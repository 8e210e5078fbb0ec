"""Checks what `make wheel` has built. It needs the standard library, and for `smoke` the installed wheel.

python .ci/check_dist.py contents dist    the sdist holds what git tracks, wheels hold the engines and are small
python check_dist.py smoke                in an empty folder, with torch and nothing else, where no compiler is found:
                                          what is installed works, and its engines load
"""

import json
import shutil
import subprocess
import sys
import tarfile
import zipfile
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).parents[1]
NOT_IN_SDIST = {".gitignore"}
COMPILERS = ("nvcc", "g++", "c++", "clang++", "gcc", "cc", "ninja")
LARGEST_WHEEL = 25e6  # bytes


def check_contents(dist: Path) -> None:
    (sdist,) = dist.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        packed = {name.partition("/")[2] for name in archive.getnames()}
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    missing = sorted(set(tracked.splitlines()) - packed - NOT_IN_SDIST)
    assert not missing, f"{sdist.name} lacks {', '.join(missing)}: see MANIFEST.in"
    for wheel in sorted(dist.glob("*.whl")):
        check_wheel(wheel)


def check_wheel(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        engines = json.loads(archive.read("fused_optim/_build_info.json"))
    size = wheel.stat().st_size
    assert size <= LARGEST_WHEEL, f"{wheel.name} has {size / 1e6:.1f} MB, more than {LARGEST_WHEEL / 1e6:.0f} MB"
    folders = {name.partition("/")[0].partition("-")[0] for name in names}
    assert folders == {"fused_optim"}, f"{wheel.name} holds {', '.join(sorted(folders))}"
    modules = {Path(name).name.partition(".")[0] for name in names if name.endswith(".so")}
    built = {f"_engine_{name}" for name, engine in engines.items() if engine["built"]}
    assert modules == built, f"{wheel.name} holds {sorted(modules)} and says that {sorted(built)} were built"
    for name, engine in engines.items():
        print(f"{wheel.name}: {name}:", engine["reason"] or ", ".join(engine.get("archs") or engine["isas"]))


def check_installed() -> None:
    from importlib.metadata import version

    import smoke
    import torch

    import fused_optim
    from fused_optim.backends import build_info, load_engine

    folder = Path(fused_optim.__file__).parent
    assert folder.parent.name == "site-packages" and not any(Path().iterdir()), "run it in an empty folder"
    beside = [name for name in ("numpy", "safetensors", "tqdm", "matplotlib") if find_spec(name)]
    assert not beside, f"run it where torch alone is installed, without {', '.join(beside)}"
    compilers = [name for name in COMPILERS if shutil.which(name)]
    assert not compilers, f"run it where PATH has no {', '.join(compilers)}"
    assert fused_optim.__version__ == version("fused_optim")
    for name, engine in build_info().items():
        assert not engine["built"] or load_engine(name)[0], load_engine(name)[1]
    smoke.main()
    print(f"fused_optim {fused_optim.__version__} works with torch {torch.__version__} alone")


if __name__ == "__main__":
    check_contents(Path(sys.argv[2])) if sys.argv[1] == "contents" else check_installed()
