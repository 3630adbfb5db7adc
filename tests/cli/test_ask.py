"""`foveal ask`: what it prints, what it writes, and how it refuses.

Most tests put a scripted model in place of a loaded one; those on real files and checkpoints use a tiny golden one.
"""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from PIL import Image

from foveal import Delta, Message, SamplingParams, Usage
from foveal.cli.main import main
from foveal.families import ChatOptions

QUESTION = "What is this?"


class ScriptedModel:
    """Answers with the texts it was given, and remembers what it was asked."""

    texts: Sequence[str] = ("A ", "cat.")
    finish: Any = "stop"
    stop_reason: Any = None
    calls: ClassVar[list[dict[str, Any]]] = []

    def __init__(self, model: str, *, is_quiet: bool, **options: Any) -> None:
        self.calls.append({"model": model, **options})

    def stream_chat(
        self, messages: Sequence[Message], params: SamplingParams, options: ChatOptions
    ) -> Iterator[Delta]:
        self.calls[-1].update(messages=list(messages), params=params, options=options)
        *head, last = self.texts
        for index, text in enumerate(head):
            yield Delta(text, (index,))
        usage = Usage(prompt_tokens=50, completion_tokens=len(self.texts), image_tokens=41)
        yield Delta(last, (len(head),), self.finish, self.stop_reason, usage)


@pytest.fixture
def scripted(monkeypatch: pytest.MonkeyPatch) -> type[ScriptedModel]:
    model = type("Scripted", (ScriptedModel,), {"calls": []})
    monkeypatch.setattr("foveal.cli.ask.load_llm", model)
    return model


@pytest.fixture
def picture(tmp_path: Path) -> str:
    path = tmp_path / "cat.png"
    Image.new("RGB", (200, 100), (255, 0, 0)).save(path)
    return str(path)


# --- what is printed --------------------------------------------------------------------------------


def test_the_answer_and_nothing_else_goes_to_stdout(
    scripted: type[ScriptedModel], picture: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["ask", picture, QUESTION, "--model", "m"]) == 0
    captured = capsys.readouterr()
    assert captured.out == "A cat.\n"
    assert captured.err == ""
    (message,) = scripted.calls[0]["messages"]
    assert message.role == "user"
    assert message.content[-1] == QUESTION
    assert (message.content[0].width, message.content[0].height) == (200, 100)


def test_without_a_model_the_demo_model_answers_and_stderr_says_so(
    scripted: type[ScriptedModel], picture: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["ask", picture, QUESTION]) == 0
    captured = capsys.readouterr()
    assert scripted.calls[0]["model"] == "demo-vl2"
    assert captured.out == "A cat.\n"
    for word in ("demo model", "colour", "shape", "count", "digit", "word", "Locate"):
        assert word in captured.err


def test_a_question_needs_no_picture(
    scripted: type[ScriptedModel], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["ask", "Who are you?", "--model", "m"]) == 0
    assert scripted.calls[0]["messages"][0].content == ("Who are you?",)


def test_pictures_keep_their_order(scripted: type[ScriptedModel], tmp_path: Path) -> None:
    paths = []
    for width in (30, 10, 20):
        paths.append(str(tmp_path / f"{width}.png"))
        Image.new("RGB", (width, 5)).save(paths[-1])
    assert main(["ask", *paths, QUESTION, "--model", "m"]) == 0
    content = scripted.calls[0]["messages"][0].content
    assert [part.width for part in content[:-1]] == [30, 10, 20]


def test_options_reach_the_model(scripted: type[ScriptedModel], picture: str) -> None:
    flags = "--max-tokens 7 --temperature 0.5 --top-p 0.9 --top-k 5 --min-p 0.1 --seed 3"
    more = "--repetition_penalty 1.1 --dtype bfloat16 --device cpu --vision-mode timm-pad"
    stops = "--stop END --stop \n --loop-guard-repeats 9"
    argv = [
        "ask",
        picture,
        QUESTION,
        "--model",
        "m",
        *flags.split(),
        *more.split(),
        *stops.split(" "),
    ]
    assert main([*argv, "--picture-mode", "vendor"]) == 0
    (call,) = scripted.calls
    assert call["params"] == SamplingParams(
        max_tokens=7,
        temperature=0.5,
        top_p=0.9,
        top_k=5,
        min_p=0.1,
        seed=3,
        repetition_penalty=1.1,
        stop=("END", "\n"),
        loop_guard_repeats=9,
    )
    options = {key: call[key] for key in ("dtype", "device", "vision_mode", "picture_mode")}
    assert list(options.values()) == ["bfloat16", "cpu", "timm-pad", "vendor"]


def test_C019_locate_adds_the_tags_itself(scripted: type[ScriptedModel], picture: str) -> None:
    assert main(["ask", picture, "--locate", "the <|ref|>red cup<|/ref|>", "--model", "m"]) == 0
    assert scripted.calls[0]["messages"][0].content[-1] == "<|ref|>the red cup<|/ref|>"


GROUNDED = (
    "<|ref|>cat<|/ref|><|det|>[[100, 200, 500, 800]]<|/det|> and ",
    "<|ref|>dog<|/ref|><|det|>[[1, 2, 3]]<|/det|>",
)


def test_json_is_one_object_with_boxes_in_pixels_of_the_last_picture(
    scripted: type[ScriptedModel], picture: str, capsys: pytest.CaptureFixture[str]
) -> None:
    scripted.texts = GROUNDED
    assert main(["ask", picture, picture, QUESTION, "--model", "m", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    (malformed,) = answer.pop("malformed")
    assert set(malformed) == {"text", "reason"}
    assert answer == {
        "text": "".join(GROUNDED),
        "boxes": [
            {
                "label": "cat",
                "box": [20, 20, 100, 80],
                "raw": [100, 200, 500, 800],
                "image": 1,
            }
        ],
        "usage": {
            "prompt_tokens": 50,
            "completion_tokens": 2,
            "image_tokens": 41,
            "cached_tokens": 0,
            "reasoning_tokens": 0,
        },
        "finish_reason": "stop",
    }


def test_boxes_are_drawn_and_said(
    scripted: type[ScriptedModel],
    picture: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    scripted.texts = GROUNDED
    overlay = tmp_path / "boxes.png"
    assert main(["ask", picture, QUESTION, "--model", "m", "--boxes", str(overlay)]) == 0
    with Image.open(overlay) as drawn, Image.open(picture) as plain:
        assert drawn.size == plain.size
        assert np.asarray(drawn.convert("RGB")).tobytes() != np.asarray(plain).tobytes()
    captured = capsys.readouterr()
    assert captured.out == "".join(GROUNDED) + "\n"
    assert "cat: left 20, top 20, right 100, bottom 80" in captured.err
    assert "not a box" in captured.err
    assert f"wrote {overlay}, boxes drawn: 1" in captured.err


def test_boxes_are_in_pixels_after_exif_rotation(
    scripted: type[ScriptedModel], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "turned.jpg"
    exif = Image.Exif()
    exif[0x0112] = 6  # the camera was turned: 200 x 100 is shown as 100 x 200
    Image.new("RGB", (200, 100)).save(path, exif=exif)
    scripted.texts = ("<|ref|>x<|/ref|><|det|>[[0, 0, 999, 999]]<|/det|>",)
    assert main(["ask", str(path), QUESTION, "--model", "m", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["boxes"][0]["box"] == [0, 0, 100, 200]
    vendor = ["--picture-mode", "vendor"]
    assert main(["ask", str(path), QUESTION, "--model", "m", "--json", *vendor]) == 0
    assert json.loads(capsys.readouterr().out)["boxes"][0]["box"] == [0, 0, 200, 100]


@pytest.mark.parametrize("reason", ["repetition", "runaway_box"])
def test_an_answer_ended_by_a_guard_says_so(
    reason: str,
    scripted: type[ScriptedModel],
    picture: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    scripted.stop_reason = reason
    assert main(["ask", picture, QUESTION, "--model", "m"]) == 0
    assert "the answer was ended" in capsys.readouterr().err


def test_an_answer_cut_short_says_how_to_get_more(
    scripted: type[ScriptedModel], picture: str, capsys: pytest.CaptureFixture[str]
) -> None:
    scripted.finish = "length"
    assert main(["ask", picture, QUESTION, "--model", "m"]) == 0
    assert "--max-tokens" in capsys.readouterr().err


# --- how it refuses ---------------------------------------------------------------------------------


def refused(argv: list[str], capsys: pytest.CaptureFixture[str], *, code: int = 2) -> str:
    """Run a command that must fail; its one line on stderr."""
    assert main(argv) == code
    captured = capsys.readouterr()
    assert captured.out == ""
    lines = [line for line in captured.err.splitlines() if line.startswith("foveal: error: ")]
    assert len(lines) == 1
    assert "Traceback" not in captured.err
    return lines[0]


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "nothing to ask"),
        (["missing.png"], "names a picture that does not exist, and the question is missing"),
        (["missing.png", QUESTION], "'missing.png': no such file"),
        ([".", QUESTION], "'.': it is a folder"),
        (["  "], "the question is empty"),
        ([QUESTION, "--boxes", "o.png"], "none was given"),
        ([QUESTION, "--temperature", "-1"], "temperature"),
        ([QUESTION, "--top-p", "0"], "top_p"),
        ([QUESTION, "--max-tokens", "0"], "max_tokens"),
        ([QUESTION, "--dtype", "int8"], "invalid choice: 'int8'"),
        ([QUESTION, "--model", "no-such-model"], "no-such-model"),
        (["x" * 5000, QUESTION], "no such file"),
        (["--locate", "cup"], "--locate needs a picture"),
        (["missing.png", "--locate", "cup"], "'missing.png': no such file"),
    ],
)
def test_a_wrong_request_is_one_line_and_exit_code_2(
    argv: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert message in refused(["ask", *argv], capsys)


def test_a_forgotten_question_is_not_taken_for_one(
    picture: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "the question is missing" in refused(["ask", picture], capsys)
    assert "the question is missing" in refused(["ask", picture, picture], capsys)


@pytest.mark.parametrize("name", ["out.jpg", "nowhere/out.png"])
def test_an_overlay_that_cannot_be_written_is_refused_before_the_model_runs(
    name: str,
    picture: str,
    tmp_path: Path,
    scripted: type[ScriptedModel],
    capsys: pytest.CaptureFixture[str],
) -> None:
    argv = ["ask", picture, QUESTION, "--model", "m", "--boxes", str(tmp_path / name)]
    assert "--boxes" in refused(argv, capsys)
    assert not scripted.calls


# --- real files, a real checkpoint ------------------------------------------------------------------


@pytest.fixture
def checkpoint(golden_vl2: Path) -> str:
    return str(golden_vl2 / "b_small" / "checkpoint")


def gradient(mode: str = "RGB") -> Image.Image:
    y, x = np.mgrid[0:60, 0:90]
    rgb = np.stack((x * 2, y * 4, x + y), -1).astype(np.uint8)
    return Image.fromarray(rgb).convert(mode)


def save_turned_jpeg(path: Path) -> None:
    exif = Image.Exif()
    exif[0x0112] = 8
    gradient().save(path, exif=exif)


def save_16_bit(path: Path) -> None:
    Image.fromarray((np.mgrid[0:60, 0:90][1] * 700).astype(np.uint16)).save(path)


def save_gif(path: Path) -> None:
    gradient("P").save(path, save_all=True, append_images=[gradient("L").convert("P")])


FORMATS: dict[str, Callable[[Path], None]] = {
    "plain.png": lambda path: gradient().save(path),
    "turned.jpg": save_turned_jpeg,
    "rgba.png": lambda path: gradient("RGBA").save(path),
    "palette.png": lambda path: gradient("P").save(path),
    "grey_alpha.png": lambda path: gradient("LA").save(path),
    "deep.png": save_16_bit,
    "cmyk.jpg": lambda path: gradient("CMYK").save(path),
    "cmyk.tif": lambda path: gradient("CMYK").save(path),
    "two_frames.gif": save_gif,
    "photo.webp": lambda path: gradient().save(path),
    "one_pixel.png": lambda path: Image.new("RGB", (1, 1)).save(path),
    "thin.png": lambda path: Image.new("RGB", (10_000, 4), (9, 9, 9)).save(path),
}


@pytest.mark.parametrize("name", list(FORMATS))
def test_every_kind_of_picture_is_answered(
    name: str, checkpoint: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / name
    FORMATS[name](path)
    flags = ["--model", checkpoint, "--max-tokens", "3", "--dtype", "float32", "--json"]
    assert main(["ask", str(path), QUESTION, *flags]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["usage"]["image_tokens"] > 0
    assert answer["finish_reason"] in ("stop", "length")


def png_header(width: int, height: int) -> bytes:
    """A PNG that announces a size and holds next to nothing."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return (
            struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        )

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    pixels = zlib.compress(bytes(1000))
    return (
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", pixels) + chunk(b"IEND", b"")
    )


def truncated_png() -> bytes:
    import io

    buffer = io.BytesIO()
    noise = np.random.default_rng(0).integers(0, 256, (80, 80, 3), dtype=np.uint8)
    Image.fromarray(noise).save(buffer, "PNG")
    return buffer.getvalue()[: buffer.tell() // 2]


@pytest.mark.parametrize(
    ("content", "word"),
    [
        (truncated_png(), "truncated"),
        (b"", "empty"),
        (b"Dear diary,\nthis is no picture.\n", "text"),
        (png_header(30_000, 30_000), "30000"),
        (b"%PDF-1.7\n%", "PDF"),
        (bytes(range(256)) * 4, "picture"),
    ],
    ids=["truncated", "no bytes", "text", "30000x30000", "pdf", "noise"],
)
def test_what_is_no_picture_is_one_clear_error(
    content: bytes, word: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "picture.png"
    path.write_bytes(content)
    message = refused(["ask", str(path), QUESTION], capsys)
    assert "picture.png" in message
    assert word.lower() in message.lower().replace(",", "")


def test_a_corrupt_checkpoint_is_exit_code_4(
    checkpoint: str, tmp_path: Path, picture: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for file in Path(checkpoint).iterdir():
        data = file.read_bytes()
        cut = len(data) // 2 if file.name.startswith("model-00001") else len(data)
        (tmp_path / file.name).write_bytes(data[:cut])
    message = refused(["ask", picture, QUESTION, "--model", str(tmp_path)], capsys, code=4)
    assert "model-00001-of-000002.safetensors" in message


def test_the_same_seed_gives_the_same_answer(
    checkpoint: str, picture: str, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--temperature", "1", "--seed", "5", "--max-tokens", "6", "--model", checkpoint]
    texts = []
    for _ in range(2):
        assert main(["ask", picture, QUESTION, *flags]) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1]
