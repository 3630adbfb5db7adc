"""`foveal ask PICTURE... QUESTION`: one question, one streamed answer."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from foveal.cli.loading import load_llm
from foveal.cli.output import note, write_json
from foveal.cli.parser import Parser, UsageError
from foveal.text.grounding import locate_prompt, parse_grounding
from foveal.types import Delta, Grounding, Message, Picture, RequestOutput, SamplingParams

DEMO_MODEL = "demo-vl2"
DEMO_NOTE = (
    f"no --model given: the demo model {DEMO_MODEL} answers. It is tiny and knows drawn scenes "
    "(colour, shape, count to five, left/right/above/below, 'Locate the ...'), handwritten digits "
    "and short printed words, and nothing else"
)
# Why an answer was ended although the model would have gone on, by `RequestOutput.stop_reason`.
GUARD_NOTES: dict[str | int | None, str] = {
    "repetition": "the answer was ended because it repeated itself",
    "runaway_box": "the answer was ended inside a box whose number has too many digits",
}
USAGE = 'foveal ask PICTURE... "QUESTION"'
PICTURE_SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".gif", ".bmp", ".tif", ".tiff", ".avif")

# Flags of SamplingParams; names, types and defaults come from its fields.
SAMPLING_HELP = {
    "max_tokens": "longest answer",
    "temperature": "0 takes the likeliest token each time; higher is freer",
    "top_p": "sample among the likeliest tokens with this much probability in all",
    "top_k": "sample among this many likeliest tokens (0: all)",
    "min_p": "drop tokens below this share of the likeliest one's probability",
    "seed": "same seed, same answer (default: a fresh one when sampling)",
    "repetition_penalty": "above 1 makes repeated tokens less likely",
    "loop_guard_repeats": "end an answer whose tail repeats itself this often (0: never)",
}


def add_arguments(parser: Parser) -> None:
    parser.add_argument(
        "inputs",
        nargs="*",
        metavar="PICTURE... QUESTION",
        help="picture files in the order the question speaks of them, then the question",
    )
    parser.add_argument(
        "--model",
        metavar="DIR|ID",
        help=f"checkpoint folder, hub id or shipped model (default: {DEMO_MODEL})",
    )
    parser.add_argument(
        "--locate",
        metavar="LABEL",
        help="ask where LABEL is, in the form that models with grounding know; instead of a question",
    )
    parser.add_argument(
        "--boxes", metavar="OUT.png", help="write the last picture with the answer's boxes drawn"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object at the end")
    parser.add_argument(
        "--thinking",
        action="store_true",
        help="let a model that can reason do so before it answers; what it thinks goes to stderr",
    )
    parser.add_argument(
        "--effort",
        metavar="LEVEL",
        help="how hard to think, where the model's release knows levels",
    )
    _add_sampling(parser)
    parser.add_argument(
        "--stop",
        action="append",
        default=[],
        metavar="TEXT",
        help="end before this text; repeat for more",
    )
    parser.add_argument(
        "--dtype", choices=("auto", "float32", "bfloat16", "float16"), default="auto"
    )
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda, cuda:1 ...")
    parser.add_argument(
        "--vision-mode",
        choices=("official", "timm-pad"),
        default="official",
        help="timm-pad sees pictures as some other engines do (docs/vision-modes.md)",
    )
    parser.add_argument(
        "--picture-mode",
        choices=("display", "vendor"),
        default="display",
        help="vendor decodes as the official loader does: no EXIF rotation, alpha dropped",
    )


def run(arguments: argparse.Namespace) -> int:
    paths, question = _split_inputs(arguments.inputs, arguments.locate)
    params = _sampling_params(arguments)
    overlay = _overlay_path(arguments.boxes, num_pictures=len(paths))
    pictures = _load_pictures(paths, arguments.picture_mode)
    if arguments.model is None:
        note(DEMO_NOTE)
    from foveal.families import ChatOptions  # torch: only once the pictures are known to be good
    from foveal.llm import collect

    llm = load_llm(
        arguments.model or DEMO_MODEL,
        is_quiet=arguments.json,
        dtype=arguments.dtype,
        device=arguments.device,
        vision_mode=arguments.vision_mode,
        picture_mode=arguments.picture_mode,
    )
    message = Message(role="user", content=(*pictures, question))
    options = ChatOptions(thinking=arguments.thinking, effort=arguments.effort)
    deltas = llm.stream_chat([message], params, options)
    output = collect(deltas if arguments.json else _shown(deltas))
    grounding = _grounding(output.text, pictures)
    if overlay is not None:
        from foveal.vision.overlay import draw_boxes

        draw_boxes(pictures[-1], grounding.boxes, overlay)
    if arguments.json:
        write_json(_as_json(output, grounding))
    else:
        _report(output, grounding, paths, overlay)
    return 0


def _add_sampling(parser: Parser) -> None:
    for field in dataclasses.fields(SamplingParams):
        if field.name not in SAMPLING_HELP:
            continue
        parser.add_argument(
            "--" + field.name.replace("_", "-"),
            type=float if str(field.type).startswith("float") else int,
            default=field.default,
            metavar="N",
            help=SAMPLING_HELP[field.name]
            + ("" if field.default is None else f" (default: {field.default})"),
        )


def _sampling_params(arguments: argparse.Namespace) -> SamplingParams:
    values: Mapping[str, Any] = {name: getattr(arguments, name) for name in SAMPLING_HELP}
    return SamplingParams(**values, stop=tuple(arguments.stop))


def _split_inputs(inputs: list[str], label: str | None) -> tuple[list[str], str]:
    """Pictures and question. Raises UsageError where the question is missing or a picture does not exist."""
    if label is not None:
        paths, question = inputs, locate_prompt(label)
        if not paths:
            raise UsageError("--locate needs a picture: foveal ask PICTURE --locate LABEL")
    else:
        paths, question = inputs[:-1], _question(inputs)
    for path in paths:
        if not _is_file(path):
            hint = "it is a folder" if _is_folder(path) else "no such file"
            raise UsageError(f"picture {path[:200]!r}: {hint}; write {USAGE}")
    return paths, question


def _question(inputs: list[str]) -> str:
    """The last argument, if it can be one."""
    if not inputs:
        raise UsageError(f"nothing to ask; write {USAGE}")
    question = inputs[-1]
    if _is_file(question):
        raise UsageError(
            f"the last argument, {question!r}, is a file: the question is missing; write {USAGE}"
        )
    if question.lower().endswith(PICTURE_SUFFIXES) and " " not in question:
        raise UsageError(
            f"the last argument, {question!r}, names a picture that does not exist, and the question is missing; "
            f"write {USAGE}"
        )
    if not question.strip():
        raise UsageError(f"the question is empty; write {USAGE}")
    return question


def _is_file(text: str) -> bool:
    try:
        return Path(text).is_file()
    except (OSError, ValueError):  # longer than a file name may be: a question
        return False


def _is_folder(text: str) -> bool:
    try:
        return Path(text).is_dir()
    except (OSError, ValueError):
        return False


def _overlay_path(name: str | None, *, num_pictures: int) -> Path | None:
    if name is None:
        return None
    path = Path(name)
    if num_pictures == 0:
        raise UsageError(
            "--boxes draws on a picture, and none was given; name one before the question"
        )
    if path.suffix.lower() != ".png":
        raise UsageError(f"--boxes {name!r}: the overlay is a PNG file; write {path.stem}.png")
    if not path.parent.is_dir():
        raise UsageError(
            f"--boxes {name!r}: the folder {str(path.parent)!r} does not exist; create it first"
        )
    return path


def _load_pictures(paths: list[str], mode: str) -> list[Picture]:
    from foveal.vision.decode import load_picture

    pictures = []
    for path in paths:
        picture = load_picture(path, mode="vendor" if mode == "vendor" else "display")
        for remark in picture.notes:
            note(f"{path}: {remark}")
        pictures.append(picture)
    return pictures


def _shown(deltas: Iterator[Delta]) -> Iterator[Delta]:
    """The same deltas; each one's text goes to stdout as it comes, what the model thinks to stderr."""
    for delta in deltas:
        if delta.reasoning:
            print(delta.reasoning, end="", file=sys.stderr, flush=True)
        print(delta.text, end="", flush=True)
        yield delta
    print(flush=True)


def _grounding(text: str, pictures: list[Picture]) -> Grounding:
    """Boxes of the answer. They speak of the last picture (spec 7.4); with no picture there is nothing to point at."""
    if not pictures:
        return Grounding()
    last = pictures[-1]
    return parse_grounding(text, (last.width, last.height), image=len(pictures) - 1)


def _as_json(output: RequestOutput, grounding: Grounding) -> dict[str, object]:
    more: dict[str, object] = {}
    if output.reasoning:
        more["reasoning"] = output.reasoning
    if output.tool_calls:
        more["tool_calls"] = [dataclasses.asdict(call) for call in output.tool_calls]
    return {
        "text": output.text,
        **more,
        "boxes": [
            {"label": b.label, "box": list(b.box), "raw": list(b.raw), "image": b.image}
            for b in grounding.boxes
        ],
        "malformed": [{"text": m.text, "reason": m.reason} for m in grounding.malformed],
        "usage": dataclasses.asdict(output.usage),
        "finish_reason": output.finish_reason,
    }


def _report(
    output: RequestOutput, grounding: Grounding, paths: list[str], overlay: Path | None
) -> None:
    for box in grounding.boxes:
        left, top, right, bottom = box.box
        name = Path(paths[box.image]).name
        note(
            f"{box.label}: left {left}, top {top}, right {right}, bottom {bottom} (pixels of {name})"
        )
    for piece in grounding.malformed:
        note(f"not a box ({piece.reason}): {piece.text[:80]!r}")
    if overlay is not None:
        note(f"wrote {overlay}, boxes drawn: {len(grounding.boxes)}")
    if output.finish_reason == "length":
        note(
            f"the answer ends at its limit of {output.usage.completion_tokens} tokens; raise it with --max-tokens"
        )
    elif output.stop_reason in GUARD_NOTES:
        note(GUARD_NOTES[output.stop_reason])
