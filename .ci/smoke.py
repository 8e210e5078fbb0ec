"""What users do with the package, where nothing else is installed than torch.

`check_dist.py smoke` runs it with the wheel, `tests/test_torch_alone.py` with this tree.
"""

import contextlib
import importlib
import pkgutil
import subprocess
import sys
import tempfile
import warnings

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict

import fused_optim
from fused_optim.checkpoint import Checkpointer
from fused_optim.compat import apex, transformer_engine
from fused_optim.quantized import MXFP8BlockScaling, QuantizedTensor, quantized_model_init

FORMATS = {"exp_avg_dtype": torch.int8, "exp_avg_sq_dtype": torch.int8}
NEEDS_ITS_FRAMEWORK = {"fused_optim.integrations.torchtitan"}


def main() -> None:
    warnings.filterwarnings("ignore", "torch.distributed is disabled")  # saves in one process
    warnings.filterwarnings("ignore", "fused_optim updates parameters on cpu by its PyTorch reference")
    torch.manual_seed(0)
    import_everything()
    check_steps()
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        check_checkpoints()
        check_ranks()
        check_quantized_weights()
        check_commands()


def import_everything() -> None:
    for module in pkgutil.walk_packages(fused_optim.__path__, "fused_optim."):
        is_engine = module.name.startswith("fused_optim._engine_")
        if not is_engine and not module.name.endswith("__main__") and module.name not in NEEDS_ITS_FRAMEWORK:
            importlib.import_module(module.name)


def check_steps() -> None:
    """Each class takes the steps of torch.optim.AdamW."""
    start, gradients = torch.randn(64, 256), torch.randn(4, 64, 256)

    def trained(optimizer_class) -> torch.Tensor:  # type: ignore[no-untyped-def]
        param = nn.Parameter(start.clone())
        optimizer = optimizer_class([param], lr=1e-2, weight_decay=0.1)
        for gradient in gradients:
            param.grad = gradient.clone()
            optimizer.step()
        return param.detach()

    expected = trained(torch.optim.AdamW)
    for optimizer_class in (fused_optim.FusedAdamW, apex.FusedAdam, transformer_engine.FusedAdam):
        torch.testing.assert_close(trained(optimizer_class), expected, rtol=1e-6, atol=1e-6)


class Run:
    """A model in training, with 8-bit states and remainders; of other values where it is to be loaded."""

    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        self.model = nn.Sequential(nn.Linear(256, 512), nn.GELU(), nn.Linear(512, 64)).bfloat16()
        named = self.model.named_parameters()
        options = {**FORMATS, "checkpoint_format": "native"}
        self.optimizer = fused_optim.FusedAdamW(named, lr=1e-2, **options)

    def step(self, seed: int) -> None:
        inputs = torch.randn(8, 256, generator=torch.Generator().manual_seed(seed)).bfloat16()
        self.model(inputs).float().square().mean().backward()
        fused_optim.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def goes_on_as(self, expected: dict[str, torch.Tensor]) -> None:
        """After a step, which depends on all that was loaded."""
        self.step(2)
        for name, value in self.model.state_dict().items():
            assert torch.equal(value, expected[name]), name


def check_checkpoints() -> None:
    """What is loaded goes on as if nothing had been."""
    run = Run(seed=0)
    run.step(0)
    run.step(1)
    model_state, optimizer_state = get_state_dict(run.model, run.optimizer)
    dcp.save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id="dcp")
    fused_optim.write_checksums("dcp")
    torch.save({"model": run.model.state_dict(), "optimizer": run.optimizer.state_dict()}, "file.pt")
    with Checkpointer(run.model, run.optimizer, "run", every=1) as checkpointer:
        checkpointer.save(2)
    run.step(2)
    expected = run.model.state_dict()

    by_file = Run(seed=1)
    state = torch.load("file.pt", weights_only=True)
    by_file.model.load_state_dict(state["model"])
    by_file.optimizer.load_state_dict(state["optimizer"])
    by_file.goes_on_as(expected)

    by_folder = Run(seed=1)
    dcp.load({"model": by_folder.model.state_dict()}, checkpoint_id="dcp")
    fused_optim.load_optimizer_checkpoint(by_folder.model, by_folder.optimizer, "dcp", verify=True)
    by_folder.goes_on_as(expected)

    resumed = Run(seed=1)
    with Checkpointer(resumed.model, resumed.optimizer, "run") as checkpointer:
        assert checkpointer.load_latest() == 2
    resumed.goes_on_as(expected)
    fused_optim.export_optimizer_checkpoint(resumed.model, resumed.optimizer, "exported")


def check_ranks() -> None:
    """With process groups, in which torch's own saves need NumPy."""
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    run = Run(seed=0)
    run.step(0)
    run.step(1)
    with Checkpointer(run.model, run.optimizer, "ranks") as checkpointer:
        checkpointer.save(2)
    run.step(2)
    resumed = Run(seed=1)
    with Checkpointer(resumed.model, resumed.optimizer, "ranks") as checkpointer:
        assert checkpointer.load_latest() == 2
    resumed.goes_on_as(run.model.state_dict())
    fused_optim.export_optimizer_checkpoint(resumed.model, resumed.optimizer, "exported by ranks")
    fused_optim.load_optimizer_checkpoint(run.model, run.optimizer, "exported by ranks", verify=True)
    torch.distributed.destroy_process_group()


def check_quantized_weights() -> None:
    with quantized_model_init(MXFP8BlockScaling()):
        model = nn.Linear(256, 128, dtype=torch.bfloat16)
    assert isinstance(model.weight, QuantizedTensor)
    optimizer = fused_optim.FusedAdamW(model.named_parameters(), lr=1e-2, **FORMATS)
    before = model.weight.dequantize().clone()
    model(torch.ones(8, 256, dtype=torch.bfloat16)).float().square().mean().backward()
    optimizer.step()
    assert not torch.equal(model.weight.dequantize(), before)
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, "quantized.pt")
    loaded = torch.load("quantized.pt", weights_only=True)["model"]["weight"]
    assert torch.equal(loaded.dequantize(), model.weight.dequantize())


# As users type them, and what the output has: below the folder that `check_checkpoints` has filled.
COMMANDS = {
    "--version": fused_optim.__version__,
    "info": f"torch {torch.__version__}",
    "verify dcp": "dcp: all bytes as written",
    "inspect dcp": "step 2",
    "inspect quantized.pt": "QuantizedTensor",
    "convert dcp unscaled --to unscaled": "unscaled: unscaled",
    "convert file.pt torch --to torch": "torch: torch",
    "inspect dcp --compare unscaled": "tensors have the same values",
    "checksum exported": "exported: checksums written",
    "plan --params 1e9 --world-size 8": "1,000,001,536 elements, bfloat16, on 8 ranks",
}


def check_commands() -> None:
    """In processes of their own: each has to import what it needs."""
    for command, expected in COMMANDS.items():
        arguments = [sys.executable, "-m", "fused_optim", *command.split()]
        done = subprocess.run(arguments, capture_output=True, text=True)
        assert done.returncode == 0 and expected in done.stdout, f"{command}:\n{done.stdout}{done.stderr}"
        assert not done.stderr, f"{command}: {done.stderr}"


if __name__ == "__main__":
    main()
