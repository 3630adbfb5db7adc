"""Train the demo model. `python training/train.py --help`; see README.md beside this file.

Interrupted runs go on where they were: every two minutes the whole state is stored, and each batch is a function of
(seed, step, rank). The log is one JSON object a line.

Each core has a process of its own with one thread, and gradients are averaged once a step. Threads that share every
small product wait for each other all the time when something else runs on the machine: a step then took ten times as
long.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from tokenizers import Tokenizer
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run as a script, from anywhere

from foveal.models.config import VL2Config
from training.batches import BatchMaker
from training.learner import Learner
from training.muon import Muon
from training.pool import CACHE, DEFAULT_COUNTS, load_pool
from training.quick_eval import quick_accuracy
from training.recipe import Recipe, checkpoint_config
from training.tokens import BOS, EOS, train_tokenizer

CHECKPOINT_EVERY_S = 120.0


class Trainer:
    """State of one run in one process: parameters, optimizers, step. All ranks hold the same."""

    def __init__(
        self, recipe: Recipe, folder: Path, *, autocast: bool, rank: int = 0, ranks: int = 1
    ) -> None:
        self.recipe, self.folder, self.autocast = recipe, folder, autocast
        self.rank, self.ranks = rank, ranks
        self.tokenizer = run_tokenizer(folder)
        ids = [self.tokenizer.token_to_id(t) for t in (BOS, EOS)]
        values = checkpoint_config(self.tokenizer.get_vocab_size(), *ids)
        self.learner = Learner(VL2Config.from_dict(values), self.tokenizer, recipe.seed)
        self.optimizers = make_optimizers(self.learner, recipe, autocast=autocast)
        self.pool = load_pool(recipe.seed, DEFAULT_COUNTS)
        self.maker = BatchMaker(self.pool, self.tokenizer, recipe.seed)
        self.step = 0
        self.seconds = 0.0

    def precision(self) -> AbstractContextManager[Any]:
        return torch.autocast("cpu", torch.bfloat16) if self.autocast else nullcontext()

    def train_step(self) -> dict[str, float]:
        """One update; returns the facts to log."""
        recipe, step = self.recipe, self.step
        torch.manual_seed((recipe.seed * 1_000_003 + step) * self.ranks + self.rank)
        batch = self.maker.make(step, recipe.plan(self.ranks), self.rank)
        symbolic = torch.rand(batch.pictures) < recipe.symbolic_share(step)
        tiles = np.asarray(self.pool.tiles[batch.scenes])
        classes = torch.from_numpy(np.asarray(self.pool.classes[batch.scenes]))
        with self.precision():
            loss, facts = self.learner.loss(batch, tiles, classes, symbolic, recipe.losses)
        loss.backward()  # type: ignore[no-untyped-call]
        average_gradients(self.learner, self.ranks)
        norm = nn.utils.clip_grad_norm_(self.learner.parameters(), 5.0)
        for optimizer, base in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = base * recipe.rate(step)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        self.step += 1
        return facts | {"norm": float(norm)}

    def save(self) -> None:
        """Write the state beside the old one, then put it in its place."""
        path = self.folder / "state.pt"
        state = {
            "step": self.step,
            "seconds": self.seconds,
            "learner": self.learner.state_dict(),
            "optimizers": [o.state_dict() for o, _ in self.optimizers],
            "tokenizer": self.tokenizer.to_str(),
        }
        torch.save(state, path.with_suffix(".partial"))
        path.with_suffix(".partial").replace(path)

    def resume(self) -> bool:
        """Take up a stored state; False when there is none."""
        path = self.folder / "state.pt"
        if not path.exists():
            return False
        state = torch.load(path, weights_only=True)
        self.step, self.seconds = state["step"], state["seconds"]
        self.learner.load_state_dict(state["learner"])
        for (optimizer, _), stored in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(stored)
        return True


def run_tokenizer(folder: Path) -> Tokenizer:
    """The tokenizer of a stored run, so that its ids stay what they were; a new one otherwise."""
    path = folder / "state.pt"
    if path.exists():
        return Tokenizer.from_str(torch.load(path, weights_only=True, mmap=True)["tokenizer"])
    return train_tokenizer()


def average_gradients(learner: Learner, ranks: int) -> None:
    """Mean of the ranks' gradients, in one exchange. What a rank's batch did not touch counts as zero."""
    if ranks == 1:
        return
    params = [p for p in learner.parameters() if p.requires_grad]
    flat = torch.cat(
        [(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in params]
    )
    dist.all_reduce(flat)
    for p, part in zip(params, (flat / ranks).split([p.numel() for p in params]), strict=True):
        p.grad = part.view_as(p)


def make_optimizers(
    learner: Learner, recipe: Recipe, *, autocast: bool
) -> list[tuple[torch.optim.Optimizer, float]]:
    """Muon for the weight matrices of layers, AdamW for all else."""
    matrices: list[Tensor] = []
    others: list[Tensor] = []
    for name, p in learner.named_parameters():
        is_table = any(
            word in name
            for word in ("embed", "lm_head", "tables", "router", "pos_embed", "newline")
        )
        (matrices if p.dim() in (2, 3) and not is_table else others).append(p)
    muon = Muon(matrices, recipe.muon_rate, dtype=torch.bfloat16 if autocast else torch.float32)
    adam = torch.optim.AdamW(
        others, recipe.adam_rate, betas=(0.9, 0.98), weight_decay=0.0, fused=True
    )
    return [(muon, recipe.muon_rate), (adam, recipe.adam_rate)]


def run(trainer: Trainer, log: Path, *, eval_every: int, until: int) -> None:
    """Train up to step `until`, storing the state every two minutes. Rank 0 writes."""
    stored = started = time.perf_counter()
    before = trainer.seconds
    means: dict[str, list[float]] = {}
    while trainer.step < until:
        for name, value in trainer.train_step().items():
            means.setdefault(name, []).append(value)
        now = time.perf_counter()
        trainer.seconds = before + now - started
        if trainer.rank:
            continue
        if trainer.step % 25 == 0 or trainer.step == until:
            facts = {name: round(float(np.mean(v)), 4) for name, v in means.items()}
            entry: dict[str, Any] = {
                "step": trainer.step,
                "seconds": round(trainer.seconds, 1),
                **facts,
            }
            if trainer.step % eval_every == 0 or trainer.step == until:
                with trainer.precision():
                    entry["accuracy"] = quick_accuracy(trainer.learner, trainer.tokenizer)
            with log.open("a", encoding="utf-8") as out:
                out.write(json.dumps(entry) + "\n")
            means = {}
        if now - stored > CHECKPOINT_EVERY_S:
            trainer.save()
            stored = now
    if not trainer.rank:
        trainer.save()


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--run", default="demo-vl2", help="name of the run's folder under training/.cache"
    )
    parser.add_argument("--steps", type=int, default=Recipe().steps)
    parser.add_argument(
        "--until", type=int, help="stop at this step (the schedule stays that of --steps)"
    )
    parser.add_argument("--seed", type=int, default=Recipe().seed)
    parser.add_argument("--ranks", type=int, default=2, help="processes, one core each")
    parser.add_argument(
        "--port", type=int, default=29517, help="port on this machine where the ranks meet"
    )
    parser.add_argument("--eval-every", type=int, default=250)
    parser.add_argument("--fresh", action="store_true", help="ignore a stored state")
    parser.add_argument(
        "--autocast",
        choices=("auto", "on", "off"),
        default="auto",
        help="bfloat16 products over float32 weights; auto: where the CPU has tile units for them",
    )
    return parser.parse_args()


def work(rank: int, args: argparse.Namespace) -> None:
    """One rank's part of the run."""
    if args.ranks > 1:
        os.setsid()  # Linux shares cores out by session: each rank gets a share of its own
    torch.set_num_threads(1)
    if args.ranks > 1:
        address = f"tcp://127.0.0.1:{args.port}"
        dist.init_process_group("gloo", init_method=address, rank=rank, world_size=args.ranks)
    has_tiles = bool(torch.cpu._is_amx_tile_supported())
    autocast = args.autocast == "on" or (args.autocast == "auto" and has_tiles)
    folder = CACHE / args.run
    recipe = replace(Recipe(), steps=args.steps, seed=args.seed)
    trainer = Trainer(recipe, folder, autocast=autocast, rank=rank, ranks=args.ranks)
    log = folder / "log.jsonl"
    if not trainer.resume() and not rank:
        log.unlink(missing_ok=True)
    run(trainer, log, eval_every=args.eval_every, until=args.until or args.steps)


def main() -> None:
    args = parse_arguments()
    (CACHE / args.run).mkdir(parents=True, exist_ok=True)
    if args.fresh:
        (CACHE / args.run / "state.pt").unlink(missing_ok=True)
    load_pool(args.seed, DEFAULT_COUNTS, workers=args.ranks)  # drawn once, before the ranks start
    if args.ranks == 1:
        work(0, args)
        return
    torch.multiprocessing.spawn(work, (args,), args.ranks)  # type: ignore[no-untyped-call]


if __name__ == "__main__":
    main()
