"""Write a seeded random DeepSeek-VL2 checkpoint, in the vendor's layout, of a real or a small shape.

    python benchmarks/make_random_vl2.py --preset tiny --out DIR [--seed 0] [--shards N]

The numbers are random but scaled, so that activations keep a sane size through all layers: speed and memory are those
of the real model, the text is gibberish. Each tensor's numbers are a function of (seed, tensor name) alone. Tensors are
made in pieces and go straight to the disk, so memory stays small whatever the size (VL2-tiny: 6.7 GB on disk).
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import struct
import sys
import time
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from foveal.models.config import VL2Config
from foveal.models.fit import checkpoint_inventory

CONFIGS = Path(__file__).resolve().parents[1] / "tests" / "data"
REAL_SIZES = ("tiny", "small", "base")
SHARDS = {"tiny": 1, "small": 4, "base": 8, "midi": 2, "mini": 2}  # real sizes: as published
PIECE_ELEMENTS = 4 << 20

BOS, EOS, PAD = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜▁pad▁｜>"
MARKUP = (
    "<image>", "<|ref|>", "<|/ref|>", "<|det|>", "<|/det|>", "<|grounding|>", "<|User|>", "<|Assistant|>",
)  # fmt: skip

# Small shapes for tests, as changes to the tiny one: (vision_config, language_config, square tile or None).
SMALL_LANGUAGE = {"num_attention_heads": 4, "num_key_value_heads": 4, "n_routed_experts": 8}
SMALL: dict[str, tuple[dict[str, Any], dict[str, Any], int | None]] = {
    "mini": (
        {"width": 48, "layers": 2, "heads": 4, "image_size": 56},
        {"hidden_size": 64, "intermediate_size": 160, "moe_intermediate_size": 24, "vocab_size": 640,
         "num_hidden_layers": 3, **SMALL_LANGUAGE},
        56,
    ),
    "midi": (
        {"width": 384, "layers": 4, "heads": 6},
        {"hidden_size": 768, "intermediate_size": 2048, "moe_intermediate_size": 512, "vocab_size": 8192,
         "num_hidden_layers": 8, **SMALL_LANGUAGE},
        None,
    ),
}  # fmt: skip


def preset_config(preset: str) -> dict[str, Any]:
    """The `config.json` of a preset: a real size as published, or a small relative of tiny."""
    source = preset if preset in REAL_SIZES else "tiny"
    config: dict[str, Any] = json.loads((CONFIGS / f"vl2_{source}_config.json").read_text())
    if preset in SMALL:
        vision, language, tile = SMALL[preset]
        config["vision_config"] |= vision
        config["language_config"] |= language
        config["projector_config"] |= {
            "input_dim": vision["width"],
            "n_embed": language["hidden_size"],
        }
        if tile is not None:
            scaled = [
                [w // 384 * tile, h // 384 * tile] for w, h in config["candidate_resolutions"]
            ]
            config["candidate_resolutions"] = scaled
    return config


def scale(name: str, shape: tuple[int, ...], num_layers: int) -> tuple[float, float]:
    """(mean, standard deviation) of a tensor's numbers."""
    if name.endswith("norm.weight") or ("norm" in name and name.endswith(".weight")):
        return 1.0, 0.05
    if name.endswith("embed_tokens.weight") or name in ("image_newline", "view_seperator"):
        return 0.0, 0.5
    if len(shape) < 2 or name.endswith("pos_embed") or name.endswith("latent"):
        return 0.0, 0.02
    fan_in = math.prod(shape[1:])
    writes_residual = any(key in name for key in ("o_proj", "down_proj", "attn.proj", "fc2"))
    return 0.0, 1.0 / math.sqrt(fan_in * (2 * num_layers if writes_residual else 1))


def to_bfloat16(values: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
    """The bits of `values` rounded to bfloat16, to nearest even. Finite numbers only."""
    bits = values.view(np.uint32)
    return ((bits + (0x7FFF + ((bits >> 16) & 1))) >> 16).astype("<u2")


def random_pieces(
    name: str, shape: tuple[int, ...], seed: int, num_layers: int
) -> Iterator[npt.NDArray[np.uint16]]:
    """A tensor's numbers in bfloat16, piece by piece."""
    mean, deviation = scale(name, shape, num_layers)
    generator = np.random.Generator(np.random.SFC64([seed, zlib.crc32(name.encode())]))
    left = math.prod(shape)
    while left:
        values = generator.standard_normal(min(left, PIECE_ELEMENTS), dtype=np.float32)
        left -= values.size
        values *= np.float32(deviation)
        values += np.float32(mean)
        yield to_bfloat16(values)


def write_shard(
    file: BinaryIO, tensors: Mapping[str, tuple[int, ...]], seed: int, num_layers: int
) -> int:
    """Write one safetensors file; returns the bytes of tensor data."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, shape in tensors.items():
        end = offset + 2 * math.prod(shape)
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    file.write(struct.pack("<Q", len(text)) + text)
    for name, shape in tensors.items():
        for piece in random_pieces(name, shape, seed, num_layers):
            file.write(piece.tobytes())
    return offset


def split_into_shards(
    tensors: Mapping[str, tuple[int, ...]], count: int
) -> list[dict[str, tuple[int, ...]]]:
    """`count` groups of about equal size, in order."""
    total = sum(math.prod(shape) for shape in tensors.values())
    shards: list[dict[str, tuple[int, ...]]] = [{} for _ in range(count)]
    done = 0
    for name, shape in tensors.items():
        shards[min(count - 1, done * count // total)][name] = shape
        done += math.prod(shape)
    return shards


def write_weights(folder: Path, config: VL2Config, *, seed: int, num_shards: int) -> int:
    """Write all shards and their index; returns the bytes of tensor data."""
    tensors = {tensor.name: tensor.shape for tensor in checkpoint_inventory(config)}
    num_layers = max(config.vision.layers, config.language.num_hidden_layers)
    weight_map: dict[str, str] = {}
    total = 0
    for i, shard in enumerate(split_into_shards(tensors, num_shards), start=1):
        name = f"model-{i:05d}-of-{num_shards:06d}.safetensors"
        with (folder / name).open("wb") as file:
            total += write_shard(file, shard, seed, num_layers)
        weight_map |= dict.fromkeys(shard, name)
        print(f"{name}: {len(shard)} tensors, {total / 1e9:.2f} GB so far", file=sys.stderr)
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    write_json(folder / "model.safetensors.index.json", index)
    return total


def byte_alphabet() -> list[str]:
    """The character that stands for each byte in a byte-level vocabulary (GPT-2's table)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    table = {byte: chr(byte) for byte in printable}
    table |= {byte: chr(0x100 + i) for i, byte in enumerate(others)}
    return [table[byte] for byte in range(256)]


def special_ids(vocab_size: int, bos: int) -> dict[str, int]:
    """Ids of the special tokens; those of spec 7.1 where the vocabulary is a real one."""
    first = {102400: 100003, 129280: 128815}.get(vocab_size, vocab_size - 16)
    ids = {BOS: bos, EOS: bos + 1, PAD: bos + 2}
    return ids | {token: first + i for i, token in enumerate(MARKUP)}


def vocabulary(vocab_size: int, specials: Mapping[str, int]) -> dict[str, int]:
    """Every id has a token: specials at their ids, then the 256 bytes, then made-up words (never encoded to)."""
    syllables = [a + b for a in "bdfgklmnprstvz" for b in "aeiou"]
    words = (
        "Ġ" + "".join(parts)
        for length in itertools.count(2)
        for parts in itertools.product(syllables, repeat=length)
    )
    texts = itertools.chain(byte_alphabet(), words)
    by_id = {number: token for token, number in specials.items()}
    return {by_id[i] if i in by_id else next(texts): i for i in range(vocab_size)}


def write_tokenizer(folder: Path, vocab_size: int, bos: int) -> None:
    """A byte-level tokenizer without merges: one token a byte, special tokens as in the real one."""
    specials = dict(sorted(special_ids(vocab_size, bos).items(), key=lambda item: item[1]))
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    added = [{"id": i, "content": token, **flags, "special": True} for token, i in specials.items()]
    level = {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": True,
        "use_regex": False,
    }
    model: dict[str, Any] = {
        "type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
        "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False,
        "vocab": vocabulary(vocab_size, specials), "merges": [],
    }  # fmt: skip
    tokenizer = {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": added,
        "normalizer": None, "pre_tokenizer": level, "post_processor": None, "decoder": level,
        "model": model,
    }  # fmt: skip
    write_json(folder / "tokenizer.json", tokenizer)
    names = {"bos_token": BOS, "eos_token": EOS, "pad_token": PAD}
    decoder = {
        str(i): {"content": token, **flags, "special": True} for token, i in specials.items()
    }
    settings = {"add_bos_token": False, "add_eos_token": False, "added_tokens_decoder": decoder}
    settings |= {**names, "model_max_length": 4096, "tokenizer_class": "LlamaTokenizerFast"}
    write_json(folder / "tokenizer_config.json", settings)
    roles = {"additional_special_tokens": ["<|User|>", "<|Assistant|>"]}
    write_json(folder / "special_tokens_map.json", roles | names)


def processor_settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """`processor_config.json` as published (spec 1.6)."""
    return {
        "add_special_token": False,
        "candidate_resolutions": config["candidate_resolutions"],
        "downsample_ratio": config["projector_config"].get("downsample_ratio", 2),
        "ignore_id": -100,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
        "image_token": "<image>",
        "mask_prompt": False,
        "normalize": True,
        "pad_token": PAD,
        "patch_size": config["vision_config"]["patch_size"],
        "processor_class": "DeepseekVLV2Processor",
        "sft_format": "deepseek",
    }


def write_json(path: Path, values: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(values, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def make_checkpoint(
    folder: Path, preset: str, *, seed: int = 0, num_shards: int | None = None
) -> int:
    """Write a whole checkpoint folder; returns the bytes of tensor data. Overwrites what has the same name."""
    folder.mkdir(parents=True, exist_ok=True)
    raw = preset_config(preset)
    config = VL2Config.from_dict(raw)
    write_json(folder / "config.json", raw)
    write_json(folder / "processor_config.json", processor_settings(raw))
    write_tokenizer(folder, config.language.vocab_size, config.language.bos_token_id)
    return write_weights(folder, config, seed=seed, num_shards=num_shards or SHARDS[preset])


def main() -> None:
    parser = argparse.ArgumentParser(description="Write a seeded random DeepSeek-VL2 checkpoint.")
    parser.add_argument("--preset", choices=sorted(SHARDS), default="tiny")
    parser.add_argument("--out", type=Path, required=True, help="folder to write (made if needed)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--shards", type=int, help="number of files (default: as published)")
    args = parser.parse_args()
    start = time.perf_counter()
    total = make_checkpoint(args.out, args.preset, seed=args.seed, num_shards=args.shards)
    seconds = time.perf_counter() - start
    print(json.dumps({"folder": str(args.out), "bytes": total, "seconds": round(seconds, 1)}))


if __name__ == "__main__":
    main()
