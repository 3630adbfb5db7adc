"""From a model's name to the folder that holds its files.

    demo-vl2                         a model shipped inside the package
    ./folder, /data/model, ~/model   a local folder, whatever it is called
    organisation/model               a Hugging Face hub id: downloaded once, then read from the cache

A shipped id wins over a folder of the same name (write `./demo-vl2` for the folder), and an existing folder wins over a
hub id. From the hub only top-level JSON (the tokenizer too) and safetensors files are taken, never code. `HF_HOME`,
`HF_HUB_OFFLINE`, `HF_TOKEN` and the hub library's other settings apply. This module looks at no weights.
"""

from __future__ import annotations

import difflib
import re
from pathlib import Path

from foveal.errors import ModelNotFoundError, ResourceError

SHIPPED_ROOT = Path(__file__).resolve().parents[1] / "demo"
CONFIG_PATTERNS = ("*.json",)
WEIGHT_PATTERNS = ("*.safetensors",)
IGNORE_PATTERNS = ("*/*",)  # other forms of a model (original/, onnx/) lie in subfolders

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def shipped_models() -> list[str]:
    """Ids of the models inside the package."""
    if not SHIPPED_ROOT.is_dir():
        return []
    return sorted(path.parent.name for path in SHIPPED_ROOT.glob("*/config.json"))


def resolve_model(name: str, *, revision: str | None = None, weights: bool = True) -> Path:
    """The folder of model `name`: a shipped id, a local folder, or a hub id.

    `revision` is a branch, tag or commit of a hub id. With `weights` False a hub id brings only its JSON files, which
    is what `foveal fit` needs. Raises ModelNotFoundError with the next step; ResourceError where the disk is full.
    """
    if not name.strip():
        raise ModelNotFoundError(f"the model's name is empty; {_what_is_possible()}")
    if name in shipped_models():
        return SHIPPED_ROOT / name
    path = Path(name).expanduser()
    if path.exists():
        return _local_folder(name, path)
    looks_local = name.startswith((".", "/", "~", "\\")) or not _HUB_ID.fullmatch(name)
    if looks_local:
        raise ModelNotFoundError(_unknown_name(name))
    return _from_hub(name, revision, weights)


def _local_folder(name: str, path: Path) -> Path:
    if path.is_file():
        raise ModelNotFoundError(
            f"{name} is a file; name the folder that holds config.json and the weights ({path.parent})"
        )
    if (path / "config.json").is_file():
        return path
    inside = [candidate.parent for candidate in sorted(path.glob("snapshots/*/config.json"))]
    inside += [candidate.parent for candidate in sorted(path.glob("*/config.json"))]
    hint = (
        f"; did you mean {inside[0]}?"
        if inside
        else "; a model folder holds config.json and weights"
    )
    raise ModelNotFoundError(f"folder {name} has no config.json{hint}")


def _what_is_possible() -> str:
    shipped = ", ".join(shipped_models()) or "none in this installation"
    return f"name a shipped model ({shipped}), a model folder, or a hub id such as deepseek-ai/deepseek-vl2-tiny"


def _unknown_name(name: str) -> str:
    if "/" in name or "\\" in name or name.startswith((".", "~")):
        parent = Path(name).expanduser().parent
        others = (
            [path.name for path in parent.iterdir() if path.is_dir()] if parent.is_dir() else []
        )
        close = difflib.get_close_matches(Path(name).name, others, n=1)
        hint = f"; did you mean {parent / close[0]}?" if close else f"; {_what_is_possible()}"
        return f"there is no folder {name}{hint}"
    close = difflib.get_close_matches(name.lower(), shipped_models(), n=1, cutoff=0.5)
    hint = f"did you mean {close[0]}? " if close else ""
    return f"there is no model {name!r}; {hint}{_what_is_possible()}"


def _from_hub(name: str, revision: str | None, weights: bool) -> Path:
    # Imported here: it costs a third of a second, and shipped and local models do without it.
    from huggingface_hub import errors, snapshot_download

    patterns = [*CONFIG_PATTERNS, *(WEIGHT_PATTERNS if weights else ())]
    ignored = list(IGNORE_PATTERNS)
    try:
        found = snapshot_download(
            name, revision=revision, allow_patterns=patterns, ignore_patterns=ignored
        )
    except errors.RevisionNotFoundError:
        message = f"{name} has no revision {revision!r} on the hub; leave it out or name a branch, tag or commit"
    except errors.GatedRepoError:
        message = f"{name} is gated: accept its terms on https://huggingface.co/{name}, then run `hf auth login`"
    except errors.RepositoryNotFoundError:
        message = (
            f"{name} is neither a local folder nor a model on the hub (or it is private: run `hf auth login`); "
            f"{_what_is_possible()}"
        )
    except errors.LocalEntryNotFoundError:
        message = _not_reachable(name, revision)
    except errors.HfHubHTTPError as error:
        message = (
            f"the hub refused {name} ({_first_line(error)}); try again later or name a local folder"
        )
    except (OSError, ValueError, RuntimeError, _network_error()) as error:
        if isinstance(error, OSError) and error.errno == 28:  # ENOSPC
            raise ResourceError(
                f"the disk is full while {name} is downloaded; free space or set HF_HOME to another disk"
            ) from None
        message = f"{name} could not be fetched from the hub ({_first_line(error)}); name a local folder instead"
    else:
        return _checked_snapshot(name, Path(str(found)))
    raise ModelNotFoundError(message)


def _network_error() -> type[Exception]:
    """The root of what the hub library's HTTP client raises; older versions use one whose errors are OSErrors."""
    from huggingface_hub import errors

    return getattr(errors, "HTTPError", OSError)


def _checked_snapshot(name: str, folder: Path) -> Path:
    if not (folder / "config.json").is_file():
        raise ModelNotFoundError(
            f"{name} has no config.json, so it is not a model that can be run here"
        )
    return folder


def _not_reachable(name: str, revision: str | None) -> str:
    from huggingface_hub import constants

    wanted = f"{name} at revision {revision}" if revision else name
    if constants.HF_HUB_OFFLINE:
        state = "HF_HUB_OFFLINE is set; unset it to download"
    else:
        state = "the hub cannot be reached; check the network and try again"
    return (
        f"{wanted} is not complete in the cache ({constants.HF_HUB_CACHE}), and {state}, "
        "or name a local model folder"
    )


def _first_line(error: Exception) -> str:
    text = str(error).strip()
    return text.splitlines()[0][:200] if text else type(error).__name__
