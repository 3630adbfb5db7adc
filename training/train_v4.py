"""Train demo-v4. `python training/train_v4.py --help`; as `train.py`, and resumable like it.

The state is stored every two minutes. A finished run goes on when it is started again with more `--steps`.
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
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run as a script, from anywhere

from foveal.models.v4_config import V4Config
from training.muon import Muon
from training.pool import CACHE
from training.train import CHECKPOINT_EVERY_S
from training.v4_batches import V4BatchMaker
from training.v4_learner import V4Learner
from training.v4_pool import has_v4_pool, load_v4_pool
from training.v4_quick_eval import quick_accuracy
from training.v4_recipe import V4Recipe, checkpoint_config
from training.v4_tokens import V4Text

# Parts of the names of parameters that AdamW trains although they are matrices.
NOT_MATRICES = ("embed_tokens", "lm_head", "tables", "router", "probe", "_hc", "hc_head", "ape")


class V4Trainer:
    """State of one run in one process: parameters, optimizers, step. All ranks hold the same."""

    def __init__(
        self, recipe: V4Recipe, folder: Path, *, autocast: bool, rank: int = 0, ranks: int = 1
    ) -> None:
        self.recipe, self.folder, self.autocast = recipe, folder, autocast
        self.rank, self.ranks = rank, ranks
        self.text = V4Text()
        config = V4Config.from_dict(checkpoint_config(self.text.vocab_size))
        self.learner = V4Learner(config, self.text, recipe.seed)
        self.optimizers = make_optimizers(self.learner, recipe, autocast=autocast)
        window, ratios = config.language.sliding_window, set(config.language.ratios)
        self.maker = V4BatchMaker(
            load_v4_pool(1), self.text, recipe.seed, window=window, ratios=ratios
        )
        self.step = 0
        self.seconds = 0.0

    def precision(self) -> AbstractContextManager[Any]:
        return torch.autocast("cpu", torch.bfloat16) if self.autocast else nullcontext()

    def train_step(self) -> dict[str, float]:
        """One update; returns the facts to log."""
        recipe, step = self.recipe, self.step
        torch.manual_seed((recipe.seed * 1_000_003 + step) * self.ranks + self.rank)
        batch = self.maker.make(step, recipe.v4_plan(self.ranks), self.rank)
        symbolic = torch.rand(len(batch.pictures.grids)) < recipe.symbolic_share(step)
        with self.precision():
            loss, facts = self.learner.loss(batch, symbolic, recipe.losses)
        loss.backward()  # type: ignore[no-untyped-call]
        average_gradients(self.learner, self.ranks)
        norm = nn.utils.clip_grad_norm_(self.learner.parameters(), 5.0)
        for optimizer, base in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = base * recipe.rate(step)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        crowded = self.learner.balance(recipe.balance_rate * recipe.rate(step))
        self.step += 1
        return facts | {"norm": float(norm), "crowded": crowded}

    def save(self) -> None:
        """Write the state beside the old one, then put it in its place."""
        path = self.folder / "state.pt"
        state = {
            "step": self.step,
            "seconds": self.seconds,
            "learner": self.learner.state_dict(),
            "optimizers": [o.state_dict() for o, _ in self.optimizers],
            "tokenizer": self.text.backend.to_str(),
        }
        torch.save(state, path.with_suffix(".partial"))
        path.with_suffix(".partial").replace(path)

    def resume(self) -> bool:
        """Take up a stored state; False when there is none."""
        path = self.folder / "state.pt"
        if not path.exists():
            return False
        state = torch.load(path, weights_only=True)
        if state["tokenizer"] != self.text.backend.to_str():
            raise SystemExit(f"{path} was made with another tokenizer; start again with --fresh")
        self.step, self.seconds = state["step"], state["seconds"]
        self.learner.load_state_dict(state["learner"])
        for (optimizer, _), stored in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(stored)
        return True


def average_gradients(learner: V4Learner, ranks: int) -> None:
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
    learner: V4Learner, recipe: V4Recipe, *, autocast: bool
) -> list[tuple[torch.optim.Optimizer, float]]:
    """Muon for the weight matrices of layers, AdamW for all else."""
    matrices: list[Tensor] = []
    others: list[Tensor] = []
    hyper: list[Tensor] = []
    for name, p in learner.named_parameters():
        if p.requires_grad:
            is_matrix = p.dim() in (2, 3) and not any(word in name for word in NOT_MATRICES)
            (matrices if is_matrix else hyper if "hc" in name else others).append(p)
    muon = Muon(matrices, recipe.muon_rate, dtype=torch.bfloat16 if autocast else torch.float32)
    adam = torch.optim.AdamW(
        others, recipe.adam_rate, betas=(0.9, 0.98), weight_decay=0.0, fused=True
    )
    # A small change of these moves every stream of every token.
    slow = torch.optim.AdamW(
        hyper, recipe.hyper_rate, betas=(0.9, 0.98), weight_decay=0.0, fused=True
    )
    return [(muon, recipe.muon_rate), (adam, recipe.adam_rate), (slow, recipe.hyper_rate)]


def run(trainer: V4Trainer, log: Path, args: argparse.Namespace) -> None:
    """Train up to the last step, storing the state every two minutes. Rank 0 writes."""
    until = args.until or args.steps
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
        is_last = trainer.step == until
        if trainer.step % args.log_every == 0 or is_last:
            facts = {name: round(float(np.mean(v)), 4) for name, v in means.items()}
            entry: dict[str, Any] = {
                "step": trainer.step,
                "seconds": round(trainer.seconds, 1),
                **facts,
            }
            if trainer.step % args.eval_every == 0 or is_last:
                with trainer.precision():
                    entry["accuracy"] = quick_accuracy(trainer.learner, args.eval_count)
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
        "--run", default="demo-v4", help="name of the run's folder under training/.cache"
    )
    parser.add_argument("--steps", type=int, default=V4Recipe().steps)
    parser.add_argument(
        "--until", type=int, help="stop at this step (the schedule stays that of --steps)"
    )
    parser.add_argument("--seed", type=int, default=V4Recipe().seed)
    parser.add_argument(
        "--rows", type=int, default=V4Recipe().rows, help="rows of a batch, over all ranks"
    )
    parser.add_argument(
        "--tiles", type=int, default=V4Recipe().tiles, help="pictures of a batch, over all ranks"
    )
    parser.add_argument(
        "--symbolic",
        type=int,
        nargs=2,
        metavar=("UNTIL", "SEEING"),
        help="steps of the symbolic stage",
    )
    parser.add_argument("--ranks", type=int, default=2, help="processes, one core each")
    parser.add_argument(
        "--port", type=int, default=29518, help="port on this machine where the ranks meet"
    )
    parser.add_argument("--log-every", type=int, default=25)
    parser.add_argument("--eval-every", type=int, default=300)
    parser.add_argument("--eval-count", type=int, default=50, help="scenes a task")
    parser.add_argument("--fresh", action="store_true", help="ignore a stored state")
    parser.add_argument(
        "--autocast", choices=("auto", "on", "off"), default="auto", help="see train.py"
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
    recipe = replace(V4Recipe(), steps=args.steps, seed=args.seed, rows=args.rows, tiles=args.tiles)
    if args.symbolic:
        recipe = replace(recipe, symbolic_until=args.symbolic[0], seeing_from=args.symbolic[1])
    trainer = V4Trainer(recipe, folder, autocast=autocast, rank=rank, ranks=args.ranks)
    log = folder / "log.jsonl"
    if (args.fresh or not trainer.resume()) and not rank:
        log.unlink(missing_ok=True)
    run(trainer, log, args)


def main() -> None:
    args = parse_arguments()
    (CACHE / args.run).mkdir(parents=True, exist_ok=True)
    if not has_v4_pool(1):
        load_v4_pool(1, workers=args.ranks)  # drawn once, before the ranks start
    if args.ranks == 1:
        work(0, args)
        return
    torch.multiprocessing.spawn(work, (args,), args.ranks)  # type: ignore[no-untyped-call]


if __name__ == "__main__":
    main()
