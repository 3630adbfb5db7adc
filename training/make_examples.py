"""Draw the pictures in `examples/`. `python training/make_examples.py`; the same files each time."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run as a script, from anywhere

from training.scenes import Kind, make_scene

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
# Scenes of this seed are in no training pool, and its digits are held-out ones.
SEED = 2024
SCENES: dict[str, tuple[Kind, int, tuple[int, int]]] = {
    "shapes.png": ("shapes", 0, (480, 360)),
    "shapes-dark.png": ("shapes", 5, (480, 360)),
    "stars.png": ("crowd", 3, (384, 288)),
    "circles.png": ("crowd", 5, (384, 288)),
    "digit.png": ("digit", 5, (320, 320)),
    "word.png": ("word", 10, (480, 300)),
}


def main() -> None:
    EXAMPLES.mkdir(exist_ok=True)
    for name, (kind, index, size) in SCENES.items():
        scene = make_scene(kind, SEED, index, held_out=True, size=size)
        scene.picture.save(EXAMPLES / name, optimize=True)
        print(name, scene.content)


if __name__ == "__main__":
    main()
