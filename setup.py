"""Builds the engines: `_engine_cpu` with the C++ compiler, `_engine_cuda` with nvcc as well.

An engine that cannot be built is left out and never fails the install: the package's _build_info.json says which ones
are there, and why one is not. Environment: CXX, CUDA_HOME and CUDA_PATH as usual; FUSED_OPTIM_CUDA_ARCHS, such as
"80;90", chooses the GPU architectures, "all" those of a release, and "none" leaves the CUDA engine out;
FUSED_OPTIM_REQUIRE, such as "cpu,cuda", makes a missing engine an error.
"""

import json
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import time
import tomllib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import ninja
import pybind11
from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.errors import CompileError

PACKAGE = "fused_optim"
SOURCES = Path("csrc/multi_tensor")
BUILD = Path("build", f"engines.{sysconfig.get_platform()}")  # of all Pythons: what has their tag is for one
TAG = sys.implementation.cache_tag

# Bit-exactness is the contract: every instruction set and every GPU gives the same bits. So never -ffast-math, and no
# contraction of a * b + c into one rounding. The other two only give up side effects: errno and exception flags.
EXACT = ["-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math"]
GENERATED = BUILD / "rules"
INCLUDES = [f"-I{SOURCES}", f"-I{GENERATED}"]
CXX_FLAGS = ["-O3", "-std=c++17", *INCLUDES, "-fPIC", "-fvisibility=hidden", *EXACT, "-pthread", "-Wall"]
AVX2 = ["-mavx2", "-mf16c", "-mfma"]
AVX512 = [*AVX2, "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mprefer-vector-width=512"]
HOST_FLAGS = ",".join(["-fPIC", "-fvisibility=hidden", *EXACT, "-Wall", "-Wno-invalid-offsetof"])
NVCC_FLAGS = ["-O3", "-std=c++17", *INCLUDES, "--fmad=false", f"-Xcompiler={HOST_FLAGS}", "-Xfatbin=-compress-all"]
# 1427: offsetof in `Block`, which has no standard layout for rules with three states; these compilers know its offsets.
NVCC_FLAGS += ["--threads=0", "-diag-suppress=1427"]
OLDEST_ARCH = 80  # has BF16 conversions; torch updates parameters on older GPUs
DEFAULT_ARCHS = {"80", "90", "100"}  # later ones compile the newest PTX
# The code asks for no more than "8.9 or later". So from 9.0 on all architectures share one PTX, which is compiled once.
PTX_ARCHS = (80, 89, 90)
RULES = Path("fused_optim/rules.toml")
FORMATS = {"float32": "kFloat32", "float16": "kFloat16", "float8_e4m3fn": "kFloat8", "int8": "kInt8"}  # as in table.h


class Unavailable(Exception):
    """Says why an engine cannot be built."""


@dataclass
class Engine:
    """How to build an engine: its objects' sources and commands, and the arguments after them in the link."""

    compiler: str
    details: dict[str, list[str]]
    objects: dict[str, tuple[Path, list[str]]]
    link: list[str]


@dataclass
class Rule:
    """An update rule as C++ has it; see fused_optim/rules.toml."""

    name: str
    header: str
    kinds: list[str]
    hyperparameters: list[str]
    own_kernels: list[str]
    reads_param: bool

    @property
    def enumerator(self) -> str:
        return "k" + "".join(part.capitalize() for part in self.name.split("_"))


def read_rules() -> list[Rule]:
    """The package's update rules, and those of the file that FUSED_OPTIM_RULES names."""
    added = os.environ.get("FUSED_OPTIM_RULES")
    rules = []
    for file in [RULES, *([Path(added).absolute()] if added else [])]:
        for name, row in tomllib.loads(file.read_text()).items():
            header = row["header"] if file == RULES else str(file.with_name(row["header"]))
            kinds = [f"StateKind::k{state['kind'].capitalize()}" for state in row.get("states", [])]
            formats = [FORMATS[each] for each in row.get("own_kernels", ["float32"])]
            rules.append(Rule(name, header, kinds, row["hyperparameters"], formats, row.get("reads_param", True)))
    return rules


def write_rules(rules: list[Rule], folder: Path) -> None:
    """The headers that csrc/ includes as rules_table.h and rules_headers.h, made of the tables of rules."""

    def listed(name: str, rows: list[str]) -> str:
        return f"#define {name}(ROW) " + " \\\n    ".join(["", *rows]) + "\n"

    def row(rule: Rule) -> str:
        numbers = ", ".join(f'"{number}"' for number in rule.hyperparameters)
        reads = str(rule.reads_param).lower()
        return f'ROW({rule.enumerator}, "{rule.name}", ({", ".join(rule.kinds)}), ({numbers}), {reads})'

    def own(rule: Rule) -> str:
        return f"ROW({rule.enumerator}, {', '.join(f'Format::{each}' for each in rule.own_kernels)})"

    def fields(rule: Rule) -> str:
        return " ".join(f"double {number};" for number in rule.hyperparameters)

    table = [
        "// Made by setup.py of fused_optim/rules.toml.\n#pragma once\n",
        "// enumerator, name, kinds of states, names of hyperparameters, whether the update reads the parameter",
        listed("FUSED_OPTIM_RULES", [row(rule) for rule in rules]),
        "// enumerator, fields of a struct of the hyperparameters",
        listed("FUSED_OPTIM_HYPERPARAMETERS", [f"ROW({rule.enumerator}, {fields(rule)})" for rule in rules]),
        "// enumerator, formats that have kernels of their own",
        listed("FUSED_OPTIM_OWN_KERNELS", [own(rule) for rule in rules]),
        f"#define FUSED_OPTIM_MAX_STATES {max(len(rule.kinds) for rule in rules)}",
        f"#define FUSED_OPTIM_MAX_HYPERPARAMETERS {max(len(rule.hyperparameters) for rule in rules)}\n",
    ]
    headers = ["#pragma once\n", *dict.fromkeys(f'#include "{rule.header}"' for rule in rules), ""]
    folder.mkdir(parents=True, exist_ok=True)
    for name, lines in {"rules_table.h": table, "rules_headers.h": headers}.items():
        path, text = folder / name, "\n".join(lines)
        if not path.exists() or path.read_text() != text:  # else every object would be stale
            path.write_text(text)


def plan_cpu(cxx: str) -> Engine:
    isas: dict[str, list[str]] = {"baseline": []}
    defines = []
    if platform.machine().lower() in ("x86_64", "amd64"):
        isas |= {"avx2": AVX2, "avx512": AVX512}
        defines = ["-DFUSED_OPTIM_X86_ISAS"]
    # Of an inline function that several objects hold, the linker keeps the first: so the one that runs on every
    # processor precedes the others.
    objects = {
        f"bindings.{TAG}": bindings("cpu", cxx, *defines),
        "launch": (SOURCES / "cpu/launch.cpp", [cxx, *CXX_FLAGS, *defines]),
        "launch_quantize": (SOURCES / "cpu/launch_quantize.cpp", [cxx, *CXX_FLAGS, *defines]),
        "norm": (SOURCES / "cpu/norm.cpp", [cxx, *CXX_FLAGS]),
        "cast": (SOURCES / "cpu/cast.cpp", [cxx, *CXX_FLAGS]),
        "collect": (SOURCES / "cpu/collect.cpp", [cxx, *CXX_FLAGS]),
        "decode": (SOURCES / "cpu/decode.cpp", [cxx, *CXX_FLAGS]),
        "crc32": (SOURCES / "cpu/crc32.cpp", [cxx, *CXX_FLAGS, *defines]),
        "threads": (SOURCES / "cpu/threads.cpp", [cxx, *CXX_FLAGS]),
    }
    for isa, flags in isas.items():
        compile_inner = [cxx, *CXX_FLAGS, *flags, f"-DFUSED_OPTIM_ISA={isa}"]
        objects[isa] = SOURCES / "cpu/apply.cpp", compile_inner
        objects[f"quantize_{isa}"] = SOURCES / "cpu/quantize.cpp", compile_inner
    compiler = capture(cxx, "--version").splitlines()[0]
    return Engine(compiler, {"isas": [*isas], "flags": CXX_FLAGS}, objects, [])


def plan_cuda(cxx: str) -> Engine:
    if os.environ.get("FUSED_OPTIM_CUDA_ARCHS") == "none":
        raise Unavailable("FUSED_OPTIM_CUDA_ARCHS=none asked for none")
    nvcc = find_nvcc()
    archs = cuda_archs(nvcc)
    include, library = cuda_folders(nvcc, cxx)
    compile_kernels = [nvcc, f"-ccbin={cxx}", *NVCC_FLAGS, *codes_of(archs)]
    own_kernels = {rule.enumerator: rule.own_kernels for rule in read_rules()}
    one, any_of_them = SOURCES / "cuda/one_combination.cu", SOURCES / "cuda/any_combination.cu"
    objects = {
        f"bindings.{TAG}": bindings("cuda", cxx, f"-isystem{include}"),
        **{
            f"kernels_{rule}_{own}": (one, [*of_rule(compile_kernels, rule), f"-DFUSED_OPTIM_FORMAT={own}"])
            for rule, formats in own_kernels.items()
            for own in formats
        },
        **{f"kernel_any_{rule}": (any_of_them, of_rule(compile_kernels, rule)) for rule in own_kernels},
        "apply": (SOURCES / "cuda/apply.cu", compile_kernels),
        "norm": (SOURCES / "cuda/norm.cu", compile_kernels),
        "quantize": (SOURCES / "cuda/quantize.cu", compile_kernels),
        "cast": (SOURCES / "cuda/cast.cu", compile_kernels),
        "collect": (SOURCES / "cuda/collect.cu", compile_kernels),
        "compare": (SOURCES / "cuda/compare.cu", compile_kernels),
        "normalize": (SOURCES / "cuda/normalize.cu", compile_kernels),
        "product": (SOURCES / "cuda/product.cu", [nvcc, f"-ccbin={cxx}", *NVCC_FLAGS, *codes_of_products(archs)]),
    }
    release = re.findall(r"release ([\d.]+)", capture(nvcc, "--version"))
    # The static runtime imports without a driver, and beside whichever runtime torch brings.
    link = [f"-L{library}", "-lcudart_static", "-ldl", "-lrt"]
    return Engine(" ".join(["nvcc", *release]), {"archs": archs}, objects, link)


def of_rule(command: list[str], rule: str) -> list[str]:
    return [*command, f"-DFUSED_OPTIM_RULE={rule}"]


PLANS = {"cpu": plan_cpu, "cuda": plan_cuda}


def bindings(engine: str, cxx: str, *flags: str) -> tuple[Path, list[str]]:
    defines = [f"-DFUSED_OPTIM_ENGINE_{engine.upper()}", f"-DFUSED_OPTIM_MODULE=_engine_{engine}"]
    includes = [f"-isystem{sysconfig.get_path('include')}", f"-isystem{pybind11_headers(BUILD / engine)}"]
    return SOURCES / "bindings/bindings.cpp", [cxx, *CXX_FLAGS, *defines, *includes, *flags]


def pybind11_headers(folder: Path) -> Path:
    """A copy: an isolated build has them in a new folder each time, which would make every object stale."""
    headers = folder / f"pybind11-{pybind11.__version__}"
    if not headers.exists():
        partial = folder / "pybind11.partial"
        shutil.copytree(pybind11.get_include(), partial, dirs_exist_ok=True)
        partial.rename(headers)
    return headers


def find_cxx() -> str:
    names = [os.environ["CXX"]] if os.environ.get("CXX") else ["g++", "c++", "clang++"]
    for name in names:
        if path := shutil.which(name):
            return path
    raise Unavailable(f"no C++ compiler found (looked for {', '.join(names)})")


def find_nvcc() -> str:
    folders = [f"{os.environ[home]}/bin" for home in ("CUDA_HOME", "CUDA_PATH") if os.environ.get(home)]
    folders += [os.environ.get("PATH", os.defpath), "/usr/local/cuda/bin"]
    if path := shutil.which("nvcc", path=os.pathsep.join(folders)):
        return path
    raise Unavailable("no nvcc found (looked in CUDA_HOME, CUDA_PATH, PATH and /usr/local/cuda/bin)")


def cuda_folders(nvcc: str, cxx: str) -> tuple[str, str]:
    """The toolkit's include and library folders: nvcc knows them, while its path may be a link or a wrapper script."""
    dryrun = capture(nvcc, f"-ccbin={cxx}", "--dryrun", "-E", "-x=cu", os.devnull)
    tops = re.findall(r"^#\$ TOP=(.*)$", dryrun, re.MULTILINE)
    includes = re.findall(r'"-I([^"]+)"', dryrun) + [f"{top}/include" for top in tops]
    libraries = re.findall(r'"-L([^"]+)"', dryrun) + [f"{top}/{lib}" for top in tops for lib in ("lib64", "lib")]
    return first_with("cuda_runtime.h", includes), first_with("libcudart_static.a", libraries)


def first_with(name: str, folders: list[str]) -> str:
    for folder in folders:
        if Path(folder, name).exists():
            return folder
    raise Unavailable(f"the CUDA toolkit lacks {name} (looked in {', '.join(folders)})")


def cuda_archs(nvcc: str) -> list[str]:
    """The architectures to compile for, oldest first, such as ["80", "90"]."""
    chosen = os.environ.get("FUSED_OPTIM_CUDA_ARCHS", "").replace(".", "")
    archs = set(re.findall(r"\d+[af]?", chosen))
    if not archs:
        supported = set(re.findall(r"compute_(\d+)", capture(nvcc, "--list-gpu-arch")))
        supported = {arch for arch in supported if int(arch) >= OLDEST_ARCH}
        visible = set() if chosen == "all" else visible_archs()
        archs = supported & visible or supported & DEFAULT_ARCHS or supported
    return sorted(archs, key=lambda arch: int(arch.rstrip("af")))


def codes_of(archs: list[str]) -> list[str]:
    """nvcc's options for machine code of each, and for the newest PTX, which the drivers of later GPUs compile."""
    pairs = [(ptx_arch(arch), f"sm_{arch}") for arch in archs]
    pairs += [(ptx_arch(archs[-1]), f"compute_{ptx_arch(archs[-1])}")]
    return [f"-gencode=arch=compute_{ptx},code={code}" for ptx, code in pairs]


def codes_of_products(archs: list[str]) -> list[str]:
    """The same of the kernels that use what only Hopper has, of which no PTX would be of use to others."""
    if not {"90", "90a"} & set(archs):
        return [*codes_of(archs), "-DFUSED_OPTIM_WITHOUT_HOPPER"]
    return ["-gencode=arch=compute_90a,code=sm_90a"]


def ptx_arch(arch: str) -> str:
    """The architecture whose PTX becomes its machine code. Those such as 100a keep what only they have."""
    if not arch.isdigit():
        return arch
    return str(max((ptx for ptx in PTX_ARCHS if ptx <= int(arch)), default=arch))


def visible_archs() -> set[str]:
    try:
        capabilities = capture("nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader")
    except Unavailable:
        return set()
    return {line.replace(".", "") for line in capabilities.split()}


def capture(*command: str) -> str:
    try:
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise Unavailable(str(error)) from error
    if done.returncode:
        raise Unavailable(f"{shlex.join(command)} failed:\n{done.stdout}")
    return done.stdout


def run_ninja(engine: Engine, cxx: str, folder: Path) -> Path:
    """Builds what is not up to date, and returns the module."""
    # Neither place alone will do: an isolated build's ninja is on the PATH, that of an inactive environment is not.
    places = [*filter(None, [ninja.BIN_DIR]), os.environ.get("PATH", os.defpath)]
    program = shutil.which("ninja", path=os.pathsep.join(places))
    if program is None:
        raise Unavailable("no ninja found")
    folder.mkdir(parents=True, exist_ok=True)
    module = folder / f"module.{TAG}.so"
    with open(folder / "build.ninja", "w") as file:
        writer = ninja.Writer(file, width=10_000)
        writer.variable("builddir", str(folder))
        # g++ and nvcc spell these options alike.
        compile_command = "$tool -MD -MF $out.d -c $in -o $out"
        writer.rule("compile", compile_command, description="$out", depfile="$out.d", deps="gcc")
        writer.rule("link", "$tool -shared -pthread $in -o $out $libraries", description="$out")
        objects: list[str] = []
        for name, (source, command) in engine.objects.items():
            objects += writer.build(f"{folder}/{name}.o", "compile", str(source), variables=quoted(tool=command))
        writer.build(str(module), "link", objects, variables=quoted(tool=[cxx], libraries=engine.link))
    printed: list[str] = []
    status = {**os.environ, "NINJA_STATUS": f"{PACKAGE}: [%f of %t, %e s] "}
    with subprocess.Popen(
        [program, "-f", file.name], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=status
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:  # as each file is compiled: it takes minutes
            print(line, end="", flush=True)
            printed.append(line)
    if process.returncode:
        raise Unavailable("".join(line for line in printed if not line.startswith(PACKAGE)))
    return module


def quoted(**variables: list[str]) -> dict[str, str]:
    return {name: ninja.escape(shlex.join(words)) for name, words in variables.items()}


def build(name: str, target: Path) -> dict[str, object]:
    """Builds an engine into `target`, and returns its entry in _build_info.json."""
    target.unlink(missing_ok=True)  # else an earlier build's module would outlive this one's failure
    entry: dict[str, object] = {"built": False, "reason": None, "compiler": ""}
    start = time.perf_counter()
    try:
        cxx = find_cxx()
        engine = PLANS[name](cxx)
        entry |= {"compiler": engine.compiler, **engine.details}
        module = run_ninja(engine, cxx, BUILD / name)
    except Unavailable as error:
        reason = str(error).rstrip()
        print(f"{PACKAGE}: {name} engine NOT built: {reason}", flush=True)
        return entry | {"reason": "\n".join(reason.splitlines()[-20:])}
    shutil.copy2(module, target)
    print(f"{PACKAGE}: {name} engine built in {time.perf_counter() - start:.1f} s ({engine.compiler})", flush=True)
    return entry | {"built": True}


class BuildEngines(build_ext):
    """Builds into the wheel's folder, or into the source's for an editable or in-place build."""

    def run(self) -> None:
        self.info().parent.mkdir(parents=True, exist_ok=True)
        write_rules(read_rules(), GENERATED)
        with ThreadPoolExecutor() as pool:  # side by side: what one engine compiles last leaves processors to the other
            entries = dict(zip(PLANS, pool.map(build, PLANS, map(self.target, PLANS))))
        self.info().write_text(json.dumps(entries, indent=2) + "\n")
        required = filter(None, os.environ.get("FUSED_OPTIM_REQUIRE", "").replace(" ", "").split(","))
        missing = [name for name in required if not entries.get(name, {}).get("built")]
        if missing:
            raise CompileError(f"FUSED_OPTIM_REQUIRE asks for an engine that was not built: {', '.join(missing)}")

    def target(self, name: str) -> Path:
        return Path(self.get_ext_fullpath(f"{PACKAGE}._engine_{name}"))

    def info(self) -> Path:
        return self.target("cpu").with_name("_build_info.json")

    # setuptools would assume that every engine was built, and knows nothing of the file beside them.
    def get_outputs(self) -> list[str]:
        files = [*map(self.target, PLANS), self.info()]
        outputs = [Path(self.build_lib, PACKAGE, file.name) for file in files if file.exists()]
        return [str(output) for output in outputs]

    def get_output_mapping(self) -> dict[str, str]:
        folder = self.info().parent
        return {output: str(folder / Path(output).name) for output in self.get_outputs()} if self.inplace else {}


sources = sorted(str(path) for path in SOURCES.rglob("*") if path.is_file())  # of a source distribution
extensions = [
    Extension(f"{PACKAGE}._engine_{name}", [f"{SOURCES}/bindings/bindings.cpp"], depends=sources) for name in PLANS
]
setup(ext_modules=extensions, cmdclass={"build_ext": BuildEngines})
