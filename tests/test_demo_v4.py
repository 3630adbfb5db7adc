"""The shipped DeepSeek-V4 model answers, fits its size, and refuses what it would ignore."""

from __future__ import annotations

from pathlib import Path

import pytest

from foveal import LLM, PromptError, SamplingParams
from foveal.models.hub import resolve_model

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
MAX_BYTES = 12_000_000


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM("demo-v4", dtype="float32")


def test_it_is_small() -> None:
    files = [path for path in resolve_model("demo-v4").iterdir() if path.is_file()]
    assert sum(path.stat().st_size for path in files) <= MAX_BYTES


def test_it_answers_about_a_picture(llm: LLM) -> None:
    picture = {"type": "image", "image": str(EXAMPLES / "shapes.png")}
    question = {"type": "text", "text": "What colour is the circle?"}
    output = llm.chat([{"role": "user", "content": [picture, question]}])
    assert output.text.strip() == "green"
    assert output.finish_reason == "stop"


@pytest.mark.parametrize(
    ("name", "value"), [("logprobs", 1), ("presence_penalty", 0.5), ("bad_words", ("red",))]
)
def test_what_would_be_ignored_is_refused(llm: LLM, name: str, value: object) -> None:
    params = SamplingParams(**{name: value})  # type: ignore[arg-type]
    with pytest.raises(PromptError, match=name):
        llm.chat([{"role": "user", "content": "hello"}], params)
