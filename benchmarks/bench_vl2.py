"""Time one DeepSeek-VL2 model on one picture: load, vision, first token, decode, memory, beside the machine's roofs.

    python benchmarks/bench_vl2.py --model DIR|demo-vl2 [--dtype float32] [--image 384x384] [--output-tokens 32]
                                   [--runs 5] [--threads 2]

Prints a table (median, and the spread from the smallest to the largest of the runs) and, as the last line, one JSON
object. The roofs are measured before and after the runs, in a process of their own; the better value counts. Each run
sees another picture of the same size, so nothing that an engine keeps from an earlier run can help it.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from foveal.llm import LLM
    from foveal.models.config import VL2Config
    from foveal.types import Picture

QUESTION = "What is this?"
# The rate at which the time to the first token is judged: a busier machine is measured against its own rate.
REFERENCE_GEMM_FLOPS = 0.32e12


# --- memory of this process -------------------------------------------------------------------------


def status_bytes(key: str) -> int | None:
    """VmRSS (resident now) or VmHWM (its peak) of this process; None where /proc is not there."""
    try:
        lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    for line in lines:
        if line.startswith(key + ":"):
            return int(line.split()[1]) * 1024
    return None


def reset_peak() -> bool:
    """Let VmHWM start again from here; False where the kernel does not allow it."""
    try:
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    except OSError:
        return False
    return True


# --- what the work amounts to -----------------------------------------------------------------------


def tower_flops(config: VL2Config) -> int:
    """Multiply-adds, times two, of one tile through tower and projector."""
    from foveal.models.names import projector_layer_sizes

    v, n = config.vision, config.vision.grid**2
    linear = 4 * v.width**2 + 2 * v.width * v.mlp_hidden
    blocks = v.layers * (2 * n * linear + 4 * n * n * v.width)
    embed = 2 * n * 3 * v.patch_size**2 * v.width
    cells = config.tokens_per_side**2
    projector = sum(
        2 * cells * outputs * inputs for _, outputs, inputs in projector_layer_sizes(config)
    )
    return blocks + embed + projector


@dataclass(frozen=True)
class TokenWork:
    """What one token costs in the language model: bytes of weights to read, and FLOPs with and without the head."""

    weight_bytes: int
    flops: int
    head_flops: int


def token_work(llm: LLM) -> TokenWork:
    """At batch 1 a token reads every weight once, of the experts only the chosen ones, of the table one row."""
    config = llm.config.language
    share = (config.num_experts_per_tok or 0) / (config.n_routed_experts or 1)
    read_bytes, flops, head = 0.0, 0.0, 0
    for name, parameter in llm.model.language.named_parameters():
        part = share if ".experts." in name else 1.0
        is_table = name.startswith("embed_tokens")
        if is_table and not config.tie_word_embeddings:
            continue
        read_bytes += part * parameter.numel() * parameter.element_size()
        if name.startswith("lm_head") or is_table:
            head += 2 * parameter.numel()
        else:
            flops += part * 2 * parameter.numel()
    return TokenWork(int(read_bytes), int(flops), head)


def prefill_flops(llm: LLM, work: TokenWork, tokens: int) -> int:
    """FLOPs of a prompt: linear maps, causal attention, the head once."""
    c = llm.config.language
    width = c.qk_head_dim + c.v_head_dim if c.uses_mla else 2 * c.head_dim
    attention = c.num_hidden_layers * c.num_attention_heads * width * tokens * (tokens + 1)
    return work.flops * tokens + attention + work.head_flops


# --- runs -------------------------------------------------------------------------------------------


@dataclass
class Samples:
    """One value a run of each measure."""

    vision_s: list[float] = field(default_factory=list)
    vision_per_tile_s: list[float] = field(default_factory=list)
    prefill_s: list[float] = field(default_factory=list)
    ttft_s: list[float] = field(default_factory=list)
    decode_tokens_per_s: list[float] = field(default_factory=list)
    token_s: list[float] = field(default_factory=list)  # of every decoded token


def make_picture(size: tuple[int, int], seed: int) -> npt.NDArray[np.uint8]:
    """A drawn scene [height, width, 3]: a gradient with rectangles, another one for each seed."""
    width, height = size
    generator = np.random.default_rng(seed)
    across, down = np.linspace(0, 255, width), np.linspace(0, 255, height)
    picture = np.zeros((height, width, 3), dtype=np.uint8)
    picture[..., 0], picture[..., 1] = across[None, :], down[:, None]
    for _ in range(12):
        x, y = int(generator.integers(width)), int(generator.integers(height))
        w, h = (
            1 + int(generator.integers(width // 3 + 1)),
            1 + int(generator.integers(height // 3 + 1)),
        )
        picture[y : y + h, x : x + w] = generator.integers(0, 256, 3, dtype=np.uint8)
    return picture


def picture_of(llm: LLM, image: str, seed: int) -> Picture:
    """`image` is WIDTHxHEIGHT for a drawn picture, else a file."""
    width, _, height = image.partition("x")
    if width.isdigit() and height.isdigit():
        return llm.load_picture(make_picture((int(width), int(height)), seed))
    return llm.load_picture(image)


def run_once(
    llm: LLM, image: str, output_tokens: int, seed: int, samples: Samples
) -> dict[str, int]:
    """Answer once; append what it took. Returns counts that are the same in every run."""
    from foveal.types import Message, SamplingParams

    picture = picture_of(llm, image, seed)
    params = SamplingParams(max_tokens=output_tokens, ignore_eos=True)
    start = time.perf_counter()
    prompt = llm.chat_prompt([Message("user", (picture, QUESTION))])
    stream = llm.stream(prompt, params)
    next(stream)
    samples.ttft_s.append(time.perf_counter() - start)
    for _ in stream:
        pass
    timings = llm.runner.timings
    tiles = timings.num_tiles_encoded
    samples.vision_s.append(timings.vision_s)
    samples.vision_per_tile_s.append(timings.vision_s / max(1, tiles))
    samples.prefill_s.append(timings.prefill_s)
    samples.token_s.extend(timings.decode_s)
    if timings.decode_s:
        samples.decode_tokens_per_s.append(len(timings.decode_s) / sum(timings.decode_s))
    return {
        "prompt_tokens": prompt.num_tokens,
        "image_tokens": prompt.num_image_tokens,
        "unique_tiles": tiles,
    }


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median, smallest and largest."""
    if not values:
        return {}
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def median(values: Sequence[float]) -> float:
    return statistics.median(values) if values else math.nan


# --- the whole --------------------------------------------------------------------------------------


def load(args: argparse.Namespace) -> tuple[LLM, dict[str, Any]]:
    """Load the model; the peak is counted above the process as it was before."""
    from foveal.llm import LLM

    torch_is_awake()
    can_reset = reset_peak()
    before = status_bytes("VmRSS")
    llm = LLM(args.model, dtype=args.dtype, device="cpu", progress=_show_progress)
    weights = sum(p.numel() * p.element_size() for p in llm.model.parameters())
    facts = {"load_s": llm.load_s, "weight_bytes": weights, "rss_before_bytes": before}
    facts["peak_load_bytes"] = _peak_above(before) if can_reset else None
    return llm, facts


def torch_is_awake() -> None:
    """One small product of each kind, so that what the libraries allocate once counts as the process."""
    import torch
    from torch.nn import functional as F

    for dtype in (torch.float32, torch.bfloat16):
        a = torch.ones(256, 256, dtype=dtype)
        F.linear(a, a)


def _peak_above(before: int | None) -> int | None:
    peak = status_bytes("VmHWM")
    return None if peak is None or before is None else peak - before


def _show_progress(done: int, total: int) -> None:
    if sys.stderr.isatty():
        end = "\n" if done == total else ""
        print(f"\rloading {done / 1e9:.2f} of {total / 1e9:.2f} GB", end=end, file=sys.stderr)


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Everything, as one flat-enough dictionary."""
    import probes
    import torch

    torch.set_num_threads(args.threads)
    before = probes.probes_in_child(args.threads)
    llm, memory = load(args)
    warm_up, samples = Samples(), Samples()
    counts = run_once(llm, args.image, args.output_tokens, seed=0, samples=warm_up)
    for run in range(1, args.runs + 1):
        counts = run_once(llm, args.image, args.output_tokens, seed=run, samples=samples)
    if memory["peak_load_bytes"] is not None:
        memory["peak_bytes"] = _peak_above(memory["rss_before_bytes"])
    after = probes.probes_in_child(args.threads)
    roofs = {key: max(value, after[key]) for key, value in before.items()}
    return {
        "benchmark": "vl2",
        "model": llm.folder.name,
        "dtype": llm.info["dtype"],
        "image": args.image,
        "runs": args.runs,
        "output_tokens": args.output_tokens,
        **counts,
        "machine": probes.machine(args.threads),
        "roofs": roofs,
        "memory": memory,
        **{name: spread(values) for name, values in vars(samples).items()},
        "first_request_ttft_s": warm_up.ttft_s[0],
        **shares(llm, samples, counts, roofs),
    }


def shares(
    llm: LLM, samples: Samples, counts: dict[str, int], roofs: dict[str, float]
) -> dict[str, float]:
    """Medians as shares of the roofs."""
    work = token_work(llm)
    fp32, tower = roofs["gemm_fp32_flops"], roofs["gemm_tower_fp32_flops"]
    vision = tower_flops(llm.config) / median(samples.vision_per_tile_s)
    prefill = prefill_flops(llm, work, counts["prompt_tokens"]) / median(samples.prefill_s)
    decode = median(samples.decode_tokens_per_s) * work.weight_bytes
    return {
        "vision_flops": vision,
        "vision_share_of_gemm": vision / fp32,
        "vision_share_of_tower_gemm": vision / tower,
        "vision_share_of_bf16_gemm": vision / roofs["gemm_bf16_flops"],
        "prefill_flops": prefill,
        "prefill_share_of_gemm": prefill / fp32,
        "decode_bytes_per_token": work.weight_bytes,
        "decode_read_bytes_per_s": decode,
        "decode_share_of_bandwidth": decode / roofs["read_bytes_per_s"],
        "ttft_at_reference_rate_s": median(samples.ttft_s) * fp32 / REFERENCE_GEMM_FLOPS,
    }


def table(r: dict[str, Any]) -> list[str]:
    """The result for people."""
    m, roofs, memory = r["machine"], r["roofs"], r["memory"]
    gb, tf = 1e9, 1e12

    def row(name: str, key: str, unit: str, remark: str = "", scale: float = 1.0) -> str:
        s = r[key]
        if not s:
            return f"{name:<28} {'-':>10}"
        values = f"{s['median'] * scale:>10.3f} {s['min'] * scale:>9.3f} {s['max'] * scale:>9.3f}"
        return f"{name:<28} {values}  {unit:<6} {remark}"

    def ratio(key: str) -> str:
        value = memory.get(key)
        if value is None:
            return "not known here"
        return f"{value / gb:.3f} GB = {value / memory['weight_bytes']:.3f} x weights"

    return [
        f"{r['model']}, {r['dtype']}, picture {r['image']} ({r['image_tokens']} of {r['prompt_tokens']} prompt tokens, "
        f"{r['unique_tiles']} unique tiles), {r['output_tokens']} output tokens",
        f"{m['cpu']}, {m['cores']} cores, {m['threads']} threads, torch {m['torch']}, {r['runs']} runs",
        "",
        f"roofs: read {roofs['read_bytes_per_s'] / gb:.1f} GB/s, "
        f"fp32 product {roofs['gemm_fp32_flops'] / tf:.3f} TFLOP/s "
        f"(tower's shapes {roofs['gemm_tower_fp32_flops'] / tf:.3f}), bf16 {roofs['gemm_bf16_flops'] / tf:.3f}",
        f"load: {memory['load_s']:.2f} s, weights {memory['weight_bytes'] / gb:.3f} GB",
        "memory above the process before loading: "
        f"peak while loading {ratio('peak_load_bytes')}, of everything {ratio('peak_bytes')}",
        "",
        f"{'':<28} {'median':>10} {'min':>9} {'max':>9}",
        row("vision", "vision_s", "s"),
        row(
            "vision per unique tile", "vision_per_tile_s", "s",
            f"{r['vision_share_of_gemm']:.0%} of the fp32 product, "
            f"{r['vision_share_of_tower_gemm']:.0%} of the tower's shapes",
        ),
        row("prefill", "prefill_s", "s", f"{r['prefill_share_of_gemm']:.0%} of the fp32 product"),
        row(
            "time to first token", "ttft_s", "s",
            f"{r['ttft_at_reference_rate_s']:.2f} s at 0.32 TFLOP/s; first request {r['first_request_ttft_s']:.2f} s",
        ),
        row(
            "decode", "decode_tokens_per_s", "tok/s",
            f"{r['decode_share_of_bandwidth']:.0%} of the bandwidth "
            f"({r['decode_bytes_per_token'] / gb:.3f} GB a token)",
        ),
        row("one output token", "token_s", "ms", scale=1e3),
    ]  # fmt: skip


def rounded(value: Any) -> Any:
    """Floats to five significant digits, through nested dictionaries."""
    if isinstance(value, dict):
        return {key: rounded(inner) for key, inner in value.items()}
    if isinstance(value, float):
        return float(f"{value:.5g}") if math.isfinite(value) else None
    return value


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Time a DeepSeek-VL2 model on one picture.")
    parser.add_argument("--model", default="demo-vl2", help="folder or shipped id")
    parser.add_argument(
        "--dtype", default="auto", choices=("auto", "float32", "bfloat16", "float16")
    )
    parser.add_argument("--image", default="384x384", help="WIDTHxHEIGHT (drawn) or a file")
    parser.add_argument("--output-tokens", type=int, default=32)
    parser.add_argument("--runs", type=int, default=5, help="counted runs, after one that is not")
    parser.add_argument("--threads", type=int, default=min(2, os.cpu_count() or 1))
    return parser.parse_args()


def main() -> None:
    args = arguments()
    os.environ["OMP_NUM_THREADS"] = str(args.threads)  # before torch is imported
    result = measure(args)
    print("\n".join(table(result)))
    print(json.dumps(rounded(result)))


if __name__ == "__main__":
    main()
