"""Draw a training log as a picture, with Pillow alone. `python training/plot.py LOG OUT.png`."""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from typing import Any

from PIL import Image, ImageDraw, ImageFont

Point = tuple[float, float]
SIZE = (1000, 760)
FRAME = (80, 940)  # left and right of both panels
PANELS = ((60, 350), (430, 700))  # top and bottom
INK, GRID = (40, 40, 40), (225, 225, 225)
COLOURS = (
    (31, 119, 180),
    (214, 39, 40),
    (44, 160, 44),
    (148, 103, 189),
    (255, 127, 14),
    (140, 86, 75),
    (23, 160, 190),
)


class Panel:
    """One set of axes; `low`, `high` of the vertical axis, logarithmic if asked for."""

    def __init__(
        self,
        draw: ImageDraw.ImageDraw,
        place: int,
        steps: int,
        low: float,
        high: float,
        *,
        log: bool,
    ) -> None:
        self.draw, self.steps, self.log = draw, steps, log
        self.top, self.bottom = PANELS[place]
        self.low, self.high = (math.log10(low), math.log10(high)) if log else (low, high)
        self.font = ImageFont.load_default(15)

    def spot(self, step: float, value: float) -> Point:
        y = math.log10(max(value, 1e-9)) if self.log else value
        share = min(1.0, max(0.0, (y - self.low) / (self.high - self.low)))
        x = FRAME[0] + (FRAME[1] - FRAME[0]) * step / self.steps
        return x, self.bottom - (self.bottom - self.top) * share

    def axes(self, title: str, ticks: list[float]) -> None:
        for value in ticks:
            y = self.spot(0, value)[1]
            self.draw.line((FRAME[0], y, FRAME[1], y), fill=GRID)
            self.draw.text((FRAME[0] - 8, y), f"{value:g}", fill=INK, font=self.font, anchor="rm")
        for i in range(6):
            step = self.steps * i / 5
            x = self.spot(step, 1)[0]
            self.draw.line((x, self.top, x, self.bottom), fill=GRID)
            self.draw.text(
                (x, self.bottom + 6), f"{step:.0f}", fill=INK, font=self.font, anchor="ma"
            )
        self.draw.rectangle((FRAME[0], self.top, FRAME[1], self.bottom), outline=INK)
        self.draw.text((FRAME[0], self.top - 28), title, fill=INK, font=ImageFont.load_default(18))

    def curves(self, series: dict[str, list[Point]]) -> None:
        at = FRAME[1]
        for (name, points), colour in reversed(list(zip(series.items(), COLOURS, strict=False))):
            if len(points) > 1:
                self.draw.line([self.spot(*p) for p in points], fill=colour, width=2, joint="curve")
            at -= self.draw.textlength(name, font=self.font) + 16
            self.draw.text((at, self.top - 24), name, fill=colour, font=self.font)


def column(entries: list[dict[str, Any]], name: str) -> list[Point]:
    return [(e["step"], e[name]) for e in entries if name in e]


def draw_log(entries: list[dict[str, Any]]) -> Image.Image:
    """Losses above, held-out accuracy below, over the steps."""
    picture = Image.new("RGB", SIZE, (255, 255, 255))
    draw = ImageDraw.Draw(picture)
    steps = entries[-1]["step"]
    losses = Panel(draw, 0, steps, 0.01, 100, log=True)
    losses.axes("losses (log scale)", [0.01, 0.1, 1, 10, 100])
    losses.curves({name: column(entries, name) for name in ("answer", "cell", "near", "look")})
    rated = [{"step": e["step"], **e["accuracy"]} for e in entries if "accuracy" in e]
    accuracy = Panel(draw, 1, steps, 0, 100, log=False)
    accuracy.axes("held-out accuracy, %", [0, 20, 40, 60, 80, 100])
    tasks = [name for name in rated[-1] if name != "step"] if rated else []
    accuracy.curves({t: [(s, 100 * v) for s, v in column(rated, t)] for t in tasks})
    draw.text(
        ((FRAME[0] + FRAME[1]) / 2, SIZE[1] - 30),
        "step",
        fill=INK,
        font=ImageFont.load_default(16),
        anchor="ma",
    )
    return picture


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("log", type=Path)
    parser.add_argument("out", type=Path)
    args = parser.parse_args()
    entries = [json.loads(line) for line in args.log.read_text(encoding="utf-8").splitlines()]
    draw_log(entries).save(args.out, optimize=True)


if __name__ == "__main__":
    main()
