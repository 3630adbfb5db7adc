"""Where the commands write: answers and JSON to stdout, everything else to stderr."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence


def write_json(value: object) -> None:
    """Print one JSON object on stdout. Characters that the terminal cannot show are escaped."""
    is_unicode = (sys.stdout.encoding or "").lower().replace("-", "") == "utf8"
    print(json.dumps(value, ensure_ascii=not is_unicode, indent=2))


def note(text: str) -> None:
    """Print a remark on stderr."""
    print(f"foveal: {text}", file=sys.stderr)


def table(rows: Sequence[Sequence[str]], *, right: Sequence[int] = ()) -> str:
    """Rows of cells as aligned text; the columns listed in `right` are aligned to the right."""
    if not rows:
        return ""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [
            cell.rjust(width) if column in right else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def bytes_text(count: int) -> str:
    """A size in decimal units: 6_741_000_000 is "6.74 GB"."""
    value = float(count)
    for unit in ("B", "kB", "MB"):
        if value < 1000:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.2f} {unit}"
        value /= 1000
    return f"{value:.2f} GB"
