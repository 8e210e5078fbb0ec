"""The comparison of the demo's runs: as numbers, as a table and as a picture."""

import json
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from run_record import RunRecord

BASELINE_COLOR, FUSED_COLOR, RESUMED_COLORS = "#9aa0a6", "#1f77b4", ("#d9480f", "#2b8a3e")
SUMMARIZED = (
    "device",
    "world_size",
    "parameters",
    "first_train_loss",
    "final_train_loss",
    "held_out_loss",
    "bytes_of_parameter",
    "bytes_of_state",
    "bytes_of_both",
    "step_ms",
    "optimizer_ms",
    "save_ms",
)
SMOOTHING = 9  # steps averaged for each point of a curve


@dataclass
class Resume:
    """A resumed run and the one that was never interrupted."""

    run: RunRecord
    uninterrupted: RunRecord

    @property
    def step(self) -> int:
        return self.run.train_losses[0][0]

    @property
    def deviations(self) -> list[float]:
        """Of each step's loss, relative to the same step of the uninterrupted run."""
        expected = dict(self.uninterrupted.train_losses)
        return [abs(loss / expected[step] - 1) for step, loss in self.run.train_losses]

    @property
    def largest_deviation(self) -> float:
        return max(self.deviations)

    @property
    def mean_deviation(self) -> float:
        return statistics.fmean(self.deviations)


@dataclass
class Comparison:
    baseline: RunRecord
    fused: RunRecord
    resumed: RunRecord
    resumed_again: RunRecord
    title: str = "FusedAdamW"  # of `fused`

    @property
    def runs(self) -> dict[str, RunRecord]:
        return {
            "torch AdamW": self.baseline,
            self.title: self.fused,
            "resumed": self.resumed,
            "resumed again": self.resumed_again,
        }

    @property
    def resumes(self) -> list[Resume]:
        return [Resume(self.resumed, self.fused), Resume(self.resumed_again, self.fused)]

    @property
    def held_out_difference(self) -> float:
        return abs(self.fused.held_out_loss / self.baseline.held_out_loss - 1)


def write_summary(comparison: Comparison, failures: list[str], path: Path) -> None:
    summary = {
        "runs": {name: {what: getattr(run, what) for what in SUMMARIZED} for name, run in comparison.runs.items()},
        "held_out_difference": comparison.held_out_difference,
        "resumes": [
            {
                "step": resume.step,
                "world_size": resume.run.world_size,
                "largest_deviation": resume.largest_deviation,
                "mean_deviation": resume.mean_deviation,
                "losses": resume.run.train_losses,
            }
            for resume in comparison.resumes
        ],
        "failures": failures,
    }
    path.write_text(json.dumps(summary, indent=2) + "\n")


def table(comparison: Comparison) -> str:
    runs = comparison.runs.values()
    rows = [
        ["", *comparison.runs],
        ["ran on", *(f"{_ranks(run)}, {run.device}" for run in runs)],
        ["steps", *(f"{run.train_losses[0][0]} to {run.train_losses[-1][0] + 1}" for run in runs)],
        ["train loss, first step", *(f"{run.first_train_loss:.3f}" for run in runs)],
        ["train loss, last steps", *(f"{run.final_train_loss:.3f}" for run in runs)],
        ["held-out loss at the end", *(f"{run.held_out_loss:.3f}" for run in runs)],
        ["bytes per parameter: itself", *(f"{run.bytes_of_parameter:.2f}" for run in runs)],
        ["bytes per parameter: optimizer state", *(f"{run.bytes_of_state:.2f}" for run in runs)],
        ["bytes per parameter: both", *(f"{run.bytes_of_both:.2f}" for run in runs)],
        ["time per step", *(f"{run.step_ms:.1f} ms" for run in runs)],
        ["time per optimizer.step()", *(f"{run.optimizer_ms:.1f} ms" for run in runs)],
        ["stall of a save", *(f"{run.save_ms:.1f} ms" if run.save_ms else "-" for run in runs)],
    ]
    widths = [max(map(len, column)) for column in zip(*rows)]
    lines = [
        first.ljust(widths[0]) + "".join(f"  {cell:>{width}}" for cell, width in zip(rest, widths[1:]))
        for first, *rest in rows
    ]
    lines.insert(1, "-" * len(lines[0]))
    return "\n".join([*lines, "", *_conclusions(comparison)])


def _conclusions(comparison: Comparison) -> list[str]:
    lines = [f"Held-out losses of the two optimizers differ by {comparison.held_out_difference:.2%}."]
    for saved, resume in zip((comparison.fused, comparison.resumed), comparison.resumes):
        lines.append(
            f"Saved after step {resume.step} on {_ranks(saved)}, resumed on {_ranks(resume.run)}: train losses deviate "
            f"from the uninterrupted run's by {resume.mean_deviation:.3%} on average, "
            f"{resume.largest_deviation:.3%} at most."
        )
    baseline, fused = comparison.baseline.save_ms, comparison.fused.save_ms
    lines.append(f"A save stalls training for {fused:.1f} ms by Checkpointer, and {baseline:.1f} ms by dcp.async_save.")
    return lines


def draw(comparison: Comparison, path: Path) -> None:
    figure = Figure(figsize=(12, 6), layout="constrained")
    axes = figure.subplot_mosaic(
        [["losses", "bytes"], ["differences", "bytes"]], width_ratios=(2.4, 1), height_ratios=(3, 1)
    )
    _draw_losses(axes["losses"], comparison)
    _draw_differences(axes["differences"], comparison)
    _draw_bytes(axes["bytes"], comparison)
    axes["losses"].sharex(axes["differences"])
    for each in axes.values():
        each.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=130)


def _draw_losses(axes: Axes, comparison: Comparison) -> None:
    styles: tuple[tuple[str, dict[str, Any]], ...] = (
        (BASELINE_COLOR, {"linewidth": 5, "alpha": 0.6}),
        (FUSED_COLOR, {"linewidth": 2}),
        *((color, {"linewidth": 2, "dashes": (2, 2)}) for color in RESUMED_COLORS),
    )
    for (name, run), (color, style) in zip(comparison.runs.items(), styles):
        steps, losses = zip(*run.train_losses)
        axes.plot(steps, _smooth(losses), color=color, label=f"{name}, {_ranks(run)}", **style)
    for run, color, size in ((comparison.baseline, BASELINE_COLOR, 11), (comparison.fused, FUSED_COLOR, 6)):
        axes.plot(*zip(*run.held_out_losses), "o", color=color, markersize=size, markeredgecolor="white")
    axes.plot([], [], "o", color="black", markeredgecolor="white", markersize=8, label="on held-out text")
    _mark_resume(axes, comparison)
    for resume in comparison.resumes:
        top = axes.get_xaxis_transform()  # 0.98 of the height
        axes.text(resume.step, 0.98, "checkpoint", transform=top, rotation=90, ha="right", va="top")
    axes.set(title="Loss of a byte-level GPT on Python's standard library", ylabel="nats per byte")
    axes.legend(frameon=False)
    axes.grid(alpha=0.25)


def _draw_differences(axes: Axes, comparison: Comparison) -> None:
    pairs = [(comparison.fused, comparison.baseline, f"{comparison.title} to torch AdamW", FUSED_COLOR)]
    for resume, color in zip(comparison.resumes, RESUMED_COLORS):
        pairs.append((resume.run, resume.uninterrupted, f"on {_ranks(resume.run)} to uninterrupted", color))
    for run, reference, label, color in pairs:
        expected = dict(reference.train_losses)
        steps, differences = zip(*((step, 100 * (loss / expected[step] - 1)) for step, loss in run.train_losses))
        axes.plot(steps, differences, color=color, label=label, linewidth=1.4)
    _mark_resume(axes, comparison)
    axes.set(xlabel="step", ylabel="difference in %")
    axes.margins(y=0.35)  # room for the legend
    axes.legend(frameon=False, ncols=3, loc="lower left", fontsize="small")
    axes.grid(alpha=0.25)


def _draw_bytes(axes: Axes, comparison: Comparison) -> None:
    runs = {"torch AdamW": (comparison.baseline, BASELINE_COLOR), comparison.title: (comparison.fused, FUSED_COLOR)}
    for position, (run, color) in enumerate(runs.values()):
        bottom = 0.0
        for part, size, alpha in (("parameter", run.bytes_of_parameter, 0.9), ("state", run.bytes_of_state, 0.5)):
            axes.bar(position, size, 0.8, bottom, color=color, alpha=alpha)
            axes.text(position, bottom + size / 2, f"{part} {size:.2f}", ha="center", va="center")
            bottom += size
        axes.text(position, bottom, f"{bottom:.2f}", ha="center", va="bottom", weight="bold")
    axes.set_xticks(range(len(runs)), runs)
    axes.set(title="Bytes per parameter", ylabel="parameter and optimizer state, without gradient")


def _mark_resume(axes: Axes, comparison: Comparison) -> None:
    for resume in comparison.resumes:
        axes.axvline(resume.step, color="black", linewidth=0.8, linestyle=":")


def _smooth(losses: Sequence[float]) -> np.ndarray:
    """A running mean, over fewer steps at both ends."""
    window = np.ones(SMOOTHING)
    return np.convolve(losses, window, mode="same") / np.convolve(np.ones(len(losses)), window, mode="same")


def _ranks(run: RunRecord) -> str:
    return f"{run.world_size} rank{'s' if run.world_size > 1 else ''}"
