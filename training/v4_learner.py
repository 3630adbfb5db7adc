"""demo-v4 under training: initial weights, forward pass over padded batches, and the losses.

It trains `foveal.models.v4.V4Model` itself. What `learner.py` teaches is taught here too, with one difference: this
tower knows distances between patches only, so a cell is taught where its item's edges are *from the cell*; where the
cell is in the picture the backbone finds out by looking at the block's first token (the anchor), and a probe on its
third layer asks for the edges in the picture. Routers share the load through their biases, one for text and one for
pictures. Legend: B rows of L tokens, N pictures, C cells of the rows' pictures, D hidden width, E experts.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from foveal.models.deepseek_v4 import V4Layer, V4Router
from foveal.models.v4 import V4Model
from foveal.models.v4_config import V4Config
from training.cells import FAMILIES, FAMILY_WEIGHTS, NONE
from training.drawing import COLOURS, SHAPES
from training.learner import NOISE, WIDE, CellTeacher
from training.v4_batches import Pictures, V4Batch
from training.v4_bodies import install, tower_cells
from training.v4_context import DenseSparseContext
from training.v4_tokens import V4Text, random_experts

ANCHOR_AT = 3  # where START stands when the picture comes first
_FIRST_COORDINATE = list(FAMILIES).index("x1_hundreds")
_UNTRAINED = ("router.bias", "tid2eid", "indexer.")


class V4Learner(nn.Module):
    """Model and teacher together, with the whole loss of a batch."""

    def __init__(self, config: V4Config, text: V4Text, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        install()
        self.model = V4Model(config)
        self.text = text
        width = config.language.hidden_size
        self.teacher = CellTeacher(text.backend, width)
        # Reads edges (4 numbers) and their hundreds and tens (8 x 10 classes) off the rows of layer 2.
        self.probe = nn.Linear(width, 4 + 80)
        middle = config.language.num_hidden_layers // 2
        self.seen_layers = (middle, middle + 1)
        initialise(self.model, text, seed)
        self._middle: list[Tensor] = []
        self._loads: list[Tensor] = []
        self._counted: Tensor | None = None
        layer = self.model.language.layers[middle]
        assert isinstance(layer, V4Layer)
        layer.attn_norm.register_forward_hook(
            lambda module, args, output: self._middle.append(output)
        )
        self.routers = [m for m in self.model.modules() if isinstance(m, V4Router)]
        for router in self.routers:
            router.register_forward_hook(self._note_load)

    @property
    def embeddings(self) -> Tensor:
        table = self.model.language.embed_tokens.weight
        assert isinstance(table, Tensor)
        return table

    def _note_load(
        self, router: nn.Module, args: tuple[Tensor, Tensor], output: tuple[Tensor, Tensor]
    ) -> None:
        """Tokens each expert got, texts and pictures apart: [2, E]."""
        assert isinstance(router, V4Router)
        if self._counted is None:
            return
        is_picture = (args[1] >= router.vocab_size).long()
        experts = router.weight.shape[0]
        number = (is_picture[:, None] * experts + output[1])[self._counted].flatten()
        self._loads.append(torch.bincount(number, minlength=2 * experts).unflatten(0, (2, experts)))

    @torch.no_grad()
    def balance(self, rate: float) -> float:
        """Move each router's biases towards an even load; all ranks count together. Returns the largest share x E."""
        loads = torch.stack(self._loads).float()  # [layers, 2, E]
        self._loads = []
        if dist.is_initialized():
            dist.all_reduce(loads)
        shares = loads / loads.sum(-1, keepdim=True).clamp(min=1)
        even = 1 / shares.shape[-1]
        for router, (text, picture) in zip(self.routers, shares, strict=True):
            if not router.is_hash:
                router.bias.add_(rate * (even - text).sign())
            router.bias_vl.add_(rate * (even - picture).sign())
        return float(shares[1:].max() / even)

    def cells(self, pictures: Pictures) -> Tensor:
        """Aligner rows [all cells, D] float32 of N pictures."""
        pixels = (pictures.patches.float() / 255 - 0.5) / 0.5
        return tower_cells(self.model, pixels.bfloat16().float(), pictures.grids)

    def rows(self, ids: Tensor, places: Tensor, cells: Tensor) -> Tensor:
        """Input rows [B * L, D]: embeddings, learned vectors, and `cells` [C, D] at `places` [C]."""
        model = self.model
        table = torch.stack(
            (
                model.image_start,
                model.image_pad,
                model.image_pad,
                model.image_newline,
                model.image_end,
            )
        )
        every = torch.cat((self.embeddings, table))
        return every[ids.flatten()].float().index_copy(0, places, cells)

    def hidden(
        self, ids: Tensor, positions: Tensor, rows: Tensor, ctx: DenseSparseContext
    ) -> Tensor:
        """Hidden rows [B * L, D] after the final norm."""
        out: Tensor = self.model(rows, positions.flatten(), ids.flatten(), ctx)
        return out

    def loss(
        self, batch: V4Batch, symbolic: Tensor, weights: dict[str, float]
    ) -> tuple[Tensor, dict[str, float]]:
        """The whole loss. `symbolic` [N] bool: pictures whose cells are made from the truth instead of by the
        tower.
        """
        pictures = batch.pictures
        seen = self.cells(pictures)
        vectors = self.teacher.all_vectors(self.embeddings)
        classes = pictures.classes.clone()
        classes[:, _FIRST_COORDINATE:] = NONE
        found = self.teacher.losses(seen[:, None], classes, vectors)
        ahead = pictures.offsets @ self.teacher.directions
        symbols = self.teacher.symbols(classes, vectors).float()[:, 0] + ahead
        near = (seen - symbols.detach()).square().mean()
        has_shape = pictures.classes[:, _FIRST_COORDINATE, 0] != NONE
        read = (seen @ self.teacher.directions.T).float() / self.teacher.directions.square().sum(-1)
        offset = (read - pictures.offsets)[has_shape].square().mean()
        is_symbol = symbolic.repeat_interleave(pictures.counts)[:, None]
        cells = torch.where(is_symbol, symbols + NOISE * torch.randn_like(symbols), seen)[
            pictures.shown
        ]
        parts, facts = self._language_losses(batch, cells, has_shape)
        parts |= {
            "cell": torch.stack(
                [FAMILY_WEIGHTS[name] * loss for name, (loss, _) in found.items()]
            ).sum(),
            "near": near,
            "offset": offset,
        }
        total = torch.stack([weights[name] * part for name, part in parts.items()]).sum()
        facts |= {name: float(part.detach()) for name, part in parts.items()}
        return total, facts | {f"cell_{name}": float(right) for name, (_, right) in found.items()}

    def _language_losses(
        self, batch: V4Batch, cells: Tensor, has_shape: Tensor
    ) -> tuple[dict[str, Tensor], dict[str, float]]:
        """Losses of what stands behind the cells."""
        length, places = batch.ids.shape[1], batch.pictures.places
        cell_rows = torch.stack((places // length, places % length), 1)
        anchor = torch.full((len(places),), ANCHOR_AT)
        ctx = DenseSparseContext(
            batch.layout, self.seen_layers, batch.seen_rows, batch.seen, cell_rows, anchor
        )
        self._middle.clear()
        self._loads, self._counted = [], (batch.segments >= 0).flatten()
        rows = self.rows(batch.ids, places, cells)
        hidden = self.hidden(batch.ids, batch.positions, rows, ctx)
        self._counted = None
        scores = self.model.logits(hidden[batch.rows]).float()
        each = F.cross_entropy(scores, batch.targets, reduction="none")
        is_set = has_shape[batch.pictures.shown]
        read = self.probe(self._middle[0][places[is_set]]).float()
        chosen = batch.pictures.shown[is_set]
        error = read[:, :4] - batch.pictures.edges[chosen]
        digits = batch.pictures.classes[
            chosen, _FIRST_COORDINATE:, 0
        ].long()  # hundreds of four edges, then tens
        naming = F.cross_entropy(
            read[:, 4:].unflatten(1, (8, 10)).transpose(1, 2), digits, reduction="none"
        ).mean(0)
        parts = {
            "answer": (each * batch.weights).sum(),
            "spot": 2 * error.square().mean() + 0.2 * naming[:4].mean() + 0.05 * naming[4:].mean(),
            "look": torch.stack(ctx.losses).mean(),
            "anchor": torch.stack(ctx.anchor_losses).mean(),
        }
        facts = {"spot_error": float(error.detach().abs().mean() * 500)}
        return parts, facts | answers_right(batch, scores.detach().argmax(-1) == batch.targets)


def answers_right(batch: V4Batch, right: Tensor) -> dict[str, float]:
    """For each task the share of answers whose every token is right, given the true tokens before it."""
    wrong = torch.zeros(len(batch.tasks), dtype=torch.int64).index_add_(
        0, batch.owners, (~right).long()
    )
    found: dict[str, list[float]] = {}
    for task, count in zip(batch.tasks, wrong.tolist(), strict=True):
        found.setdefault(f"right_{task}", []).append(float(count == 0))
    return {name: sum(values) / len(values) for name, values in found.items()}


def initialise(model: V4Model, text: V4Text, seed: int) -> None:
    """Random weights: wide embeddings, maps of unit gain, small output maps; streams that begin as one residual."""
    c = model.config.language
    depth = 2 * c.num_hidden_layers
    for name, p in model.named_parameters():
        if name.endswith("tid2eid"):
            chosen = random_experts(c.vocab_size, c.n_routed_experts, c.num_experts_per_tok, seed)
            p.data.copy_(torch.from_numpy(chosen))
            continue
        with torch.no_grad():
            if "hc" in name:
                _initialise_hyper(name, p, c.hc_mult)
            elif p.dim() == 1 or name.endswith("ape"):
                is_vector = name.startswith("image_")
                p.normal_(0, WIDE) if is_vector else p.fill_(1.0 if "norm" in name else 0.0)
            elif "embed_tokens" in name:
                p.normal_(0, WIDE)
            else:
                is_output = name.endswith(
                    ("wo_b.weight", "down.weight", "w2", "wo.weight", "mlp.w2.weight")
                )
                p.normal_(0, p.shape[-1] ** -0.5 / (depth**0.5 if is_output else 1.0))
        p.requires_grad_(not any(word in name for word in _UNTRAINED))
    with torch.no_grad():
        table = model.language.embed_tokens.weight
        for word in (*COLOURS, *SHAPES, "left", "right", "above", "below", "yes", "no"):
            plain, spaced = (text.backend.encode(form).ids for form in (word, f" {word}"))
            if len(plain) == len(spaced) == 1:
                table[spaced[0]] = table[plain[0]] + 0.3 * (table[spaced[0]] - table[plain[0]])
        model.language.lm_head.weight.copy_(table * 0.25)


def _initialise_hyper(name: str, p: Tensor, n: int) -> None:
    """Reading gives about the streams' mean, writing adds to all, mixing keeps each; a little apart, or they never
    part.
    """
    if name.endswith("fn"):
        p.zero_()
    elif name.endswith("scale"):
        p.fill_(0.3)
    elif "hc_head" in name:
        p.fill_(-1.1)  # sigmoid: about a quarter
    else:
        p[:n] = -1.1 + 0.4 * torch.randn(n)
        p[n : 2 * n] = 0.4 * torch.randn(n)
        p[2 * n :] = (4 * torch.eye(n)).flatten() + 0.3 * torch.randn(n * n)
