"""CUDA graphs: a captured step that is replayed means the same as steps that are called."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from cases import FORMATS, MASTER, MASTERS, Format, Master, values
from distributed import two_gpus
from peers import FusedAdam

SHAPES = [(6, 128), (5, 7), (300,)]
ALL_FORMATS = pytest.mark.parametrize("fmt", FORMATS, ids=str)
ALL_MASTERS = pytest.mark.parametrize("master", MASTERS, ids=str)


def test_no_effect_on_the_cpu() -> None:
    results = []
    for capturable in (False, True):
        params = [torch.nn.Parameter(values(shape, torch.float32, "cpu", seed=1)) for shape in SHAPES]
        optimizer = FusedAdam(params, lr=0.1, weight_decay=0.3, capturable=capturable, decoupled_weight_decay=True)
        for step in range(3):
            for param in params:
                param.grad = values(tuple(param.shape), torch.float32, "cpu", seed=step)
            optimizer.step()
            assert optimizer.param_groups[0]["step"] == step + 1
        results.append(params)
        assert copy.deepcopy(optimizer).capturable is pickle.loads(pickle.dumps(optimizer)).capturable is capturable
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


# --- on GPUs ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def gpu() -> str:
    if not torch.cuda.is_available():
        pytest.skip("no GPU")
    return "cuda"


class Training:
    """Gradients are computed on the device from a counter there, so a captured step sees new ones at each replay."""

    def __init__(
        self,
        fmt: Format,
        master: Master,
        device: str = "cuda",
        *,
        shapes: list[tuple[int, ...]] = SHAPES,
        **options: Any,
    ) -> None:
        self.params = [
            torch.nn.Parameter(values(shape, master.param_dtype, device, seed=i)) for i, shape in enumerate(shapes)
        ]
        self.bases = [values(shape, torch.float32, device, seed=50 + i) for i, shape in enumerate(shapes)]
        self.phase = torch.zeros((), device=device)
        for param in self.params:
            param.grad = torch.zeros_like(param)
        formats = {"exp_avg_dtype": fmt.dtype, "exp_avg_sq_dtype": fmt.dtype}
        options = {"lr": 0.01, "weight_decay": 0.1, "decoupled_weight_decay": True, "capturable": True, **options}
        self.optimizer = FusedAdam(self.params, **formats, **master.options, **options)
        self.compute_gradients()  # CUDA loads a kernel when it is first used, which is better not in a capture
        self.phase.zero_()

    def compute_gradients(self) -> None:
        self.phase.add_(1.0)
        for param, base in zip(self.params, self.bases, strict=True):
            param.grad.copy_(base * torch.sin(self.phase * (1.0 + base.abs())))

    def step(self) -> None:
        self.compute_gradients()
        self.optimizer.step()

    def captured(self) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self.step()
        return graph

    def everything(self) -> list[Tensor]:
        torch.cuda.synchronize()
        found = []
        for param in self.params:
            states = self.optimizer.state[param]
            found += [param.detach().clone(), *(state.clone() for state in states.values())]
            found.append(self.optimizer.store.layouts[param].scales.clone())
        return found

    def shown_step(self) -> int:
        return self.optimizer.state_dict()["param_groups"][0]["step"]


def warmed_up(*arguments: Any, steps: int = 2, **options: Any) -> Training:
    """On a side stream, as torch's documentation of CUDA graphs asks for."""
    training = Training(*arguments, **options)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(steps):
            training.step()
    torch.cuda.current_stream().wait_stream(stream)
    return training


def assert_same(first: Training, second: Training) -> None:
    for a, b in zip(first.everything(), second.everything(), strict=True):
        assert a.dtype == b.dtype and torch.equal(a.view(torch.uint8), b.view(torch.uint8))


@pytest.mark.cuda
@ALL_FORMATS
@ALL_MASTERS
def test_replays_equal_steps(fmt: Format, master: Master, gpu: str) -> None:
    replayed, eager = warmed_up(fmt, master), warmed_up(fmt, master)
    graph = replayed.captured()
    assert_same(replayed, eager)  # a capture runs nothing
    for _ in range(100):
        graph.replay()
        eager.step()
    assert_same(replayed, eager)
    assert replayed.shown_step() == eager.shown_step() == 102
    replayed.step()  # and eager steps go on from there
    eager.step()
    assert_same(replayed, eager)
    assert replayed.shown_step() == 103


@pytest.mark.cuda
@ALL_FORMATS
def test_capturable_equals_the_usual_step(fmt: Format, gpu: str) -> None:
    """Bitwise where the learning rate is an FP32 number; it is kept in FP32 on the device."""
    capturable, usual = (
        Training(fmt, MASTER["bfloat16+float32"], lr=2.0**-6, capturable=flag) for flag in (True, False)
    )
    for _ in range(5):
        capturable.step()
        usual.step()
    assert_same(capturable, usual)
    assert capturable.optimizer.param_groups[0]["step"] == 5


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_lr_tensor_is_read_at_each_replay(dtype: torch.dtype, gpu: str) -> None:
    rates = [torch.tensor(0.01, dtype=dtype, device=gpu) for _ in range(2)]
    replayed, eager = (warmed_up(FORMATS[4], MASTERS[3], lr=rate) for rate in rates)
    graph = replayed.captured()
    for step in range(20):
        for rate in rates:
            rate.fill_(0.01 / (1 + step))
        graph.replay()
        eager.step()
    assert_same(replayed, eager)


@pytest.mark.cuda
def test_float_lr_is_that_of_the_last_called_step(gpu: str) -> None:
    replayed, eager = warmed_up(FORMATS[0], MASTERS[0]), warmed_up(FORMATS[0], MASTERS[0])
    graph = replayed.captured()
    replayed.optimizer.param_groups[0]["lr"] = 0.5
    graph.replay()
    eager.step()
    assert_same(replayed, eager)
    eager.optimizer.param_groups[0]["lr"] = 0.5
    replayed.step()
    eager.step()
    graph.replay()
    eager.step()
    assert_same(replayed, eager)


@pytest.mark.cuda
@pytest.mark.parametrize("contiguous", [True, False], ids=["contiguous", "strided"])
def test_found_inf_under_capture(contiguous: bool, gpu: str) -> None:
    """Replays leave unscaled gradients, too, and those of skipped steps as they are."""
    replayed, eager = warmed_up(FORMATS[4], MASTERS[3]), warmed_up(FORMATS[4], MASTERS[3])
    for param in replayed.params if not contiguous else []:
        param.grad = torch.zeros(*param.shape, 2, dtype=param.dtype, device=gpu)[..., 0]
    scale = torch.tensor(128.0, device=gpu)
    found_inf = torch.zeros((), device=gpu)
    replayed.optimizer.grad_scale, replayed.optimizer.found_inf = scale, found_inf
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        replayed.compute_gradients()
        for param in replayed.params:
            param.grad.mul_(scale)
        replayed.optimizer.step()
    del replayed.optimizer.grad_scale, replayed.optimizer.found_inf
    for step in range(10):
        found_inf.fill_(float(step in (0, 4, 5)))
        scale.fill_(2.0**step)
        graph.replay()
        eager.compute_gradients()
        for param, other in zip(replayed.params, eager.params, strict=True):
            assert torch.equal(param.grad, other.grad * (scale if found_inf else 1.0))
        if step not in (0, 4, 5):
            eager.optimizer.step()
    assert_same(replayed, eager)
    assert replayed.shown_step() == eager.shown_step() == 9


@pytest.mark.cuda
def test_grad_scaler_without_synchronization(gpu: str) -> None:
    """torch warns of every synchronization."""
    training = warmed_up(FORMATS[0], MASTERS[0])
    scaler = torch.amp.GradScaler(gpu, init_scale=4.0)
    scaler.scale(torch.ones((), device=gpu))
    scaler.step(training.optimizer)
    scaler.update()
    training.compute_gradients()
    torch.cuda.set_sync_debug_mode("error")
    try:
        training.optimizer.step(grad_scaler=scaler)
        training.optimizer.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert training.shown_step() == 5


@pytest.mark.cuda
def test_capture_after_initialize_state(gpu: str) -> None:
    replayed, eager = Training(FORMATS[4], MASTERS[3]), Training(FORMATS[4], MASTERS[3])
    replayed.optimizer.initialize_state()
    graph = replayed.captured()
    for _ in range(3):
        graph.replay()
        eager.step()
    assert_same(replayed, eager)
    assert replayed.shown_step() == 3


@pytest.mark.cuda
def test_load_state_dict_reaches_the_graph(gpu: str) -> None:
    """Counters, states and learning rates are written in place."""
    rate = torch.tensor(0.01, device=gpu)
    replayed, eager = warmed_up(FORMATS[4], MASTERS[3], lr=rate), warmed_up(FORMATS[4], MASTERS[3], lr=rate.clone())
    graph = replayed.captured()
    saved = copy.deepcopy(replayed.optimizer.state_dict())
    params = [param.detach().clone() for param in replayed.params]
    for _ in range(5):
        graph.replay()
    rate.fill_(7.0)
    replayed.optimizer.load_state_dict(saved)
    with torch.no_grad():
        for param, before in zip(replayed.params, params, strict=True):
            param.copy_(before)
    replayed.phase.fill_(2.0)
    assert replayed.optimizer.param_groups[0]["lr"] is rate
    for _ in range(3):
        graph.replay()
        eager.step()
    assert_same(replayed, eager)
    assert replayed.shown_step() == 5


@pytest.mark.cuda
@pytest.mark.parametrize("copier", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))], ids=["deepcopy", "pickle"])
def test_copies_have_the_true_count(copier: Callable[[FusedAdam], FusedAdam], gpu: str) -> None:
    training = warmed_up(FORMATS[4], MASTERS[3])
    graph = training.captured()
    for _ in range(7):
        graph.replay()
    other = copier(training.optimizer)
    assert other.param_groups[0]["step"] == 9 and other.capturable
    states = training.optimizer.state_dict()["state"]
    assert all(set(value) == {"exp_avg", "exp_avg_sq", "master_param"} for value in states.values())
    graph.replay()
    assert training.shown_step() == 10 and other.state_dict()["param_groups"][0]["step"] == 9


@pytest.mark.cuda
def test_a_step_written_from_outside(gpu: str) -> None:
    replayed, eager = warmed_up(FORMATS[0], MASTERS[0]), warmed_up(FORMATS[0], MASTERS[0])
    graph = replayed.captured()
    for training in (replayed, eager):
        training.optimizer.param_groups[0]["step"] = 1000
    assert replayed.shown_step() == 1000
    replayed.step()
    eager.step()
    graph.replay()
    eager.step()
    assert_same(replayed, eager)
    assert replayed.shown_step() == 1002


@pytest.mark.cuda
def test_refused_captures(gpu: str, use_backend: Callable[[str], None]) -> None:
    """And the optimizer works as before."""

    def refuse(training: Training, message: str) -> None:
        before = [param.detach().clone() for param in training.params]
        with pytest.raises(RuntimeError, match=message):
            training.captured()
        torch.cuda.synchronize()
        assert all(torch.equal(a, b) for a, b in zip(training.params, before, strict=True))

    refuse(Training(FORMATS[0], MASTERS[0]), r"parameter 0 \(.* has no states yet; run one warm-up step")
    refuse(warmed_up(FORMATS[0], MASTERS[0], capturable=False), "capturable=True")
    training = warmed_up(FORMATS[0], MASTERS[0])
    training.optimizer.param_groups[0]["lr"] = 0.3
    refuse(training, "param group 0: 'lr' was changed")
    training.step()
    training.optimizer.param_groups[0]["step"] = 0
    refuse(training, "param group 0: 'step' was changed")
    training.step()
    use_backend("torch")
    refuse(training, "updated by the torch backend")
    use_backend("")
    training.captured().replay()
    assert training.shown_step() == 2


@pytest.mark.cuda
def test_capture_with_unusual_gradients(gpu: str) -> None:
    """Not contiguous: the copies become part of the graph."""
    replayed, eager = warmed_up(FORMATS[0], MASTERS[0]), warmed_up(FORMATS[0], MASTERS[0])
    for training in (replayed, eager):
        for param in training.params:
            param.grad = torch.zeros(*param.shape, 2, device=gpu)[..., 0]
    graph = replayed.captured()
    for _ in range(5):
        graph.replay()
        eager.step()
    assert_same(replayed, eager)


@pytest.mark.cuda
def test_many_launches_per_step(gpu: str) -> None:
    """More tensors and groups than fit into one launch: every group still counts once per step."""
    shapes = [(1 + i % 37,) for i in range(600)]
    trainings = []
    for _ in range(2):
        training = Training(FORMATS[0], MASTERS[0], shapes=shapes)
        options = {"lr": 0.01, "weight_decay": 0.1, "decoupled_weight_decay": True, "capturable": True}
        training.optimizer = FusedAdam([{"params": training.params[i::40]} for i in range(40)], **options)
        training.step()
        trainings.append(training)
    graph = trainings[0].captured()
    for _ in range(5):
        graph.replay()
        trainings[1].step()
    assert_same(*trainings)
    steps = [group["step"] for group in trainings[0].optimizer.state_dict()["param_groups"]]
    assert steps == [6] * 40


# --- streams and devices ----------------------------------------------------------------------------------------------


@pytest.mark.cuda
def test_current_stream_is_honoured(gpu: str) -> None:
    """A step waits for what its stream does, and for nothing else."""
    side = torch.cuda.Stream()
    late, expected = (Training(FORMATS[4], MASTERS[3], capturable=False) for _ in range(2))
    late.step()
    expected.step()
    new = [torch.cos(base) for base in late.bases]
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        torch.cuda._sleep(200_000_000)  # cycles: the gradients come late
        for param, grad in zip(late.params, new, strict=True):
            param.grad.copy_(grad)
        late.optimizer.step()
    assert not side.query()  # the host did not wait
    for param, grad in zip(expected.params, new, strict=True):
        param.grad.copy_(grad)
    expected.optimizer.step()
    assert_same(late, expected)


@two_gpus
@pytest.mark.parametrize("capturable", [False, True])
def test_two_devices(capturable: bool, gpu: str) -> None:
    """One optimizer; the device that is current stays so, and each device's current stream is used."""

    def make(devices: tuple[str, str]) -> tuple[list[Tensor], FusedAdam]:
        params = [torch.nn.Parameter(values((6, 128), torch.bfloat16, d, seed=i)) for i, d in enumerate(devices)]
        options = {"exp_avg_dtype": torch.int8, "exp_avg_sq_dtype": torch.int8}
        return params, FusedAdam(
            params, lr=2.0**-6, weight_decay=0.1, capturable=capturable, **options, decoupled_weight_decay=True
        )

    params, both = make(("cuda:0", "cuda:1"))
    others, single = make(("cuda:0", "cuda:0"))
    side = torch.cuda.Stream("cuda:1")
    torch.cuda.set_device(0)
    for step in range(4):
        for i, (param, other) in enumerate(zip(params, others, strict=True)):
            param.grad = values((6, 128), torch.bfloat16, str(param.device), seed=10 * step + i)
            other.grad = param.grad.to(other.device)
        torch.cuda.synchronize(0)
        torch.cuda.synchronize(1)
        with torch.cuda.stream(side):  # makes cuda:1 current
            both.step()
            assert torch.cuda.current_device() == 1
        assert torch.cuda.current_device() == 0
        side.synchronize()
        both.zero_grad()
        single.step()
    torch.cuda.synchronize(0)
    for param, other in zip(params, others, strict=True):
        assert torch.equal(param.to(other.device), other)
        for name in both.state[param]:
            actual, expected = both.get_unscaled_state(param, name), single.get_unscaled_state(other, name)
            assert torch.equal(actual.to(expected.device), expected)
    assert both.state_dict()["param_groups"][0]["step"] == 4


@pytest.mark.cuda
def test_parameters_on_cpu_and_gpu(gpu: str) -> None:
    params = [torch.nn.Parameter(torch.ones(64, device=device)) for device in ("cpu", gpu)]
    optimizer = FusedAdam(params, lr=2.0**-6, capturable=True)
    for _ in range(3):
        for param in params:
            param.grad = torch.ones_like(param)
        optimizer.step()
    torch.testing.assert_close(params[0], params[1].cpu(), rtol=1e-6, atol=0.0)
    assert optimizer.state_dict()["param_groups"][0]["step"] == 3
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(RuntimeError, match="parameters on cpu are updated by the cpu backend"), torch.cuda.graph(graph):
        optimizer.step()
