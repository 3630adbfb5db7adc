"""What training computes for demo-v4 is what the product computes."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from foveal import ops
from foveal.models.build import load_v4
from foveal.models.v4_config import V4Config
from foveal.ops import reference
from foveal.runner.v4_cache import Span
from foveal.runner.v4_runner import V4Runner
from foveal.text.chat_v4 import encode_pieces, encode_v4_messages
from foveal.text.tokenizer import BOS
from foveal.text.v4_grammar import USER
from foveal.types import Picture
from foveal.vision.v4_processor import V4Processor
from training import v4_bodies
from training.cells import label_cells
from training.export_v4 import write_v4_checkpoint
from training.tokens import train_tokenizer
from training.v4_batches import V4Batch, V4BatchMaker
from training.v4_context import DenseSparseContext
from training.v4_learner import V4Learner
from training.v4_pool import IMAGE_CONFIG, V4Pool, draw_v4_pool, label_grid
from training.v4_recipe import V4Recipe, checkpoint_config
from training.v4_tokens import SPECIAL, V4Text


@pytest.fixture(scope="module")
def text() -> V4Text:
    return V4Text(train_tokenizer(samples=60, special=SPECIAL))


@pytest.fixture(scope="module")
def pool() -> V4Pool:
    return draw_v4_pool(1, {"shapes": 12, "crowd": 4, "digit": 3, "word": 6}, held_out=False)


@pytest.fixture(scope="module")
def learner(text: V4Text) -> Iterator[V4Learner]:
    """A learner with random weights; the operations it replaces are put back."""
    before = dict(ops._active)
    config = V4Config.from_dict(checkpoint_config(text.vocab_size))
    yield V4Learner(config, text, seed=3)
    ops._active.update(before)


def make_batch(pool: V4Pool, text: V4Text, step: int, **changes: int) -> V4Batch:
    recipe = V4Recipe(rows=4, tiles=6, **changes)
    return V4BatchMaker(pool, text, 1, window=128, ratios={0, 4, 128}).make(step, recipe.v4_plan(1))


def test_prompts_are_those_of_the_product(text: V4Text, pool: V4Pool) -> None:
    tokenizer = text.product
    processor = V4Processor(IMAGE_CONFIG, tokenizer, text.vocab_size, 1024)
    picture = Picture(np.zeros((40, 60, 3), np.uint8))
    for question in (
        "What colour is the circle?",
        "<|ref|>the red star<|/ref|>.",
        "count the stars",
    ):
        content = [{"type": "image", "image": "here"}, {"type": "text", "text": question}]
        chat = encode_v4_messages([{"role": "user", "content": content}])
        prompt = processor.process_segments(encode_pieces(chat.pieces, tokenizer), [picture])
        assert list(prompt.token_ids) == text.prompt(question, prompt.items[0].vit_grid)
        plain = encode_v4_messages([{"role": "user", "content": question}])
        assert encode_pieces(plain.pieces, tokenizer) == [text.prompt(question)]


def test_packed_questions_get_the_product_logits(
    text: V4Text, pool: V4Pool, learner: V4Learner
) -> None:
    batch = make_batch(pool, text, 5)
    with torch.no_grad():
        cells = learner.cells(batch.pictures)
        rows = learner.rows(batch.ids, batch.pictures.places, cells[batch.pictures.shown])
        hidden = learner.hidden(batch.ids, batch.positions, rows, DenseSparseContext(batch.layout))
        found = learner.model.logits(hidden).unflatten(0, batch.ids.shape)
    runner, rows = V4Runner(learner.model), rows.unflatten(0, batch.ids.shape)
    for segment in range(1, int(batch.segments[0].max()) + 1):
        mine = (batch.segments[0] == segment) | (batch.segments[0] == 0)
        ids = batch.ids[0, mine]
        inside = (ids >= text.vocab_size).nonzero()[
            1:, 0
        ]  # the alignment pad stands before the span
        cache = runner.new_cache(len(ids))
        cache.spans = (Span(int(inside[0]), int(inside[-1])),)
        alone = runner.logits(runner.prefill(rows[0, mine], cache, ids=ids))
        torch.testing.assert_close(found[0, mine], alone, rtol=1e-4, atol=1e-4)


def test_tower_groups_equal_single_pictures(pool: V4Pool, learner: V4Learner) -> None:
    scenes = sorted(range(8), key=lambda i: pool.grids[i])
    patches = [torch.from_numpy(pool.patches(i)).float() / 127.5 - 1 for i in scenes]
    grids = [pool.grids[i] for i in scenes]
    with torch.no_grad():
        packed = v4_bodies.tower_cells(learner.model, torch.cat(patches), grids)
        single = torch.cat(
            [learner.model.encode_picture(p, g) for p, g in zip(patches, grids, strict=True)]
        )
    torch.testing.assert_close(packed, single, rtol=1e-4, atol=1e-4)


def test_labels_agree_with_the_square_ones(pool: V4Pool) -> None:
    square = next(c for c in pool.contents if c.size[0] == c.size[1])
    mine, theirs = label_grid(square, (12, 12)), label_cells(square)
    assert (mine.cells.classes == theirs.classes).all()
    assert (mine.cells.owner == theirs.owner).all()


@pytest.mark.parametrize(
    "name", ["hyper_pre", "hyper_post", "hyper_head", "rope_neighbours", "moe"]
)
def test_bodies_equal_the_reference(name: str) -> None:
    """Results and gradients."""
    torch.manual_seed(0)
    rule = ops.HyperRule(3, 1e-6, 1e-6)
    streams = torch.randn(5, 4, 8)
    arguments = {
        "hyper_pre": (streams, torch.randn(24, 32), torch.rand(3), torch.randn(24), rule),
        "hyper_post": (torch.randn(5, 8), streams, torch.rand(5, 4), torch.rand(5, 4, 4)),
        "hyper_head": (streams, torch.randn(4, 32), torch.rand(1), torch.randn(4), rule),
        "rope_neighbours": (torch.randn(5, 3, 8), torch.rand(5, 2), torch.rand(5, 2)),
        "moe": (
            torch.randn(5, 8),
            torch.rand(5, 2),
            torch.tensor([[0, 1]] * 5),
            torch.randn(3, 12, 8),
            torch.randn(3, 8, 6),
        ),
    }[name]  # fmt: skip
    results = []
    for bodies in (v4_bodies, reference):
        inputs = [
            a.clone().requires_grad_(a.is_floating_point()) if isinstance(a, torch.Tensor) else a
            for a in arguments
        ]
        out = getattr(bodies, name)(*inputs)
        outs = out if isinstance(out, tuple) else (out,)
        sum((o * torch.linspace(0.5, 1, o.numel()).view_as(o)).sum() for o in outs).backward()
        grads = [
            i.grad
            for i in inputs
            if isinstance(i, torch.Tensor) and i.grad is not None and "rope" not in name
        ]
        grads += [inputs[0].grad] if "rope" in name else []
        results.append((*outs, *grads))
    for mine, true in zip(*results, strict=True):
        torch.testing.assert_close(mine, true, rtol=1e-4, atol=1e-5)


def test_a_few_steps_lower_the_loss(text: V4Text, pool: V4Pool, learner: V4Learner) -> None:
    batch = make_batch(pool, text, 0)
    symbolic = torch.zeros(len(batch.pictures.grids), dtype=torch.bool)
    trained = [p for p in learner.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, 1e-3)
    losses = []
    for _ in range(6):
        loss, _ = learner.loss(batch, symbolic, V4Recipe().losses)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        learner.balance(0.001)
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.8 * losses[0], f"losses of six steps on one batch: {losses}"


def test_an_exported_model_gives_the_same_logits(
    text: V4Text, learner: V4Learner, pool: V4Pool, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("checkpoint")
    # bfloat16 stores what it can hold: round first, so that the comparison is exact.
    rounded = {
        n: p if n.endswith("tid2eid") else p.detach().bfloat16().float()
        for n, p in learner.model.named_parameters()
    }
    size = write_v4_checkpoint(folder, rounded, text.backend)
    assert size <= 12e6
    config = V4Config.load(folder)
    loaded = load_v4(folder, config, dtype="float32").model
    for name, parameter in loaded.named_parameters():
        assert torch.equal(parameter, rounded[name].to(parameter.dtype)), name
    own = V4Config.from_dict(checkpoint_config(text.vocab_size))
    assert config == own
    learner.model.load_state_dict(rounded)
    processor = V4Processor(IMAGE_CONFIG, text.product, text.vocab_size, 1024)
    picture = Picture(np.random.default_rng(0).integers(0, 255, (60, 90, 3), dtype=np.uint8))
    ids = text.turn("\n\nWhat do you see?")
    prompt = processor.process_segments([[text.mark(BOS), text.mark(USER)], ids], [picture])
    mine, theirs = (V4Runner(m).start(prompt, 200)[1] for m in (learner.model, loaded))
    torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-4)
