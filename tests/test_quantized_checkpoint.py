"""Checkpoints of quantized weights move between ranks byte for byte, and training goes on as if never stopped."""

from __future__ import annotations

from pathlib import Path

import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import distributed
from distributed import Part, assert_same, join_all
from quantized_cases import RECIPES, Run

SAVED_AT, END = 3, 6


def save(run: Run, folder: str) -> None:
    model, optimizer = get_state_dict(run.model, run.optimizer)
    dcp.save({"model": model, "optimizer": optimizer}, checkpoint_id=folder)


def load(run: Run, folder: str) -> None:
    model, optimizer = get_state_dict(run.model, run.optimizer)
    state = {"model": model, "optimizer": optimizer}
    dcp.load(state, checkpoint_id=folder)
    set_state_dict(run.model, run.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])


def train_and_save(recipes: list[str], folder: str) -> dict[str, dict[str, Part]]:
    found = {}
    for recipe in recipes:
        run = Run(recipe)
        run.train(0, SAVED_AT)
        save(run, f"{folder}/{recipe}")
        found[recipe] = run.snapshot()
    return found


def load_and_save(recipes: list[str], source: str, target: str) -> dict[str, list[dict[str, Part]]]:
    """What is loaded into a fresh run and saved again, and what training makes of it."""
    found = {}
    for recipe in recipes:
        run = Run(recipe, fresh=True)
        load(run, f"{source}/{recipe}")
        save(run, f"{target}/{recipe}")
        loaded = run.snapshot()
        run.train(SAVED_AT, END)
        found[recipe] = [loaded, run.snapshot()]
    return found


def straight(recipes: list[str]) -> dict[str, list[dict[str, Part]]]:
    found = {}
    for recipe in recipes:
        run = Run(recipe, "plain")
        run.train(0, SAVED_AT)
        half_way = run.snapshot()
        run.train(SAVED_AT, END)
        found[recipe] = [half_way, run.snapshot()]
    return found


def test_training_goes_on_on_other_ranks_as_if_never_stopped(tmp_path: Path) -> None:
    recipes = list(RECIPES)
    expected = straight(recipes)
    saved = distributed.run(4, train_and_save, recipes, f"{tmp_path}/4")
    for recipe in recipes:
        assert_same(join_all([result[recipe] for result in saved]), join_all([expected[recipe][0]]))
    for source, ranks in [(4, 2), (2, 3), (3, 1)]:
        results = distributed.run(ranks, load_and_save, recipes, f"{tmp_path}/{source}", f"{tmp_path}/{ranks}")
        for recipe in recipes:
            for at in (0, 1):
                joined = join_all([result[recipe][at] for result in results])
                assert_same(joined, join_all([expected[recipe][at]]))
