"""What does the name of a model mean, and which models are there?"""

import difflib
import os
from dataclasses import dataclass
from pathlib import Path

from helios_jax.hub import huggingface
from helios_jax.hub.embedded import KNOWN_MODELS, pull_embedded
from helios_jax.hub.progress import Progress
from helios_jax.hub.storage import cache_dir

_FORMS = (
    "a local Hugging Face folder, native checkpoint or .gguf file, hf:org/name[@revision], "
    "or hf:org/name/file.gguf"
)
# The file that only a native checkpoint has.
_NATIVE_MARK = "manifest.json"


@dataclass(frozen=True)
class ModelInfo:
    """A model that is in a cache, or a known one that can be.

    Attributes:
      name: what `resolve` and `--model` take.
      path: where it is; None where it is not pulled.
      size_bytes: on disk; of the download where it is not pulled.
      format: "native", "huggingface" or "gguf".
      source: where it came from.
      licence: SPDX identifier where it is known.
    """

    name: str
    path: Path | None
    size_bytes: int
    format: str
    source: str
    licence: str | None


def resolve(model: str | os.PathLike, progress: Progress | None = None) -> Path:
    """The path that `checkpoints_conv.open_checkpoint` takes; pulls on first use.

    A known name wins over a local folder of that name: write `./name` for the folder.

    Args:
      model: a known name, `hf:...`, or a path.
      progress: None draws a bar on standard error, `no_progress` nothing.

    Raises:
      ValueError: no such name or path, or nothing that can be loaded there.
      PullError: it could not be fetched.
    """
    name = os.fspath(model)
    if name in KNOWN_MODELS:
        return pull_embedded(name, progress)
    if name.startswith(huggingface.PREFIX):
        repository = huggingface.Repository.parse(name)
        cached = huggingface.cached_path(repository)
        return cached or huggingface.pull_repository(repository, progress)
    path = Path(name).expanduser()
    if not name.strip() or not path.exists():
        raise ValueError(_unknown(name))
    local_format(path)
    return path


def resolve_draft(draft: str | os.PathLike, progress: Progress | None = None) -> Path:
    """`resolve` for a draft; "default" is the one that comes with this package.

    It was distilled for the embedded model, see `helios_jax/distill/results/README.md`. Write
    `./default` for a folder of that name.
    """
    if os.fspath(draft) == "default":
        return resolve(Path(__file__).parent / "default_draft")
    return resolve(draft, progress)


def pull(name: str, progress: Progress | None = None, force: bool = False) -> Path:
    """Fetches a known model, or a Hugging Face repository's newest revision; returns its path.

    Args:
      name: a known name or `hf:...`.
      progress: None draws a bar on standard error, `no_progress` nothing.
      force: make anew what is there already, such as a damaged checkpoint.

    Raises:
      ValueError: `name` is a local path, or nothing known.
      PullError: it could not be fetched.
    """
    if name.startswith(huggingface.PREFIX):
        return huggingface.pull_repository(huggingface.Repository.parse(name), progress, force)
    if name in KNOWN_MODELS:
        return pull_embedded(name, progress, force)
    if name.strip() and Path(name).expanduser().exists():
        raise ValueError(f"model={name!r}: is a local path; there is nothing to pull, use it as is")
    raise ValueError(_unknown(name))


def local_format(path: Path) -> str:
    """ "gguf", "huggingface" or "native", by the files that are there; ValueError otherwise."""
    if path.is_dir():
        if (path / _NATIVE_MARK).is_file():
            return "native"
        missing = huggingface.missing_files(path)
        if not missing:
            return "huggingface"
        found = ", ".join(sorted(child.name for child in path.iterdir())[:8]) or "nothing"
        raise ValueError(
            f"model={str(path)!r}: the folder is no checkpoint: a Hugging Face one lacks "
            f"{', '.join(missing)}, a native one {_NATIVE_MARK}; found {found}"
        )
    with open(path, "rb") as file:
        magic = file.read(4)
    if magic != b"GGUF":
        raise ValueError(
            f"model={str(path)!r}: the file is not GGUF (it begins with {magic!r}); pass a .gguf "
            "file, or the folder of a Hugging Face or native checkpoint"
        )
    return "gguf"


def list_models() -> list[ModelInfo]:
    """Every pulled model, then the known ones that are not pulled; touches no network."""
    pulled = []
    for model in KNOWN_MODELS.values():
        source = f"{model.source} ({model.requirement})"
        if model.native_path.is_dir():
            size = sum(
                file.stat().st_size for file in model.native_path.rglob("*") if file.is_file()
            )
            pulled.append(
                ModelInfo(model.name, model.native_path, size, "native", source, model.licence)
            )
    for repository, path, size, licence in huggingface.cached_repositories():
        format = "gguf" if repository.gguf else "huggingface"
        pulled.append(ModelInfo(str(repository), path, size, format, "Hugging Face", licence))
    absent = [
        ModelInfo(
            model.name,
            None,
            model.wheel_bytes,
            "native",
            f"{model.source} ({model.requirement})",
            model.licence,
        )
        for model in KNOWN_MODELS.values()
        if not model.native_path.is_dir()
    ]
    return sorted(pulled, key=lambda model: model.name) + absent


def _unknown(name: str) -> str:
    looks_like_path = name.endswith(".gguf") or name.startswith((".", "~", os.sep))
    if looks_like_path:
        return f"model={name!r}: no such file or folder; a model is {_FORMS}"
    pulled = [model.name for model in list_models() if model.path]
    names = list(KNOWN_MODELS) + [other for other in pulled if other not in KNOWN_MODELS]
    close = difflib.get_close_matches(name.lower(), names, n=1, cutoff=0.5)
    if name.count("/") == 1 and all(name.split("/")):
        hint = f" Did you mean 'hf:{name}'?"
    elif close:
        hint = f" Did you mean {close[0]!r}?"
    else:
        hint = ""
    return (
        f"model={name!r}: neither a known model nor an existing path.{hint} Known: "
        f"{', '.join(KNOWN_MODELS)}. Pulled: {', '.join(pulled) or 'none'} (in {cache_dir()} and "
        f"Hugging Face's cache). Otherwise pass {_FORMS}"
    )
