"""Which of torch's operations reach a quantized weight in real programs, and from where: the list that
``fused_optim/quantized/tensor`` implements.

    python benchmarks/weight_operations.py --output operations.json

Each function below is a program; the last ones run on four ranks over gloo. Operations of programs that are refused
count, too: their error is in the output. Programs of packages that are not installed are left out.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import pickle
import platform
import sys
import tempfile
import warnings
from collections.abc import Callable
from importlib import metadata
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.optim.swa_utils import AveragedModel

from fused_optim import FusedAdamW
from fused_optim.quantized import (
    Float8BlockScaling,
    Float8CurrentScaling,
    MXFP8BlockScaling,
    QuantizedTensor,
    Recipe,
    finish_initialization,
    quantize_model_,
    quantized_model_init,
)

RANKS = 4
RECIPES: list[Recipe] = [MXFP8BlockScaling(), Float8CurrentScaling(), Float8BlockScaling()]
OWN = ("fused_optim", "torch._ops", "torch.utils._contextlib", "torch._tensor", "torch._compile", "torch._dynamo")

Programs = dict[str, Callable[..., None]]


class Recorder:
    """Notes the operations that reach quantized weights, and the function of an installed package that called them."""

    def __init__(self) -> None:
        self.found: dict[str, dict[str, set[str]]] = {}  # operation -> program -> callers
        self.program = ""

    def install(self) -> None:
        owner = next(kind for kind in QuantizedTensor.__mro__ if "__torch_dispatch__" in vars(kind))
        dispatch = vars(owner)["__torch_dispatch__"].__func__

        def note_and_dispatch(cls: type, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if self.program:
                callers = self.found.setdefault(f"{func}{_target(args)}", {}).setdefault(self.program, set())
                callers.add(_caller())
            return dispatch(cls, func, types, args, kwargs)

        owner.__torch_dispatch__ = classmethod(note_and_dispatch)  # type: ignore[method-assign]

    def merge(self, found: dict[str, dict[str, set[str]]]) -> None:
        for operation, programs in found.items():
            for program, callers in programs.items():
                self.found.setdefault(operation, {}).setdefault(program, set()).update(callers)


def _target(args: tuple[Any, ...]) -> str:
    """What a copy writes into, since wholes, parts and plain tensors are copied by different code."""
    if len(args) < 2 or not all(isinstance(each, Tensor) for each in args[:2]):
        return ""
    named = []
    for each in args[:2]:
        part = isinstance(each, QuantizedTensor) and each.is_part
        named.append(f"part of a {type(each).__name__}" if part else type(each).__name__)
    return f" ({named[0]}, {named[1]})" if isinstance(args[0], QuantizedTensor) else ""


def _caller() -> str:
    frame = sys._getframe(2)
    while frame is not None:
        module = frame.f_globals.get("__name__", "")
        if not module.startswith(OWN) and module != __name__:
            return f"{module}.{frame.f_code.co_name}"
        frame = frame.f_back  # type: ignore[assignment]
    return "the program itself"


# --- one process ------------------------------------------------------------------------------------------------------


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w1 = nn.Parameter(torch.randn(4, 128, 128) / 12)
        self.w2 = nn.Parameter(torch.randn(4, 128, 128) / 12)

    def forward(self, x: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        for expert in range(4):  # as transformers' eager experts
            out = out + nn.functional.linear(torch.relu(nn.functional.linear(x, self.w1[expert])), self.w2[expert])
        return out + torch.einsum("bd,efd->bf", x, self.w1)


def layers(recipe: Recipe | None, **options: Any) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(128, 512, bias=False), nn.GELU(), nn.Linear(512, 128)).bfloat16()
    return model if recipe is None else quantize_model_(model, recipe, **options)


def train(model: nn.Module, steps: int = 2, optimizer: Any = None) -> Any:
    optimizer = optimizer or FusedAdamW(model.parameters(), lr=1e-3)
    for _ in range(steps):
        model(torch.randn(8, 128, dtype=torch.bfloat16)).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return optimizer


def training(recipe: Recipe) -> None:
    train(layers(recipe))


def layers_of_torch(recipe: Recipe) -> None:
    model = nn.ModuleList([nn.MultiheadAttention(128, 4), nn.Embedding(128, 128), nn.Bilinear(128, 128, 128)])
    quantize_model_(model, recipe, param_filter=lambda param, _: param.dim() == 2)
    x = model[1](torch.arange(6))
    model[0](x, x, x)[0].sum().backward()


def experts(recipe: Recipe) -> None:
    model = quantize_model_(Experts(), recipe, param_filter=lambda *_: True)
    model(torch.randn(8, 128)).sum().backward()
    model.w1.unbind()
    torch.bmm(torch.randn(4, 3, 128), model.w1.transpose(1, 2))


def autocast_and_checkpointing(recipe: Recipe) -> None:
    model = quantize_model_(nn.Linear(128, 128), recipe)
    with torch.autocast("cpu", torch.bfloat16):
        torch.utils.checkpoint.checkpoint(model, torch.randn(4, 128), use_reentrant=False).sum().backward()
    with torch.inference_mode():
        model(torch.randn(4, 128))


def compiled(recipe: Recipe) -> None:
    torch.compile(layers(recipe), backend="aot_eager")(torch.randn(8, 128, dtype=torch.bfloat16)).sum().backward()


def functional_call(recipe: Recipe) -> None:
    model = layers(recipe)
    torch.func.functional_call(model, dict(model.named_parameters()), torch.randn(2, 128, dtype=torch.bfloat16))


def load_state_dict(recipe: Recipe) -> None:
    for source in (layers(recipe), layers(None)):
        for assign in (False, True):
            layers(recipe).load_state_dict(source.state_dict(), assign=assign)
    layers(None).load_state_dict(layers(recipe).state_dict())


def load_while_training(recipe: Recipe) -> None:
    model = layers(recipe)
    optimizer = train(model)
    model.load_state_dict(layers(None).state_dict())
    train(model, optimizer=optimizer)


def deepcopy_and_pickle(recipe: Recipe) -> None:
    model = copy.deepcopy(layers(recipe))
    pickle.loads(pickle.dumps(model))
    with tempfile.TemporaryDirectory() as folder:
        torch.save(model.state_dict(), f"{folder}/model.pt")
        torch.load(f"{folder}/model.pt", weights_only=True)
        torch.load(f"{folder}/model.pt", weights_only=True, map_location="meta")


def share_memory(recipe: Recipe) -> None:
    model = layers(recipe).share_memory()
    pickle.loads(pickle.dumps(model.state_dict()))


def move(recipe: Recipe) -> None:
    layers(recipe).to("cpu").cpu().to("meta").to_empty(device="cpu")
    layers(recipe).requires_grad_(False).eval().bfloat16()


def cast_of_modules(recipe: Recipe) -> None:
    layers(recipe).float()


def cast_of_frozen_modules(recipe: Recipe) -> None:
    layers(recipe).requires_grad_(False).float()


def averaged_model(recipe: Recipe) -> None:
    model = layers(recipe)
    average = AveragedModel(model)
    for _ in range(2):
        average.update_parameters(model)


def torch_optimizers(recipe: Recipe) -> None:
    model = layers(recipe)
    train(model, 1, torch.optim.AdamW(model.parameters()))


def clip_and_norms(recipe: Recipe) -> None:
    model = layers(recipe)
    for param in model.parameters():
        param.detach().float().norm()
        param.norm()
        torch.isfinite(param).all()
    nn.utils.parameters_to_vector(model.parameters())


def ema_by_hand(recipe: Recipe) -> None:
    model, average = layers(recipe), layers(recipe)
    for own, other in zip(average.parameters(), model.parameters(), strict=True):
        own.data.mul_(0.9).add_(other.data, alpha=0.1)


INITIALISERS = [
    *("uniform_", "normal_", "trunc_normal_", "ones_", "zeros_", "xavier_uniform_", "xavier_normal_"),
    *("kaiming_uniform_", "kaiming_normal_", "orthogonal_", "eye_"),
]


def initialise_after_to_empty(recipe: Recipe) -> None:
    with torch.device("meta"):
        model = quantize_model_(layers(None).float(), recipe)
    model.to_empty(device="cpu")
    for name in INITIALISERS:
        getattr(nn.init, name)(model[0].weight)
    nn.init.constant_(model[0].weight, 1.0)
    nn.init.sparse_(model[0].weight, 0.5)
    model.apply(lambda module: module.reset_parameters() if isinstance(module, nn.Linear) else None)
    with torch.no_grad():
        model[0].weight.mul_(0.5)  # a gain
        model[0].weight.normal_(0, 0.02).div_(2)
    finish_initialization(model)


def initialise_by_copy(recipe: Recipe) -> None:
    model = layers(recipe)
    with torch.no_grad():
        model[0].weight.copy_(nn.init.orthogonal_(torch.empty(512, 128)))
        model[0].weight.data = copy.deepcopy(model[0].weight.data)
    finish_initialization(model)


# --- other packages ---------------------------------------------------------------------------------------------------


def _llama() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=64,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        tie_word_embeddings=False,
    )
    return LlamaForCausalLM(config)


def _step(model: Any, optimizer: Any = None) -> None:
    ids = torch.randint(64, (2, 8))
    model(input_ids=ids, labels=ids).loss.backward()
    if optimizer is not None:
        optimizer.step()


def transformers_save_and_load(recipe: Recipe) -> None:
    from transformers import AutoModelForCausalLM

    from fused_optim.quantized import save_pretrained_as

    with tempfile.TemporaryDirectory() as folder:
        _llama().save_pretrained(folder)
        with quantized_model_init(recipe):
            model = AutoModelForCausalLM.from_pretrained(folder)
        _step(model, FusedAdamW(model.parameters()))
        save_pretrained_as(model)
        model.save_pretrained(folder)
        model.resize_token_embeddings(72)
        model.init_weights()


def transformers_plain_save(recipe: Recipe) -> None:
    with tempfile.TemporaryDirectory() as folder:
        quantize_model_(_llama(), recipe).save_pretrained(folder)


def transformers_trainer(recipe: Recipe) -> None:
    from transformers import Trainer, TrainingArguments

    from fused_optim.quantized import save_pretrained_as

    model = quantize_model_(_llama(), recipe)
    data = [{"input_ids": torch.randint(64, (8,)), "labels": torch.randint(64, (8,))} for _ in range(8)]
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder, max_steps=2, per_device_train_batch_size=2, save_steps=1, report_to=[], use_cpu=True
        )
        optimizer = FusedAdamW(model.parameters())
        schedule = torch.optim.lr_scheduler.ConstantLR(optimizer)
        save_pretrained_as(model)
        Trainer(model, arguments, train_dataset=data, optimizers=(optimizer, schedule)).train()


def accelerate_prepare(recipe: Recipe) -> None:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    model = layers(recipe)
    model, optimizer = accelerator.prepare(model, FusedAdamW(model.parameters()))
    accelerator.backward(model(torch.randn(8, 128, dtype=torch.bfloat16)).float().sum())
    accelerator.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    with tempfile.TemporaryDirectory() as folder:
        accelerator.save_state(folder, safe_serialization=False)
        accelerator.load_state(folder)


def accelerate_device_map(recipe: Recipe) -> None:
    from accelerate import cpu_offload, infer_auto_device_map
    from accelerate.utils import compute_module_sizes, find_tied_parameters

    model = quantize_model_(_llama(), recipe).requires_grad_(False)
    infer_auto_device_map(model)
    compute_module_sizes(model)
    find_tied_parameters(model)
    cpu_offload(model, torch.device("cpu"))
    model(input_ids=torch.randint(64, (2, 8)))


def accelerate_disk(recipe: Recipe) -> None:
    from accelerate import disk_offload

    with tempfile.TemporaryDirectory() as folder:
        disk_offload(quantize_model_(_llama(), recipe), folder, torch.device("cpu"))


def peft_lora(recipe: Recipe) -> None:
    from peft import LoraConfig, get_peft_model

    for dora in (False, True):
        base = quantize_model_(_llama().requires_grad_(False), recipe)
        model: Any = get_peft_model(base, LoraConfig(r=4, use_dora=dora, target_modules=["q_proj", "down_proj"]))
        _step(model, FusedAdamW([param for param in model.parameters() if param.requires_grad]))
        with tempfile.TemporaryDirectory() as folder:
            model.save_pretrained(folder)


def peft_merge(recipe: Recipe) -> None:
    from peft import LoraConfig, get_peft_model

    base = quantize_model_(_llama().requires_grad_(False), recipe)
    model: Any = get_peft_model(base, LoraConfig(r=4, target_modules=["q_proj"]))
    model.merge_and_unload()


# --- four ranks -------------------------------------------------------------------------------------------------------


def _wrapped(model: nn.Module, mesh: Any = None, **options: Any) -> nn.Module:
    for layer in model:  # type: ignore[attr-defined]
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def _mesh(*shape: int) -> Any:
    return init_device_mesh("cpu", shape, mesh_dim_names=("a", "b")[: len(shape)])


def fsdp2(recipe: Recipe) -> None:
    train(_wrapped(layers(recipe), _mesh(RANKS)))


def fsdp2_uneven(recipe: Recipe) -> None:
    model = nn.Sequential(nn.Linear(128, 301, bias=False), nn.ReLU(), nn.Linear(301, 2)).bfloat16()
    train(_wrapped(quantize_model_(model, recipe), _mesh(RANKS)))


def fsdp2_mixed_precision(recipe: Recipe) -> None:
    model = layers(None).float()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    train(_wrapped(quantize_model_(model, recipe), _mesh(RANKS), mp_policy=policy))


def fsdp2_cpu_offload(recipe: Recipe) -> None:
    train(_wrapped(layers(recipe), _mesh(RANKS), offload_policy=CPUOffloadPolicy(pin_memory=False)))


def hsdp(recipe: Recipe) -> None:
    train(_wrapped(layers(recipe), _mesh(2, 2)))


def fsdp2_from_meta(recipe: Recipe) -> None:
    with torch.device("meta"):
        model = layers(recipe)
    model = _wrapped(model, _mesh(RANKS))
    model.to_empty(device="cpu")
    for layer in model:  # type: ignore[attr-defined]
        if isinstance(layer, nn.Linear):
            layer.reset_parameters()
            nn.init.trunc_normal_(layer.weight, std=0.02)  # as torchtitan initialises
    finish_initialization(model)
    train(model)


def tensor_parallel(recipe: Recipe) -> None:
    model = parallelize_module(layers(None), _mesh(RANKS), {"0": ColwiseParallel(), "2": RowwiseParallel()})
    train(quantize_model_(model, recipe))


def tensor_parallel_after_quantization(recipe: Recipe) -> None:
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    train(parallelize_module(layers(recipe), _mesh(RANKS), plan))


def fsdp2_and_tensor_parallel(recipe: Recipe) -> None:
    mesh = _mesh(2, 2)
    model = parallelize_module(layers(None), mesh["b"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    model = _wrapped(quantize_model_(model, recipe), mesh["a"])
    train(model)
    get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))


def ddp(recipe: Recipe) -> None:
    train(nn.parallel.DistributedDataParallel(layers(recipe)))


def full_state_dicts(recipe: Recipe) -> None:
    for mesh in (_mesh(RANKS), _mesh(2, 2)):
        model = _wrapped(layers(recipe), mesh)
        for offload in (False, True):
            get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=offload))
        set_model_state_dict(model, layers(None).state_dict(), options=StateDictOptions(full_state_dict=True))
        finish_initialization(model)
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
        set_model_state_dict(model, layers(None).state_dict() if dist.get_rank() == 0 else {}, options=options)
        finish_initialization(model)
        for param in model.parameters():
            param.full_tensor()  # type: ignore[attr-defined]
    get_model_state_dict(layers(recipe), options=StateDictOptions(full_state_dict=True))


def broadcast_to_meta(recipe: Recipe) -> None:
    with torch.device("meta"):
        model = layers(recipe)
    model = _wrapped(model, _mesh(RANKS))
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(model, layers(None).state_dict() if dist.get_rank() == 0 else {}, options=options)
    finish_initialization(model)
    train(model)


def checkpoints(recipe: Recipe) -> None:
    """Saved on one mesh, loaded on another, into another recipe, into plain weights and from plain ones."""
    folder = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folder)
    path = folder[0]
    fsdp = _wrapped(layers(recipe), _mesh(RANKS))
    dcp.save(fsdp.state_dict(), checkpoint_id=f"{path}/quantized")
    group = dist.new_group(backend="gloo")
    dcp.async_save(fsdp.state_dict(), checkpoint_id=f"{path}/async", process_group=group).result()
    stager = dcp.staging.BlockingAsyncStager()
    dcp.async_save(fsdp.state_dict(), checkpoint_id=f"{path}/cached", process_group=group, async_stager=stager).result()
    dcp.save(_wrapped(layers(None), _mesh(RANKS)).state_dict(), checkpoint_id=f"{path}/plain")
    other = RECIPES[(RECIPES.index(recipe) + 1) % len(RECIPES)]
    for source in ("quantized", "async", "cached", "plain"):
        for made in (
            _wrapped(layers(recipe), _mesh(2, 2)),
            _wrapped(layers(other), _mesh(RANKS)),
            _wrapped(layers(None), _mesh(2, 2)),
            layers(recipe),
        ):
            state = made.state_dict()
            dcp.load(state, checkpoint_id=f"{path}/{source}")
            made.load_state_dict(state)
            finish_initialization(made)


ALONE: Programs = {
    function.__name__: function
    for function in (
        *(training, layers_of_torch, experts, autocast_and_checkpointing, compiled, functional_call, load_state_dict),
        *(load_while_training, deepcopy_and_pickle, share_memory, move, cast_of_modules, cast_of_frozen_modules),
        *(averaged_model, torch_optimizers, clip_and_norms, ema_by_hand, initialise_after_to_empty),
        *(initialise_by_copy, transformers_save_and_load, transformers_plain_save, transformers_trainer),
        *(accelerate_prepare, accelerate_device_map, accelerate_disk, peft_lora, peft_merge),
    )
}
ON_RANKS: Programs = {
    function.__name__: function
    for function in (
        *(fsdp2, fsdp2_uneven, fsdp2_mixed_precision, fsdp2_cpu_offload, hsdp, fsdp2_from_meta, tensor_parallel),
        *(tensor_parallel_after_quantization, fsdp2_and_tensor_parallel, ddp, full_state_dicts, broadcast_to_meta),
        checkpoints,
    )
}


def run(programs: Programs, recorder: Recorder) -> dict[str, str]:
    """Run the programs with every recipe. Returns the errors, by program."""
    errors = {}
    for name, program in programs.items():
        for recipe in RECIPES:
            recorder.program = name
            try:
                program(recipe)
            except Exception as error:  # a refusal, whose operations count, too
                errors[name] = f"{type(error).__name__}: {error}".splitlines()[0]
            recorder.program = ""
    return errors


def _rank(rank: int, folder: str) -> None:
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=RANKS)
    recorder = Recorder()
    recorder.install()
    errors = run(ON_RANKS, recorder)
    with open(f"{folder}/{rank}.pickle", "wb") as file:
        pickle.dump((recorder.found, errors), file)
    dist.barrier()
    dist.destroy_process_group()


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", help="a JSON file")
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    recorder = Recorder()
    recorder.install()
    errors = run(ALONE, recorder)
    with tempfile.TemporaryDirectory() as folder:
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        mp.spawn(_rank, (folder,), nprocs=RANKS)
        for rank in range(RANKS):
            with open(f"{folder}/{rank}.pickle", "rb") as file:
                found, failed = pickle.load(file)
            recorder.merge(found)
            errors.update(failed)
    packages = {name: _version(name) for name in ("torch", "transformers", "accelerate", "peft")}
    operations = {
        operation: {program: sorted(callers) for program, callers in sorted(programs.items())}
        for operation, programs in sorted(recorder.found.items())
    }
    result = {"python": platform.python_version(), "packages": packages, "refused": errors, "operations": operations}
    if options.output:
        with open(options.output, "w") as file:
            json.dump(result, file, indent=1)
            file.write("\n")
    for operation, programs in operations.items():
        print(f"{operation}: {', '.join(programs)}")
    for name, error in errors.items():
        print(f"refused: {name}: {error}")


if __name__ == "__main__":
    main()
