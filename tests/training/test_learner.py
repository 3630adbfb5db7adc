"""What training computes is what the product computes."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer

from foveal import ops
from foveal.models.config import VL2Config
from foveal.text import tokenizer as product
from foveal.text.chat_vl2 import encode_messages
from foveal.types import Message, Picture
from training.batches import IMAGE_TOKENS, BatchMaker, picture_start, prompt_ids
from training.export import write_checkpoint
from training.learner import DenseBatchContext, Learner
from training.muon import orthogonalise
from training.pool import Pool, draw_pool
from training.recipe import Recipe, checkpoint_config
from training.tokens import BOS, EOS, train_tokenizer


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train_tokenizer(samples=60)


@pytest.fixture(scope="module")
def pool() -> Pool:
    return draw_pool(1, {"shapes": 12, "crowd": 6, "digit": 4, "word": 8}, held_out=False)


@pytest.fixture(scope="module")
def learner(tokenizer: Tokenizer) -> Iterator[Learner]:
    """A learner with random weights; the operations it replaces are put back."""
    before = dict(ops._active)
    values = checkpoint_config(tokenizer.get_vocab_size(), 0, 1)
    yield Learner(VL2Config.from_dict(values), tokenizer, seed=3)
    ops._active.update(before)


def test_tokenizer_spells_digits_and_capitals(tokenizer: Tokenizer) -> None:
    assert tokenizer.encode("QUIZ").tokens == ["Q", "U", "I", "Z"]
    assert [t.strip("Ġ,") for t in tokenizer.encode("[[12, 999]]").tokens] == [
        "[[",
        "1",
        "2",
        "",
        "9",
        "9",
        "9",
        "]]",
    ]
    for text in ("naïve 東京 \x07", "What colour is it?\n\n", "<|ref|>the red star<|/ref|>"):
        ids = tokenizer.encode(text).ids
        assert tokenizer.decode(ids, skip_special_tokens=False) == text


def test_batches_depend_on_seed_step_and_rank_only(tokenizer: Tokenizer, pool: Pool) -> None:
    plan = Recipe(rows=8, tiles=12).plan(2)
    a = BatchMaker(pool, tokenizer, 1).make(4, plan, 1)
    b = BatchMaker(pool, tokenizer, 1).make(4, plan, 1)
    assert torch.equal(a.ids, b.ids)
    assert (a.scenes == b.scenes).all()
    assert torch.equal(a.seen, b.seen)
    other = BatchMaker(pool, tokenizer, 1).make(4, plan, 0)
    assert not torch.equal(a.ids, other.ids)


def test_packed_questions_are_computed_as_if_alone(
    tokenizer: Tokenizer, pool: Pool, learner: Learner
) -> None:
    batch = BatchMaker(pool, tokenizer, 1).make(2, Recipe(rows=8, tiles=8).plan(2))
    shared = picture_start(tokenizer) + IMAGE_TOKENS
    with torch.no_grad():
        cells = learner.cells(np.asarray(pool.tiles[batch.scenes]))[: batch.pictures]
        ctx = DenseBatchContext(len(batch.ids), batch.hidden_keys())
        packed = learner.hidden(batch.ids, cells, ctx, batch.positions).unflatten(
            0, batch.ids.shape
        )
        for segment in range(1, int(batch.segments[0].max()) + 1):
            own = (batch.segments[0] == segment).nonzero()[:, 0]
            ids = torch.cat((batch.ids[0, :shared], batch.ids[0, own]))[None]
            alone = learner.hidden(ids, cells[:1], DenseBatchContext(1))
            torch.testing.assert_close(packed[0, own], alone[shared:], rtol=1e-4, atol=1e-4)


def test_picture_rows_are_those_of_the_model(learner: Learner, tokenizer: Tokenizer) -> None:
    ids = torch.tensor([prompt_ids(tokenizer, "What?", has_picture=True)])
    cells = torch.randn(1, 36, learner.model.config.language.hidden_size)
    start = picture_start(tokenizer)
    with torch.no_grad():
        mine = learner.rows(ids, cells)[0, start : start + IMAGE_TOKENS]
        theirs = learner.model.assemble(cells.expand(2, -1, -1), (1, 1))
    assert torch.equal(mine, theirs)


@pytest.mark.parametrize("body", ["moe", "encoder_attention"])
def test_fast_bodies_equal_the_reference(body: str, learner: Learner) -> None:
    torch.manual_seed(0)
    if body == "moe":
        x, w13, w2 = torch.randn(9, 16), torch.randn(4, 12, 16), torch.randn(4, 16, 6)
        weights, ids = torch.rand(9, 2), torch.stack([torch.randperm(4)[:2] for _ in range(9)])
        mine, true = (
            call(x, weights, ids, w13, w2) for call in (ops._active[body], ops.reference.moe)
        )
    else:
        q, k, v = torch.randn(3, 2, 5, 3, 8)
        calls = (ops._active[body], ops.reference.encoder_attention)
        mine, true = (call(q, k, v, 0.3) for call in calls)
    torch.testing.assert_close(mine, true, rtol=1e-4, atol=1e-5)


def test_orthogonalise_makes_singular_values_alike() -> None:
    torch.manual_seed(0)
    for shape in ((2, 24, 16), (1, 16, 40)):
        values = torch.linalg.svdvals(orthogonalise(torch.randn(shape), torch.float32))
        assert values.min() > 0.3, (
            "small singular values stay small: the iteration does not converge"
        )
        assert values.max() < 1.5


def test_prompt_ids_are_those_of_the_product(
    tokenizer: Tokenizer, learner: Learner, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("checkpoint")
    write_checkpoint(folder, dict(learner.model.named_parameters()), tokenizer)
    loaded = product.Tokenizer.load(folder)
    picture = Picture(np.zeros((8, 8, 3), np.uint8))
    questions = ("What colour is the circle?", "<|ref|>the red star<|/ref|>.", "count the stars")
    for question in questions:
        before, after = encode_messages([Message("user", (picture, question))], loaded)
        image = loaded.token_id("<image>")
        ids = [*before, *[image] * IMAGE_TOKENS, *after]
        assert ids == prompt_ids(tokenizer, question, has_picture=True)
        (plain,) = encode_messages([Message("user", (question,))], loaded)
        assert plain == prompt_ids(tokenizer, question, has_picture=False)
    assert loaded.bos_id == tokenizer.token_to_id(BOS)
    assert loaded.eos_id == tokenizer.token_to_id(EOS)


def test_a_few_steps_lower_the_loss(tokenizer: Tokenizer, pool: Pool, learner: Learner) -> None:
    recipe = Recipe(rows=4, tiles=4)
    batch = BatchMaker(pool, tokenizer, 1).make(0, recipe.plan(1))
    tiles = np.asarray(pool.tiles[batch.scenes])
    classes = torch.from_numpy(pool.classes[batch.scenes])
    symbolic = torch.zeros(batch.pictures, dtype=torch.bool)
    optimizer = torch.optim.AdamW(learner.parameters(), 1e-3)
    losses = []
    for _ in range(6):
        loss, _ = learner.loss(batch, tiles, classes, symbolic, recipe.losses)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.8 * losses[0], f"losses of six steps on one batch: {losses}"
