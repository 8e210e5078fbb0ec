"""Checks what `make wheel` has built. It needs the standard library, and for `smoke` the installed wheel.

python .ci/check_dist.py contents dist    the sdist holds what git tracks, the wheel the engines for all GPUs
python check_dist.py smoke                in an empty folder: what is installed imports, steps, saves and loads
"""

import json
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
NOT_IN_SDIST = {".gitignore"}


def check_contents(dist: Path) -> None:
    (sdist,) = dist.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        packed = {name.partition("/")[2] for name in archive.getnames()}
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    missing = sorted(set(tracked.splitlines()) - packed - NOT_IN_SDIST)
    assert not missing, f"{sdist.name} lacks {', '.join(missing)}: see MANIFEST.in"
    for wheel in dist.glob("*.whl"):
        with zipfile.ZipFile(wheel) as archive:
            names = archive.namelist()
            engines = json.loads(archive.read("fused_optim/_build_info.json"))
        folders = {name.partition("/")[0].partition("-")[0] for name in names}
        assert folders == {"fused_optim"}, f"{wheel.name} holds {', '.join(sorted(folders))}"
        for name, engine in engines.items():
            print(f"{wheel.name}: {name}:", engine["reason"] or ", ".join(engine.get("archs") or engine["isas"]))


def check_installed() -> None:
    import importlib
    from importlib.metadata import version

    import torch

    import fused_optim
    from fused_optim.backends import build_info, load_engine

    folder = Path(fused_optim.__file__).parent
    assert folder.parent.name == "site-packages" and not any(Path().iterdir()), "run it in an empty folder"
    assert fused_optim.__version__ == version("fused_optim")
    for name in ("quantized", "checkpoint", "compat.apex", "compat.transformer_engine", "tools.planner"):
        importlib.import_module(f"fused_optim.{name}")
    for name, engine in build_info().items():
        assert not engine["built"] or load_engine(name)[0], load_engine(name)[1]

    check_steps(torch, fused_optim)
    for arguments in (["info"], ["plan", "--params", "1e9", "--state", "int8"]):
        subprocess.run([sys.executable, "-m", "fused_optim", *arguments], check=True, stdout=subprocess.DEVNULL)
    print(f"fused_optim {fused_optim.__version__} works with torch {torch.__version__}")


def check_steps(torch, fused_optim) -> None:  # type: ignore[no-untyped-def]
    """In FP32 as torch.optim.AdamW; in 8 bits as before a state dict was loaded."""
    torch.manual_seed(0)
    start, gradients = torch.randn(64, 256), torch.randn(4, 64, 256)

    def train(optimizer_class, dtype, state=None, steps=gradients, values=start, **options):  # type: ignore[no-untyped-def]
        param = torch.nn.Parameter(values.to(dtype, copy=True))
        optimizer = optimizer_class([param], lr=1e-2, **options)
        if state is not None:
            optimizer.load_state_dict(state)
        for gradient in steps:
            param.grad = gradient.to(dtype)
            optimizer.step()
        return param.detach(), optimizer.state_dict()

    ours, theirs = (train(of, torch.float32)[0] for of in (fused_optim.FusedAdamW, torch.optim.AdamW))
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)
    eight_bits = {"exp_avg_dtype": torch.int8, "exp_avg_sq_dtype": torch.int8, "store_param_remainders": True}
    whole, _ = train(fused_optim.FusedAdamW, torch.bfloat16, **eight_bits)
    values, state = train(fused_optim.FusedAdamW, torch.bfloat16, steps=gradients[:2], **eight_bits)
    with tempfile.TemporaryFile() as file:
        torch.save(state, file)
        file.seek(0)
        state = torch.load(file, weights_only=True)
    resumed, _ = train(fused_optim.FusedAdamW, torch.bfloat16, state, gradients[2:], values, **eight_bits)
    assert torch.equal(whole, resumed) and not torch.equal(values, resumed)


if __name__ == "__main__":
    check_contents(Path(sys.argv[2])) if sys.argv[1] == "contents" else check_installed()
