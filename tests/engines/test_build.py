"""The engines: what was built, how one is chosen, and what they refuse."""

from __future__ import annotations

import importlib
import importlib.util
import re
import subprocess
import sys
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

import fused_optim
from build_script import load_build_script
from fused_optim import FusedAdam, backends
from fused_optim.backends import COMPILED, backend_for, build_info, load_engine
from fused_optim.backends.tables import tables
from fused_optim.rules import RULES
from fused_optim.tools.info import info
from shard_works import ELEMENT_NUMBERS, shard_work


@pytest.fixture
def _as_in_a_new_process() -> Iterator[None]:
    """What is said and asked once per process."""
    caches: tuple[Any, ...] = backends._unsupported_driver, backends._unsupported_gpu
    caches += backends._warn_of_the_reference, backends._backend_for
    for cached in caches:
        cached.cache_clear()
    yield
    for cached in caches:
        cached.cache_clear()


def test_info() -> None:
    command = [sys.executable, "-m", "fused_optim", "info"]
    root = Path(fused_optim.__file__).parent.parent
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == info()
    lines = done.stdout.splitlines()
    assert fused_optim.__version__ in lines[0] and torch.__version__ in lines[0]
    for name in COMPILED:
        available = load_engine(name)[0] is not None
        assert any(line.startswith(name) and ("not available" in line) != available for line in lines)


@pytest.mark.parametrize("name", COMPILED)
def test_built_engines_import(name: str) -> None:
    built = build_info().get(name, {})
    if not built.get("built"):
        pytest.skip(f"the {name} engine is not built")
    engine = importlib.import_module(f"fused_optim._engine_{name}")  # needs neither a GPU nor a driver
    assert engine.ShardTable


def test_a_source_folder_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a checkout, Python finds its folder first: without engines, though an installation has them."""
    monkeypatch.setitem(sys.modules, "fused_optim._engine_cpu", None)
    monkeypatch.setattr(backends, "build_info", dict)
    engine, reason = load_engine("cpu")
    assert engine is None and "is a source folder" in reason and "pip install -e" in reason
    monkeypatch.setattr(backends, "build_info", lambda: {"cpu": {"built": True, "reason": None}})
    assert "import of fused_optim._engine_cpu" in load_engine("cpu")[1]  # it was built, and does not load


def test_unknown_backend(use_backend: Any) -> None:
    param = torch.nn.Parameter(torch.ones(3))
    param.grad = torch.ones(3)
    optimizer = FusedAdam([param])
    use_backend("nonsense")
    with pytest.raises(ValueError, match="FUSED_OPTIM_BACKEND='nonsense': expected one of torch, cpu, cuda"):
        optimizer.step()
    assert bool((param == 1).all())


@pytest.mark.usefixtures("_as_in_a_new_process")
def test_missing_backend(use_backend: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A forced backend that is not there is an error; one that was not asked for is replaced by the reference."""
    monkeypatch.setitem(sys.modules, "fused_optim._engine_cpu", None)
    with pytest.warns(UserWarning, match="by its PyTorch reference"):
        assert backend_for("cpu") == "torch"
    use_backend("cpu")
    with pytest.raises(RuntimeError, match="FUSED_OPTIM_BACKEND=cpu, but that engine is not available: "):
        backend_for("cpu")


def cuda_engine(monkeypatch: pytest.MonkeyPatch, **own: Any) -> None:
    """One that has whatever it is asked for."""
    engine = ModuleType("_engine_cuda")
    engine.__dict__.update(own, TABLES=tables(), __getattr__=lambda name: None)
    monkeypatch.setitem(sys.modules, "fused_optim._engine_cuda", engine)


def test_backend_of_another_device(use_backend: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    cuda_engine(monkeypatch)
    use_backend("cuda")
    with pytest.raises(RuntimeError, match="FUSED_OPTIM_BACKEND=cuda cannot update parameters on cpu"):
        backend_for("cpu")


@pytest.mark.filterwarnings("ignore:fused_optim updates parameters on")  # where an engine is not built
def test_backends_by_device(use_backend: Any) -> None:
    for name in COMPILED:
        assert backend_for(name) == (name if load_engine(name)[0] else "torch")
    assert backend_for("xpu") == "torch"
    use_backend("torch")
    assert {backend_for(name) for name in (*COMPILED, "xpu")} == {"torch"}


REASON = "no nvcc found\nlooked everywhere"
WARNED = r"parameters on {0} by its PyTorch reference, .* its {0} engine is not available \(no nvcc found\)\. Install"


@pytest.mark.usefixtures("_as_in_a_new_process")
@pytest.mark.parametrize("name", COMPILED)
def test_the_reference_in_place_of_an_engine_is_announced_once(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backends, "load_engine", lambda _: (None, REASON))
    with pytest.warns(UserWarning, match=WARNED.format(name)) as caught:
        assert [backend_for(name) for _ in range(3)] == ["torch"] * 3
    assert len(caught) == 1
    assert ("150 to 300 times slower" in str(caught[0].message)) == (name == "cuda")


def machine(
    monkeypatch: pytest.MonkeyPatch, *, runtime: int = 13000, driver: int = 13000, archs: Sequence[str] = ("80", "90")
) -> None:
    """An engine that was built elsewhere, on a machine with two GPUs, of compute capability 9.0 and 8.0."""
    cuda_engine(monkeypatch, cuda_versions=lambda: (runtime, driver))
    monkeypatch.setattr(backends, "build_info", lambda: {"cuda": {"built": True, "archs": [*archs]}})
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: [(9, 0), (8, 0)][index])
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: f"GeForce {index}")


def check_announced(text: str) -> None:
    """That the reference takes the place of the engine, with this reason; an empty one: that it does not."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert backend_for("cuda") == ("torch" if text else "cuda")
    assert [bool(re.search(text, str(warning.message))) for warning in caught] == [True] * bool(text)
    (gpus,) = [line for line in info().splitlines() if line.startswith("GPUs")]
    assert gpus.startswith("GPUs   GeForce 0, GeForce 1") and bool(re.search("torch updates.*" + text, gpus)) == bool(
        text
    )


@pytest.mark.usefixtures("_as_in_a_new_process")
@pytest.mark.parametrize(
    ("archs", "needed"),
    [
        ("75", ""),
        ("80 90 100", ""),
        ("90", "9.0"),
        ("90a 100a", "9.0"),
        ("86 89 120", "8.6"),
        ("100", "10.0"),
        ("", ""),
    ],
)
def test_gpus_that_are_too_old_are_announced(archs: str, needed: str, monkeypatch: pytest.MonkeyPatch) -> None:
    machine(monkeypatch, archs=archs.split())
    number, found = (0, "9.0") if needed == "10.0" else (1, "8.0")
    text = (
        rf"GPU {number} \(GeForce {number}\) has compute capability {found}, .* needs {needed} .* CUDA_VISIBLE_DEVICES"
    )
    check_announced(text if needed else "")


@pytest.mark.usefixtures("_as_in_a_new_process")
@pytest.mark.parametrize(("runtime", "driver"), [(13000, 12080), (12080, 11040)])
def test_drivers_that_are_too_old_are_announced(runtime: int, driver: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where torch was built with CUDA 12, and the wheel with 13."""
    machine(monkeypatch, runtime=runtime, driver=driver)
    release = rf"{driver // 1000}\.{driver // 10 % 10}"
    check_announced(rf"was built with CUDA {runtime // 1000}, .* driver runs CUDA {release} .* toolkit of CUDA 1[12]")


@pytest.mark.usefixtures("_as_in_a_new_process")
@pytest.mark.parametrize(("runtime", "driver"), [(13000, 13000), (13020, 13000), (12080, 13010), (13000, 0)])
def test_drivers_run_all_of_their_major_release(runtime: int, driver: int, monkeypatch: pytest.MonkeyPatch) -> None:
    machine(monkeypatch, runtime=runtime, driver=driver)
    check_announced("")


def test_the_engine_knows_its_runtime_without_a_driver() -> None:
    engine, reason = load_engine("cuda")
    if engine is None:
        pytest.skip(reason)
    runtime, driver = engine.cuda_versions()
    release = re.findall(r"nvcc (\d+)\.(\d+)", str(build_info()["cuda"]["compiler"]))
    assert [(str(runtime // 1000), str(runtime % 1000 // 10))] == release
    assert driver > 0 if torch.cuda.is_available() else driver >= 0


@pytest.mark.parametrize(
    ("cuda", "said"), [(None, "none: torch .* is a build without CUDA, "), ("13.0", "none visible, ")]
)
def test_info_says_why_there_is_no_gpu(cuda: str | None, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    assert re.search(f"^GPUs   {said}so nothing uses the cuda engine$", info(), re.MULTILINE)


@pytest.mark.usefixtures("_as_in_a_new_process")
def test_who_chooses_the_reference_is_not_warned(use_backend: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backends, "load_engine", lambda _: (None, REASON))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert backend_for("xpu") == "torch"  # no engine is made for it
        use_backend("torch")
        assert {backend_for(name) for name in COMPILED} == {"torch"}


# --- what setup.py compiles -------------------------------------------------------------------------------------------

ROOT = Path(__file__).parents[2]


@pytest.fixture
def setup_script(monkeypatch: pytest.MonkeyPatch) -> Any:
    return load_build_script(monkeypatch)


@pytest.mark.parametrize(
    ("archs", "codes"),
    [
        ("80 90 100", "80:sm_80 90:sm_90 90:sm_100 90:compute_90"),
        ("100", "90:sm_100 90:compute_90"),  # a choice changes the code of none
        ("80", "80:sm_80 80:compute_80"),
        ("86 89 120", "80:sm_86 89:sm_89 90:sm_120 90:compute_90"),
        ("90a 100a", "90a:sm_90a 100a:sm_100a 100a:compute_100a"),
        ("75", "75:sm_75 75:compute_75"),
    ],
)
def test_architectures_from_90_on_share_their_ptx(archs: str, codes: str, setup_script: Any) -> None:
    options = (option.partition(",code=") for option in setup_script.codes_of(archs.split()))
    assert [f"{ptx.removeprefix('-gencode=arch=compute_')}:{code}" for ptx, _, code in options] == codes.split()


def test_products_are_compiled_for_hopper_alone(setup_script: Any) -> None:
    """Other builds have functions in their place that say so."""
    for_hopper = ["-gencode=arch=compute_90a,code=sm_90a"]
    for archs in (["90"], ["80", "90", "100"], ["90a"]):
        assert setup_script.codes_of_products(archs) == for_hopper
    for archs in (["80"], ["89", "120"]):
        assert setup_script.codes_of_products(archs) == [*setup_script.codes_of(archs), "-DFUSED_OPTIM_WITHOUT_HOPPER"]


def test_code_that_shares_a_ptx_does_not_tell_its_architectures_apart() -> None:
    compared = re.compile(r"__CUDA_ARCH__ *([<>=!]+) *(\d+)")
    sources = [path.read_text() for path in (ROOT / "csrc").rglob("*") if path.is_file()]
    assert {found for source in sources for found in compared.findall(source)} == {(">=", "890")}


def test_specialized_constants_are_inline() -> None:
    """Newer compilers (g++ 16) define others in each file, which do not link."""
    sources = {path: path.read_text() for path in (ROOT / "csrc").rglob("*") if path.is_file()}
    assert not [str(path) for path, text in sources.items() if re.search(r"template <>\s*constexpr \w+ \w+<", text)]


def test_the_table_of_rules_is_written_once(setup_script: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same text leaves the headers alone, which every object depends on; another rule is appended."""
    monkeypatch.chdir(ROOT)
    folder = tmp_path / "generated"
    setup_script.write_rules(setup_script.read_rules(), folder)
    table, headers = folder / "rules_table.h", folder / "rules_headers.h"
    before, written = table.read_text(), table.stat().st_mtime_ns
    setup_script.write_rules(setup_script.read_rules(), folder)
    assert table.stat().st_mtime_ns == written
    added = tmp_path / "mine.toml"
    added.write_text('[my_rule]\nheader = "mine.h"\nhyperparameters = ["beta1"]\nown_kernels = ["int8"]\n')
    monkeypatch.setenv("FUSED_OPTIM_RULES", str(added))
    rules = setup_script.read_rules()
    setup_script.write_rules(rules, folder)
    assert rules[-1].enumerator == "kMyRule"
    assert [rule.name for rule in rules] == [*RULES, "my_rule"]
    assert 'ROW(kMyRule, "my_rule", (), ("beta1"), true)' in table.read_text() != before
    assert f'#include "{tmp_path}/mine.h"' in headers.read_text()
    assert rules[-1].own_kernels == ["kInt8"]


# --- the last check before raw addresses are used ---------------------------------------------------------------------

GROUP: dict[str, Any] = {
    **{"lr": 0.1, "weight_decay": 0.0, "values": [0.9, 0.99, 1e-8, 1.0], "step": 1},
    **{"decoupled": True, "maximize": False, "stochastic_rounding": True},
}
SHARD: dict[str, Any] = {
    **{"grad": 64, "param": 64, "master": 0, "states": (64, 64), "scales": 0, "numel": 8, "offset": 0},
    **{"inner_local": 8, "inner_global": 8, "key": 0, "grad_type": 0, "param_type": 0, "master_kind": 0},
    **{"state_formats": (0, 0), "block_log2": 7},
}


def loaded(name: str) -> ModuleType:
    engine = load_engine(name)[0]
    return engine if engine is not None else pytest.skip(f"no {name} engine")


def empty_table(name: str, groups: list[int], rule: int = 0, names: Sequence[str] = ("m", "v")) -> Any:
    """Two param groups, and shards that are not described yet."""
    engine = loaded(name)
    reader = engine.TensorReader(None, Tensor, keys=[], examples=[], copied=[])
    return engine.ShardTable(rule, names, groups, 2, reader, reader, ELEMENT_NUMBERS, DTensor)


@pytest.mark.parametrize("name", COMPILED)
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"grad": 0}, "addresses of all tensors"),
        ({"param": 0}, "the address of the parameter"),
        ({"states": (0, 64)}, "addresses of all tensors"),
        ({"states": (64, 0)}, "addresses of all tensors"),
        ({"states": (64,)}, "as many states as the rule has"),
        ({"state_formats": (0, 0, 0)}, "as many states as the rule has"),
        ({"master_kind": 1}, "the address of the master"),
        ({"state_formats": (4, 0)}, "the address of the scales"),
        ({"state_formats": (0, 2)}, "the address of the scales"),
        ({"block_log2": 4}, "blocks of 32, 64 or 128"),
        ({"block_log2": 8}, "blocks of 32, 64 or 128"),
        ({"inner_local": 0}, "inner_local > 0"),
        ({"grad_type": 3}, "a known element type"),
        ({"param_type": -1}, "a known element type"),
        ({"state_formats": (5, 0)}, "a known state format"),
        ({"state_formats": (0, 5)}, "a known state format"),
        ({"master_kind": 5, "master": 64}, "a known master"),
        ({"master_kind": 4}, "the address of the master"),
        ({"master_kind": 4, "master": 64, "scales": 0}, "the address of the scales"),
        ({"master_kind": 256}, "a known master"),  # 0 in its low 8 bits
        ({"grad_type": 256}, "a known element type"),
        ({"param_type": 256}, "a known element type"),
        ({"state_formats": (256, 0)}, "a known state format"),
        ({"state_formats": (0, 256)}, "a known state format"),
        ({"master_kind": 2, "master": 64}, "a BF16 parameter"),
        ({"weight_format": 0, "weight_scales": 64}, "an FP32 or FP16 master of a quantized parameter"),
        ({"weight_format": 0, "master_kind": 1, "master": 64}, "the scales of a quantized parameter"),
        ({"weight_format": 5, "master_kind": 1, "master": 64}, "a known format of weights"),
        ({"weight_format": 2, "weight_scales": 64, "master_kind": 1, "master": 64}, "a format .* the update can write"),
        ({"weight_format": 4, "weight_scales": 64, "master_kind": 1, "master": 64}, "a format .* the update can write"),
        ({"master_kind": 3, "master": 64, "param_type": 2}, "a BF16 parameter"),
    ],
    ids=str,
)
def test_engine_refuses(name: str, change: dict[str, Any], message: str) -> None:
    table = empty_table(name, [0, 0])
    table.set_group(0, **GROUP)
    table.set_shard(0, shard_work(**SHARD))
    with pytest.raises(ValueError, match=f"fused_optim: shard 1: expected {message}"):
        table.set_shard(1, shard_work(**{**SHARD, **change}))


@pytest.mark.parametrize("name", COMPILED)
def test_engine_refuses_other_types_and_numbers(name: str) -> None:
    with pytest.raises(ValueError, match="shards are ordered by param group"):
        empty_table(name, [1, 0])
    with pytest.raises(ValueError, match="shards are ordered by param group"):
        empty_table(name, [0, 2])
    for rule in (-1, 100, 256):
        with pytest.raises(ValueError, match="expected a known update rule"):
            empty_table(name, [0], rule)
    with pytest.raises(ValueError, match="expected a name of each state"):
        empty_table(name, [0], names=["m"])
    table = empty_table(name, [0, 1])
    with pytest.raises(IndexError):
        table.set_group(2, **GROUP)
    with pytest.raises(IndexError):
        table.set_shard(2, shard_work(**SHARD))
    with pytest.raises(TypeError):
        table.set_group(0, **{**GROUP, "step": "one"})
    with pytest.raises(RuntimeError, match="Unable to cast"):
        table.set_shard(0, shard_work(**{**SHARD, "numel": -1}))
    with pytest.raises(ValueError, match="one cached tuple per shard"):
        table.refresh([], "grad")
    with pytest.raises(ValueError, match="expected a CachedShard"):
        table.cache(0, (Tensor(), None, {}))


GRADIENTS: dict[str, list[int]] = {"addresses": [64, 64], "numels": [8, 8], "types": [0, 1], "groups": [0, 0]}


@pytest.mark.parametrize("name", COMPILED)
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"addresses": [64, 0]}, "gradient 1: expected an address"),
        ({"addresses": [64, 65]}, "gradient 1: expected an address that is a multiple of the element's size"),
        ({"numels": [1 << 48, 8]}, r"gradient 0: expected fewer than 2\^48 elements"),
        ({"types": [0, 3]}, "gradient 1: expected a known element type"),
        ({"groups": [16, 0]}, "gradient 0: expected a group below 16"),
        ({"groups": [0]}, "expected lists of one length"),
    ],
    ids=str,
)
def test_engine_refuses_gradients(name: str, change: dict[str, list[int]], message: str) -> None:
    engine = loaded(name)
    with pytest.raises(ValueError, match=f"fused_optim: {message}"):
        engine.Gradients(**{**GRADIENTS, **change})


@pytest.mark.parametrize("name", COMPILED)
def test_engine_refuses_results(name: str) -> None:
    engine = loaded(name)
    where = {"cpu": {"threads": 1}, "cuda": {"device": 0, "stream": 0}}[name]
    workspace = {"workspace": 64} if name == "cuda" else {}
    norm: dict[str, Any] = {"infinity": False, "group_count": 1, "max_norm": 1.0, "sums": 64, "result": 64}
    gradients = engine.Gradients(**{**GRADIENTS, "groups": [0, 1]})
    for change in ({}, {"group_count": 0}, {"group_count": 17}):
        with pytest.raises(ValueError, match="fused_optim: expected 1 to 16 groups, at least as many as the gradients"):
            gradients.norm(**{**norm, **change}, **where, **workspace)
    for change in ({"sums": 0}, {"result": 0}):
        with pytest.raises(ValueError, match="fused_optim: expected addresses of the results"):
            gradients.norm(**{**norm, "group_count": 2, **change}, **where, **workspace)
    with pytest.raises(ValueError, match="fused_optim: expected the address of the factor"):
        gradients.scale(factor=0, **where)
