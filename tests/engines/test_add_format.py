"""The steps of docs/contributing/adding.md, "A state format", done with a format of the test's own."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

# File, what is there, what stands behind it then.
STEPS = [
    (
        "csrc/multi_tensor/table.h",
        'ROW(kInt8, "int8", 1, true)',
        ' \\\n    ROW(kToy8, "toy8", 1, true)',
    ),
    (
        "csrc/multi_tensor/formats.h",
        "        return int8_placed(quarter_of_bits(clamp_top(root * inverse, kTop)), 1.0f / kUnit, u);\n    }\n};\n",
        """
template <>
struct SignedCodec<Format::kToy8> {
    static constexpr Format format = Format::kToy8;
    using Bits = int8_t;
    FUSED_OPTIM_HD static float decode(uint32_t bits, float scale) { return signed_byte(bits) * scale; }
    FUSED_OPTIM_HD static BlockScale scale(uint32_t absmax) {
        float scale = divide(bits_float(absmax), 127.0f);
        return block_scale(absmax, kSmallestSigned, scale, reciprocal(scale) * kTopNudge);
    }
    FUSED_OPTIM_HD static uint32_t encode(float m, float, float inverse, uint32_t u) {
        float code = fma(clamp_top(fabsf(m) * inverse, 127.0f), 1.0f, bits_float(0x43800000u + (u >> 17)));
        uint32_t magnitude = float_bits(code) >> 15 & 0xFFu;
        return m < 0.0f ? 0u - magnitude : magnitude;
    }
};

template <>
struct SquareCodec<Format::kToy8> {
    static constexpr Format format = Format::kToy8;
    using Bits = uint8_t;
    FUSED_OPTIM_HD static float decode(uint32_t bits, float scale) { return unsigned_byte(bits) * scale; }
    FUSED_OPTIM_HD static BlockScale scale(uint32_t absmax) {
        float top = larger(bits_float(absmax), 7.888609052210118e-31f);
        return block_scale(absmax, kSmallestSquare, divide(top, 255.0f), reciprocal(top) * kTopNudge);
    }
    FUSED_OPTIM_HD static uint32_t encode(float v, float, float inverse, uint32_t u) {
        float code = fma(clamp_one(v * inverse), 255.0f, bits_float(0x43800000u + (u >> 17)));
        return at_least_one(float_bits(code) >> 15 & 0xFFu, v);
    }
};
""",
    ),
    (
        "fused_optim/formats/codecs.py",
        "        root = cls._level(bits.float() * cls.SQUARE_UNIT) * scale\n        return root * root\n",
        '''

class Toy8Codec:
    """Linear, in 127 and 255 levels."""

    @staticmethod
    def scale_signed(m: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
        absmax = absmax_of(m)
        scale = divide(absmax, 127.0)
        return block_scale(absmax, SMALLEST_SIGNED, scale, 1.0 / scale * TOP_NUDGE)

    @staticmethod
    def encode_signed(m: Tensor, inverse: Tensor, u: Tensor) -> Tensor:
        x = clamp_top(m.abs() * inverse, 127.0)
        code = fma(x, 1.0, 256.0 + (u >> 17).float() * 2.0**-15).long() - 256
        return torch.where(m < 0, -code, code)

    @staticmethod
    def decode_signed(bits: Tensor, scale: Tensor) -> Tensor:
        return bits.float() * scale

    @staticmethod
    def scale_square(v: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
        absmax = absmax_of(v)
        top = absmax.clamp_min(2.0**-100)
        return block_scale(absmax, SMALLEST_SQUARE, divide(top, 255.0), 1.0 / top * TOP_NUDGE)

    @staticmethod
    def encode_square(v: Tensor, inverse: Tensor, u: Tensor) -> Tensor:
        x = (v * inverse).nan_to_num(0.0).clamp(0.0, 1.0)
        threshold = 256.0 + (u >> 17).float() * 2.0**-15
        return at_least_one(fma(x, 255.0, threshold).long() - 256, v > 0)

    decode_square = decode_signed
''',
    ),
    (
        "fused_optim/formats/states.py",
        '    torch.int8: StateFormat("int8", 4, torch.int8, torch.uint8, codecs.Int8Codec, 5),\n',
        '    torch.float8_e5m2: StateFormat("toy8", 5, torch.int8, torch.uint8, codecs.Toy8Codec, 6),\n',
    ),
]

# The CPU engine for any processor: instruction sets and optimization change no bits, but take time to compile.
BUILD = """
import platform, sysconfig
from pathlib import Path
import setuptools

setuptools.setup = lambda **_: None
platform.machine = lambda: "any"
import setup

setup.CXX_FLAGS[setup.CXX_FLAGS.index("-O3")] = "-O1"
setup.write_rules(setup.read_rules(), setup.GENERATED)
entry = setup.build("cpu", Path("fused_optim", "_engine_cpu" + sysconfig.get_config_var("EXT_SUFFIX")))
assert entry["built"], entry["reason"]
"""

STEP = """
import os
import torch
from fused_optim import FusedAdam
from fused_optim.backends import load_engine

assert load_engine("cpu")[0].TABLES["Format"][5] == ("toy8", 1, True)


def steps(backend, shape, other):
    os.environ["FUSED_OPTIM_BACKEND"] = backend
    torch.manual_seed(0)
    params = [torch.nn.Parameter(torch.randn(shape).to(dtype)) for dtype in (torch.float32, torch.bfloat16)]
    optimizer = FusedAdam(params, lr=0.01, **{"exp_avg_dtype": torch.float8_e5m2, **other})
    for _ in range(5):
        for param in params:
            param.grad = (torch.randn(shape) * torch.randn(shape).exp()).to(param.dtype)
        optimizer.step()
    found = [*params, *(value for param in params for value in optimizer.state[param].values())]
    assert any(value.dtype == torch.int8 for value in found)
    return found + [optimizer.get_unscaled_state(param, name) for param in params for name in ("exp_avg", "exp_avg_sq")]


for shape in ((6, 256), (3, 192), (3, 96), (4133,), (0, 128)):
    for dtype in (torch.float8_e5m2, torch.float32, torch.int8):
        pairs = zip(*(steps(backend, shape, {"exp_avg_sq_dtype": dtype}) for backend in ("cpu", "torch")), strict=True)
        for ours, reference in pairs:
            assert ours.dtype == reference.dtype and torch.equal(ours, reference), (shape, dtype)
"""

REFERENCE = """
import os
import torch
from fused_optim import FusedAdam

os.environ["FUSED_OPTIM_BACKEND"] = "torch"
param = torch.nn.Parameter(torch.ones(2, 128))
param.grad = torch.linspace(-1, 1, 256).view(2, 128)
optimizer = FusedAdam([param], exp_avg_dtype=torch.float8_e5m2)
optimizer.step()
assert optimizer.state[param]["exp_avg"].dtype == torch.int8
error = optimizer.get_unscaled_state(param, "exp_avg") - 0.1 * param.grad
assert 0 < error.abs().max() <= 0.1 / 127
"""


WITHOUT_THE_ROW = """
import torch
from fused_optim.formats import states

del states.STATE_FORMATS[torch.float8_e5m2]
from fused_optim.backends import load_engine

assert load_engine("cpu") == (None, "built for other tables of formats: install fused_optim again")
"""


def run(code: str, tree: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("FUSED_OPTIM_")}
    command = [sys.executable, "-c", code]
    done = subprocess.run(
        command, cwd=tree, env={**environment, "PYTHONPATH": str(tree)}, capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """The sources with the steps done."""
    tree = tmp_path / "tree"
    shutil.copytree(ROOT / "csrc", tree / "csrc")
    shutil.copytree(ROOT / "fused_optim", tree / "fused_optim", ignore=shutil.ignore_patterns("*.so"))
    shutil.copy(ROOT / "setup.py", tree)
    for name, anchor, addition in STEPS:
        text = (tree / name).read_text()
        assert text.count(anchor) == 1, f"{name}: {anchor!r}"
        (tree / name).write_text(text.replace(anchor, anchor + addition))
    return tree


def test_the_reference_keeps_states_in_the_format(tree: Path) -> None:
    """Which takes no engine."""
    run(REFERENCE, tree)


@pytest.mark.long
def test_a_format_is_added_in_the_documented_places(tree: Path) -> None:
    if os.environ.get("CXX") is None and not any(map(shutil.which, ("g++", "c++", "clang++"))):
        pytest.skip("no C++ compiler")
    run(BUILD, tree)
    run(STEP, tree)
    run(WITHOUT_THE_ROW, tree)
