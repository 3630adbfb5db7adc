"""The model under training: initial weights, forward pass over padded batches, and the losses.

It trains `foveal.models.VL2Model` itself, through an attention context of its own. Beside the answers it teaches
 - each projector cell what it shows (`CellTeacher`), scored against the word embeddings themselves where there is a
   word,
 - two heads of two middle layers to look at the evidence,
 - the routers to share the load among experts.
Legend: B samples, P of them with a picture, L padded length, D hidden width, H heads, R supervised rows.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor, nn
from torch.nn import functional as F

from foveal.models.config import VL2Config
from foveal.models.layers import Router
from foveal.models.vl2 import VL2Model
from training.batches import IMAGE_TOKENS, Batch, picture_start
from training.cells import COORDINATES, FAMILIES, FAMILY_SCALES, FAMILY_WEIGHTS, NONE, NUM_CELLS
from training.drawing import COLOURS, SHAPES
from training.fast_bodies import attention_weights, install

WIDE = 0.3  # spread of embeddings: wide, so that the layers' first outputs do not drown them
NOISE = 0.1  # of symbolic cells


@dataclass(eq=False)
class DenseBatchContext:
    """Causal attention inside each row of a right-padded batch. Keeps the loss of the supervised heads."""

    size: int
    # [B, L, L], True where a query must not see a key; causal when not given.
    hidden: Tensor | None = None
    # For each supervised layer: rows [R, 2] (sample, place), where their first heads should look [R, HEADS, L],
    # weights [R].
    looks: Mapping[int, tuple[Tensor, Tensor, Tensor]] = field(default_factory=dict)
    losses: list[Tensor] = field(default_factory=list)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        q, k, v = (t.unflatten(0, (self.size, -1)).transpose(1, 2) for t in (q, k, v))
        if self.hidden is None:
            self.hidden = torch.ones(1, q.shape[2], q.shape[2], dtype=torch.bool).triu(1)
        if layer in self.looks and len(self.looks[layer][0]):
            self.losses.append(look_loss(q, k, scale, self.hidden, *self.looks[layer]))
        out = attention_weights(q, k, scale, self.hidden[:, None]) @ v
        return out.transpose(1, 2).flatten(0, 1)

    def attend_latent(self, layer: int, *args: Tensor | float) -> Tensor:
        raise NotImplementedError("the demo model has plain heads")


def look_loss(
    q: Tensor,
    k: Tensor,
    scale: float,
    hidden: Tensor,
    rows: Tensor,
    targets: Tensor,
    weights: Tensor,
) -> Tensor:
    """Divergence of where the first heads look from where they should, 0 when equal; `q`, `k` [B, H, L, d]."""
    sample, place = rows.unbind(1)
    heads = targets.shape[1]  # rows of zeros leave a head alone
    queries = q[sample, :heads, place].float()  # [R, heads, d]
    keys = k[:, :heads].float()[sample]  # [R, heads, L, d]
    scores = (keys @ queries[..., None])[..., 0] * scale
    log_share = scores.masked_fill(hidden[sample, place][:, None], -1e4).log_softmax(-1)
    apart = (torch.special.xlogy(targets, targets) - targets * log_share).sum(-1).mean(-1)  # [R]
    return (apart * weights).sum()


class CellTeacher(nn.Module):
    """Class vectors of each family: word embeddings where there is a word, own tables otherwise."""

    def __init__(self, tokenizer: Tokenizer, width: int) -> None:
        super().__init__()
        words = {
            "colour": list(COLOURS),
            "shape": list(SHAPES),
            "digit": [str(d) for d in range(10)],
            "letter": [chr(ord("A") + i) for i in range(26)],
        }
        self.token_ids: dict[str, Tensor] = {}
        for name, options in words.items():
            forms = [[w, f" {w}"] if len(w) > 1 else [w] for w in options]
            self.token_ids[name] = torch.tensor(
                [[tokenizer.encode(f).ids[0] for f in row] for row in forms]
            )
        own = {name: count for name, count in FAMILIES.items() if name not in words}
        self.tables = nn.ParameterDict(
            {name: nn.Parameter(torch.randn(count, width) * WIDE) for name, count in own.items()}
        )
        # One fixed direction a coordinate: how far a cell goes along it says where its item's edge is. Digits of
        # coordinates have no order to compare; these have, and "left of" becomes a difference.
        directions = (
            torch.randn(len(COORDINATES), width, generator=torch.Generator().manual_seed(0)) * WIDE
        )
        self.directions: Tensor
        self.register_buffer("directions", directions, persistent=False)

    def vectors(self, name: str, embeddings: Tensor) -> Tensor:
        """Class vectors [classes, D] of a family."""
        if name in self.token_ids:
            return embeddings[self.token_ids[name]].mean(1)
        return self.tables[name]

    def all_vectors(self, embeddings: Tensor) -> Tensor:
        """Class vectors of all families, one under the other: [all classes, D]."""
        return torch.cat([self.vectors(name, embeddings) for name in FAMILIES])

    @staticmethod
    def edges(classes: Tensor) -> tuple[Tensor, Tensor]:
        """Edges of each cell's item, from -1 (left, top) to 1: [P, cells, 4], and where there are any [P, cells]."""
        names = list(FAMILIES)
        hundreds, tens = (
            torch.stack([classes[:, names.index(f"{c}_{place}")] for c in COORDINATES], -1).float()
            for place in ("hundreds", "tens")
        )
        is_set = hundreds[..., 0] != NONE
        return ((hundreds * 100 + tens * 10 + 5) / 500 - 1) * is_set[..., None], is_set

    def place_loss(self, cells: Tensor, classes: Tensor) -> tuple[Tensor, Tensor]:
        """Error (smooth, absolute) of the edges read off the cells along the directions, and its mean in permille."""
        edges, is_set = self.edges(classes)
        read = (cells @ self.directions.T).float() / self.directions.square().sum(-1)
        error = (read - edges)[is_set]
        smooth = F.smooth_l1_loss(error, torch.zeros_like(error), beta=0.05)
        return smooth, error.detach().abs().mean() * 500

    def symbols(self, classes: Tensor, vectors: Tensor) -> Tensor:
        """Cells made of what they show: `classes` [P, families, cells] -> [P, cells, D], sums of class vectors."""
        marks = torch.zeros(classes.shape[0], classes.shape[2], sum(FAMILIES.values()))
        start = 0
        for i, (name, count) in enumerate(FAMILIES.items()):
            wanted = classes[:, i].long()
            is_set = (wanted != NONE).float()[..., None] * FAMILY_SCALES[name]
            marks.scatter_add_(2, (start + wanted.clamp(max=count - 1))[..., None], is_set)
            start += count
        return marks @ vectors + self.edges(classes)[0] @ self.directions

    @staticmethod
    def losses(cells: Tensor, classes: Tensor, vectors: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
        """For each family: cross entropy of its cells and the share that is right."""
        found = {}
        scores = (cells.flatten(0, 1) @ vectors.T).float()
        for i, (name, mine) in enumerate(
            zip(FAMILIES, scores.split(list(FAMILIES.values()), 1), strict=True)
        ):
            wanted = classes[:, i].flatten().long()
            is_set = wanted != NONE
            if bool(is_set.any()):
                right = (mine.detach().argmax(-1) == wanted).float().sum() / is_set.sum()
                found[name] = (
                    F.cross_entropy(mine / FAMILY_SCALES[name], wanted, ignore_index=NONE),
                    right,
                )
        return found


class Learner(nn.Module):
    """Model and teacher together, with the whole loss of a batch."""

    def __init__(self, config: VL2Config, tokenizer: Tokenizer, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        install()
        self.model = VL2Model(config)
        self.teacher = CellTeacher(tokenizer, config.language.hidden_size)
        self.start = picture_start(tokenizer)
        # The layers before gather what is asked for, those after make use of what was seen.
        middle = config.language.num_hidden_layers // 2
        self.seen_layers = (middle, middle + 1)
        initialise(self.model, tokenizer)
        self.balance: list[Tensor] = []
        for module in self.model.modules():
            if isinstance(module, Router):
                module.register_forward_hook(self._note_balance)

    @property
    def embeddings(self) -> Tensor:
        table = self.model.language.embed_tokens.weight
        assert isinstance(table, Tensor)
        return table

    def _note_balance(
        self, router: nn.Module, args: tuple[Tensor, ...], output: tuple[Tensor, Tensor]
    ) -> None:
        """Switch-style loss: experts x sum over experts of (share of tokens) x (mean probability); 1 is even."""
        assert isinstance(router, Router)
        probabilities = F.linear(args[0].float(), router.weight).float().softmax(-1)
        count = probabilities.shape[-1]
        share = torch.bincount(output[1].flatten(), minlength=count).float() / output[1].numel()
        self.balance.append(count * (share * probabilities.mean(0)).sum())

    def cells(self, tiles: np.ndarray) -> Tensor:
        """Projector rows [P, cells, D] float32 of uint8 tiles [P, 3, S, S]."""
        pixels = (torch.from_numpy(tiles).float() / 255 - 0.5) / 0.5
        return self.model.encode_tiles(pixels)

    def rows(self, ids: Tensor, cells: Tensor) -> Tensor:
        """Input rows [B, L, D]: embeddings, with each picture laid out twice (a 1x1 grid's tile equals its global
        view).
        """
        model, count = self.model, len(cells)
        grid = cells.unflatten(1, (int(math.sqrt(NUM_CELLS)), -1))
        ends = model.image_newline.expand(count, grid.shape[1], 1, -1)
        view = torch.cat((grid, ends), 2).flatten(1, 2)
        picture = torch.cat((view, model.view_seperator.expand(count, 1, -1), view), 1)
        rows = model.embed(ids.flatten()).unflatten(0, ids.shape)
        after = self.start + IMAGE_TOKENS
        shown = torch.cat((rows[:count, : self.start], picture, rows[:count, after:]), 1)
        return torch.cat((shown, rows[count:]))

    def hidden(
        self, ids: Tensor, cells: Tensor, ctx: DenseBatchContext, positions: Tensor | None = None
    ) -> Tensor:
        """Hidden rows [B * L, D] after the final norm; `positions` [B, L] count up from 0 when not given."""
        rows = self.rows(ids, cells).flatten(0, 1)
        if positions is None:
            positions = torch.arange(ids.shape[1]).expand(ids.shape)
        out: Tensor = self.model(rows, positions.flatten(), ctx)
        return out

    def loss(
        self,
        batch: Batch,
        tiles: np.ndarray,
        classes: Tensor,
        symbolic: Tensor,
        weights: dict[str, float],
    ) -> tuple[Tensor, dict[str, float]]:
        """The whole loss. `symbolic` [P] bool: rows whose cells are made from the truth instead of by the tower."""
        seen = self.cells(tiles)
        vectors = self.teacher.all_vectors(self.embeddings)
        found = self.teacher.losses(seen, classes, vectors)
        symbols = self.teacher.symbols(classes, vectors).float()
        near = (seen - symbols.detach()).square().mean()
        mine = symbols[: batch.pictures]
        noisy = mine + NOISE * torch.randn_like(mine)
        cells = torch.where(symbolic[:, None, None], noisy, seen[: batch.pictures])
        seen_looks = (batch.seen_rows, batch.seen, batch.seen_weights)
        looks = dict.fromkeys(self.seen_layers, seen_looks)
        even = torch.full((len(batch.asked),), 1 / max(1, len(batch.asked)))
        looks[self.seen_layers[0] - 1] = (batch.asked_rows, batch.asked, even)
        ctx = DenseBatchContext(len(batch.ids), batch.hidden_keys(), looks)
        self.balance.clear()
        hidden = self.hidden(batch.ids, cells, ctx, batch.positions)
        scores = self.model.logits(hidden[batch.rows]).float()
        each = F.cross_entropy(scores, batch.targets, reduction="none")
        place, place_error = self.teacher.place_loss(seen, classes)
        parts = {
            "answer": (each * batch.weights).sum(),
            "cell": torch.stack(
                [FAMILY_WEIGHTS[name] * loss for name, (loss, _) in found.items()]
            ).sum(),
            "near": near,
            "place": place,
            "ask": ctx.losses[0],
            "look": torch.stack(ctx.losses[1:]).mean(),
            "balance": torch.stack(self.balance).mean(),
        }
        total = torch.stack([weights[name] * part for name, part in parts.items()]).sum()
        facts = {name: float(part.detach()) for name, part in parts.items()}
        facts["place_error"] = float(place_error)
        facts |= {f"cell_{name}": float(right) for name, (_, right) in found.items()}
        return total, facts | answers_right(batch, scores.detach().argmax(-1) == batch.targets)


def answers_right(batch: Batch, right: Tensor) -> dict[str, float]:
    """For each task the share of answers whose every token is right, given the true tokens before it."""
    wrong = torch.zeros(len(batch.tasks), dtype=torch.int64).index_add_(
        0, batch.owners, (~right).long()
    )
    found: dict[str, list[float]] = {}
    for task, count in zip(batch.tasks, wrong.tolist(), strict=True):
        found.setdefault(f"right_{task}", []).append(float(count == 0))
    return {name: sum(values) / len(values) for name, values in found.items()}


def initialise(model: VL2Model, tokenizer: Tokenizer) -> None:
    """Random weights: wide embeddings, maps of unit gain, small output maps, and an untied head that starts as the
    table.
    """
    depth = 2 * model.config.language.num_hidden_layers
    for name, p in model.named_parameters():
        p.requires_grad_(True)
        with torch.no_grad():
            if p.dim() == 1 or name.endswith("bias"):
                is_norm = "norm" in name and name.endswith("weight")
                p.fill_(1.0 if is_norm else 0.0)
            elif "embed_tokens" in name:
                p.normal_(0, WIDE)
            elif "pos_embed" in name:
                p.normal_(0, 0.2)
            else:
                inputs = p[0].numel() if p.dim() == 4 else p.shape[-1]
                is_output = name.endswith(
                    ("o.weight", "down.weight", "w2", "attn.proj.weight", "fc2.weight")
                )
                p.normal_(0, inputs**-0.5 / (depth**0.5 if is_output else 1.0))
    with torch.no_grad():
        table = model.language.embed_tokens.weight
        assert isinstance(table, Tensor)
        for word in (*COLOURS, *SHAPES, "left", "right", "above", "below", "yes", "no"):
            plain, spaced = (tokenizer.encode(form).ids for form in (word, f" {word}"))
            if len(plain) == len(spaced) == 1:
                table[spaced[0]] = table[plain[0]] + 0.3 * (table[spaced[0]] - table[plain[0]])
        head = model.language.lm_head.weight
        assert isinstance(head, Tensor)
        head.copy_(table * 0.25)
        for vector in (model.image_newline, model.view_seperator):
            vector.normal_(0, WIDE)
