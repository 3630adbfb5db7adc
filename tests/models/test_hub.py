"""A model's name becomes a folder, or one line that says what to do instead."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, NoReturn

import huggingface_hub
import pytest
from huggingface_hub import constants, errors

from foveal.errors import ModelNotFoundError, ResourceError
from foveal.models import hub
from foveal.models.hub import resolve_model, shipped_models

HUB_ID = "deepseek-ai/deepseek-vl2-tiny"
COMMIT = "0123456789abcdef0123456789abcdef01234567"


def model_folder(path: Path) -> Path:
    path.mkdir(parents=True)
    (path / "config.json").write_text("{}")
    return path


@pytest.fixture
def shipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package with two shipped models, seen from an empty working folder."""
    root = tmp_path / "package" / "demo"
    for name in ("demo-vl2", "demo-v4"):
        model_folder(root / name)
    (root / "__pycache__").mkdir()
    monkeypatch.setattr(hub, "SHIPPED_ROOT", root)
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    return root


# --- shipped and local ------------------------------------------------------------------------------


def test_shipped_ids_are_folders_of_the_package(shipped: Path) -> None:
    assert shipped_models() == ["demo-v4", "demo-vl2"]
    assert resolve_model("demo-vl2") == shipped / "demo-vl2"


def test_a_shipped_id_wins_over_a_folder_which_needs_its_dot(shipped: Path) -> None:
    local = model_folder(Path.cwd() / "demo-vl2")
    assert resolve_model("demo-vl2") == shipped / "demo-vl2"
    assert resolve_model("./demo-vl2").resolve() == local


@pytest.mark.parametrize(
    "name", ["x", "deepseek-ai/deepseek-vl2-tiny", "mit leerzeichen äö", "a.b/c/d"]
)
def test_a_local_folder_may_have_any_name(shipped: Path, name: str) -> None:
    model_folder(Path(name))
    assert resolve_model(name) == Path(name)
    assert resolve_model(str(Path(name).resolve())) == Path(name).resolve()


def test_a_home_folder_is_expanded(shipped: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(Path.cwd()))
    folder = model_folder(Path.cwd() / "mine")
    assert resolve_model("~/mine") == folder


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("", "name is empty"),
        ("  ", "name is empty"),
        ("demo-vl", r"no model 'demo-vl'; did you mean demo-vl2\?"),
        ("Demo-VL2", r"no model 'Demo-VL2'; did you mean demo-vl2\?"),
        ("something", r"no model 'something'; name a shipped model \(demo-v4, demo-vl2\)"),
        ("./absent", "no folder ./absent"),
        ("/no/such/folder", "no folder /no/such/folder"),
        ("~/no/such", "no folder ~/no/such"),
        ("a/b/c", "no folder a/b/c"),
        ("a b/c", "no folder a b/c"),
        ("..", "has no config.json"),
    ],
)
def test_unknown_names_say_what_is_possible(shipped: Path, name: str, said: str) -> None:
    with pytest.raises(ModelNotFoundError, match=said) as caught:
        resolve_model(name)
    assert "\n" not in str(caught.value)


def test_a_misspelt_folder_gets_its_neighbours_name(shipped: Path) -> None:
    model_folder(Path("models/deepseek-vl2-tiny"))
    with pytest.raises(ModelNotFoundError, match=r"did you mean models/deepseek-vl2-tiny\?"):
        resolve_model("./models/deepseek-vl2-tini")


def test_a_file_in_place_of_a_folder(shipped: Path) -> None:
    path = model_folder(Path("m")) / "model.safetensors"
    path.touch()
    with pytest.raises(ModelNotFoundError, match=r"is a file; name the folder .*\(m\)"):
        resolve_model("m/model.safetensors")


def test_the_folder_of_a_hub_cache_points_to_its_snapshot(shipped: Path) -> None:
    inner = model_folder(Path(f"models--a--b/snapshots/{COMMIT}"))
    with pytest.raises(ModelNotFoundError, match=f"did you mean {inner}\\?"):
        resolve_model("models--a--b")


# --- hub --------------------------------------------------------------------------------------------


def fake_cache(home: Path, *, weights: bool = True) -> Path:
    """The layout in which the hub library keeps a downloaded model."""
    repository = home / "hub" / "models--deepseek-ai--deepseek-vl2-tiny"
    snapshot = model_folder(repository / "snapshots" / COMMIT)
    if weights:
        (snapshot / "model.safetensors").touch()
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(COMMIT)
    return snapshot


RESOLVE = """
import sys
from foveal.errors import FovealError
from foveal.models.hub import resolve_model
try:
    print(resolve_model(sys.argv[1], revision=sys.argv[2] or None))
except FovealError as error:
    print(type(error).__name__, error)
"""


def resolve_offline(repository: Path, home: Path, name: str, revision: str = "") -> str:
    """What a fresh process finds with HF_HOME at `home` and HF_HUB_OFFLINE set."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith("HF_")}
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", RESOLVE, name, revision],
        env={**kept, "HF_HOME": str(home), "HF_HUB_OFFLINE": "1"},
        cwd=repository, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert "Traceback" not in done.stderr
    return done.stdout.strip()


def test_offline_reads_the_cache_that_hf_home_names(repository: Path, tmp_path: Path) -> None:
    snapshot = fake_cache(tmp_path)
    assert resolve_offline(repository, tmp_path, HUB_ID) == str(snapshot)
    assert resolve_offline(repository, tmp_path, HUB_ID, COMMIT) == str(snapshot)


def test_offline_without_a_copy_says_what_to_do(repository: Path, tmp_path: Path) -> None:
    fake_cache(tmp_path)
    said = resolve_offline(repository, tmp_path, HUB_ID, "other-branch")
    assert said.startswith(
        f"ModelNotFoundError {HUB_ID} at revision other-branch is not complete in the cache"
    )
    assert str(tmp_path) in said
    assert "HF_HUB_OFFLINE is set; unset it to download, or name a local model folder" in said
    assert "\n" not in said


def raising(error: Exception) -> Any:
    def download(*_: object, **__: object) -> NoReturn:
        raise error

    return download


class FakeResponse:
    """What the hub library's errors need of a response."""

    headers: dict[str, str] = {}  # noqa: RUF012
    status_code = 403
    request = None


def hub_error(kind: type[Exception], text: str) -> Exception:
    try:
        return kind(text, response=FakeResponse())  # type: ignore[call-arg]
    except TypeError:
        return kind(text)


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        (errors.RepositoryNotFoundError, "neither a local folder nor a model on the hub .*hf auth login"),
        (errors.GatedRepoError, "is gated: accept its terms on https://huggingface.co/deepseek-ai"),
        (errors.RevisionNotFoundError, "has no revision 'v9' on the hub"),
        (errors.LocalEntryNotFoundError, "not complete in the cache .* cannot be reached; check the network"),
        (errors.HfHubHTTPError, r"the hub refused .*\(first line\)"),
        (errors.HFValidationError, r"could not be fetched from the hub \(first line\)"),
        (ConnectionError, r"could not be fetched from the hub \(first line\)"),
        (hub._network_error(), r"deepseek-ai/deepseek-vl2-tiny .*\(first line\)"),
    ],
)  # fmt: skip
def test_each_failure_of_the_hub_is_one_line(
    shipped: Path, monkeypatch: pytest.MonkeyPatch, kind: type[Exception], said: str
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    error = hub_error(kind, "first line\nsecond line")
    monkeypatch.setattr(huggingface_hub, "snapshot_download", raising(error))
    with pytest.raises(ModelNotFoundError, match=said) as caught:
        resolve_model(HUB_ID, revision="v9")
    assert "\n" not in str(caught.value)


def test_a_full_disk_is_a_resource_error(shipped: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    full = OSError(errno.ENOSPC, "No space left on device")
    monkeypatch.setattr(huggingface_hub, "snapshot_download", raising(full))
    with pytest.raises(ResourceError, match=r"disk is full .*HF_HOME"):
        resolve_model(HUB_ID)


@pytest.mark.parametrize("weights", [True, False])
def test_only_json_and_safetensors_of_the_top_folder_are_taken(
    shipped: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, weights: bool
) -> None:
    files = [
        "config.json",
        "tokenizer.json",
        "modeling.py",
        "model.bin",
        "chat.jinja",
        "original/config.json",
    ]
    files += ["model-00001-of-000001.safetensors", "original/x.safetensors", "README.md"]
    asked: list[str] = []

    def download(
        _: str, *, allow_patterns: list[str], ignore_patterns: list[str], **__: object
    ) -> str:
        asked.extend(
            name
            for name in files
            if any(fnmatch(name, pattern) for pattern in allow_patterns)
            and not any(fnmatch(name, pattern) for pattern in ignore_patterns)
        )
        return str(model_folder(tmp_path / "snapshot"))

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert resolve_model(HUB_ID, weights=weights) == tmp_path / "snapshot"
    kept = ["config.json", "tokenizer.json"]
    assert asked == kept + (["model-00001-of-000001.safetensors"] if weights else [])


def test_a_repository_without_config_is_no_model(
    shipped: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *_, **__: str(tmp_path))
    with pytest.raises(ModelNotFoundError, match=r"has no config\.json"):
        resolve_model(HUB_ID)


def test_importing_the_module_imports_no_hub_library_and_no_torch(repository: Path) -> None:
    code = "import sys, foveal.models.hub; print('huggingface_hub' in sys.modules, 'torch' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=repository, capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["False", "False"]
