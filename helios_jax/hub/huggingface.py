"""How does a Hugging Face repository become a local path?

The client is huggingface_hub, with its own cache, token, endpoint (`HF_ENDPOINT`) and offline
switch. Only what a checkpoint consists of is fetched. A repository that is there in full is used
without asking the network, so a model stays the same until it is pulled again.
"""

import json
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from helios_jax.hub.progress import Progress, shown
from helios_jax.hub.storage import PullError, explained_os_errors

PREFIX = "hf:"
# README.md carries the licence.
_ALLOW = ["*.json", "*.safetensors", "tokenizer.model", "*.jinja", "README.md"]
# Subfolders hold other formats; consolidated* is a second copy of the weights.
_IGNORE = ["*/*", "consolidated*"]


@dataclass(frozen=True)
class Repository:
    """What `hf:org/name[/file.gguf][@revision]` names.

    Attributes:
      repo_id: "org/name".
      gguf: the one file wanted, a path inside the repository, or None for a folder of safetensors.
      revision: branch, tag or commit; None for the default branch.
    """

    repo_id: str
    gguf: str | None = None
    revision: str | None = None

    @classmethod
    def parse(cls, model: str) -> "Repository":
        """Raises ValueError where `model` does not have that form."""
        path, _, revision = model.removeprefix(PREFIX).partition("@")
        parts = path.split("/")
        wrong_file = len(parts) > 2 and not path.endswith(".gguf")
        if len(parts) < 2 or not all(parts) or wrong_file or model.endswith("@"):
            raise ValueError(
                f"model={model!r}: must be hf:org/name, hf:org/name@revision or "
                "hf:org/name/file.gguf"
            )
        return cls("/".join(parts[:2]), "/".join(parts[2:]) or None, revision or None)

    def __str__(self) -> str:
        file = f"/{self.gguf}" if self.gguf else ""
        return f"{PREFIX}{self.repo_id}{file}" + (f"@{self.revision}" if self.revision else "")


def cached_path(repository: Repository) -> Path | None:
    """The local copy if it is there in full; never touches the network."""
    from huggingface_hub import try_to_load_from_cache

    with _explained(repository):
        found = try_to_load_from_cache(
            repository.repo_id, repository.gguf or "config.json", revision=repository.revision
        )
    if not isinstance(found, str):
        return None
    if repository.gguf:
        return Path(found)
    folder = Path(found).parent
    return None if missing_files(folder) else folder


def pull_repository(
    repository: Repository, progress: Progress | None = None, force: bool = False
) -> Path:
    """Fetches what changed since the last pull, or all; returns the folder, or the GGUF file.

    Raises:
      PullError: no network, no such repository or revision, no access, no space.
      ValueError: the repository holds no checkpoint that can be loaded.
    """
    from huggingface_hub import constants, snapshot_download

    store = explained_os_errors(str(repository), Path(constants.HF_HUB_CACHE), "HF_HOME")
    with shown(progress) as show, store, _explained(repository):
        cancelled = threading.Event()
        folder = _interruptible(
            lambda: snapshot_download(
                repository.repo_id,
                revision=repository.revision,
                allow_patterns=[repository.gguf] if repository.gguf else _ALLOW,
                ignore_patterns=None if repository.gguf else _IGNORE,
                force_download=force,
                tqdm_class=_reporting_tqdm(show, cancelled),
            ),
            cancelled,
        )
        path = folder / repository.gguf if repository.gguf else folder
        missing = missing_files(folder) if repository.gguf is None else []
        if missing or not path.exists():
            raise ValueError(_nothing_to_load(repository, missing))
    return path


def missing_files(folder: Path) -> list[str]:
    """What a Hugging Face folder lacks to be a checkpoint: [] when it is one."""
    missing = [] if (folder / "config.json").is_file() else ["config.json"]
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        try:
            wanted = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        except (ValueError, LookupError, TypeError, AttributeError):
            return [*missing, f"a readable {index.name}"]
    else:
        wanted = ["model.safetensors"]
    return missing + [name for name in wanted if not (folder / name).is_file()]


def cached_repositories() -> Iterator[tuple[Repository, Path, int, str | None]]:
    """(name, path, bytes, licence) of what Hugging Face's cache holds that can be loaded."""
    from huggingface_hub import constants, scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    try:
        cache = scan_cache_dir(constants.HF_HUB_CACHE)
    except CacheNotFound:
        return
    for repo in cache.repos:
        if repo.repo_type != "model":
            continue
        for snapshot in repo.revisions:
            refs = sorted(snapshot.refs)
            revision = None if "main" in refs else (refs or [snapshot.commit_hash])[0]
            folder = snapshot.snapshot_path
            if _is_supported(folder) and not missing_files(folder):
                name = Repository(repo.repo_id, None, revision)
                yield name, folder, snapshot.size_on_disk, _licence(folder)
            for file in snapshot.files:
                if file.file_name.endswith(".gguf"):
                    inside = file.file_path.relative_to(folder).as_posix()
                    name = Repository(repo.repo_id, inside, revision)
                    yield name, file.file_path, file.size_on_disk, _licence(folder)


def _is_supported(folder: Path) -> bool:
    from helios_jax.config import ARCHITECTURES

    try:
        return json.loads((folder / "config.json").read_text()).get("model_type") in ARCHITECTURES
    except (OSError, ValueError):
        return False


def _licence(folder: Path) -> str | None:
    from huggingface_hub import ModelCard

    try:
        return ModelCard.load(folder / "README.md").data.to_dict().get("license")
    except (OSError, ValueError):
        return None


def _nothing_to_load(repository: Repository, missing: list[str]) -> str:
    from huggingface_hub import HfApi

    names = HfApi().list_repo_files(repository.repo_id, revision=repository.revision)
    ggufs = [name for name in names if name.endswith(".gguf")]
    if repository.gguf:
        problem = f"has no {repository.gguf}"
    else:
        problem = f"has no {', '.join(missing)}, so it is not a safetensors checkpoint"
    if ggufs:
        remedy = "its GGUF files are " + ", ".join(
            str(Repository(repository.repo_id, name, repository.revision)) for name in ggufs
        )
    else:
        remedy = "choose a repository with config.json and safetensors, or with a GGUF file"
    return f"model={str(repository)!r}: the repository {problem}; {remedy}"


class _explained:
    """Turns what huggingface_hub raises into errors that name the repository and a remedy."""

    def __init__(self, repository: Repository):
        self.repository = repository

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind, error, traceback) -> None:
        if not isinstance(error, Exception):
            return
        from huggingface_hub import constants, errors

        name, endpoint = str(self.repository), constants.ENDPOINT
        if isinstance(error, errors.HFValidationError):
            raise ValueError(f"model={name!r}: {error}") from error
        if isinstance(error, errors.GatedRepoError):
            message = f"access to {name} is restricted: accept its licence on {endpoint}"
            message += " and log in with `hf auth login`, or set HF_TOKEN"
        elif isinstance(error, errors.RepositoryNotFoundError):
            message = f"{name}: {endpoint} has no such repository, or it is private; check the"
            message += " spelling, or log in with `hf auth login` or HF_TOKEN"
        elif isinstance(error, errors.RevisionNotFoundError):
            message = f"{name}: the repository has no revision {self.repository.revision!r}"
        elif _is_about_network(error):
            message = f"cannot reach {endpoint} to pull {name}, and it is not cached in full:"
            message += f" {_first_line(error)}. Check the network, HF_ENDPOINT and HF_HUB_OFFLINE"
        else:
            return
        raise PullError(message) from error


def _is_about_network(error: Exception) -> bool:
    from huggingface_hub import errors

    # huggingface_hub 0.x uses requests, 1.x httpx and 2.x httpx2; only requests' are OSErrors.
    http_client = type(error).__module__.partition(".")[0] in ("requests", "httpx", "httpx2")
    known = (errors.LocalEntryNotFoundError, errors.HfHubHTTPError, errors.OfflineModeIsEnabled)
    return http_client or isinstance(error, (*known, ConnectionError, TimeoutError))


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0] or type(error).__name__


def _interruptible(download: Callable[[], str], cancelled: threading.Event) -> Path:
    """Runs `download` beside this thread, so that Ctrl-C need not wait for it to finish.

    The client downloads in threads of its own and, interrupted, waits for every one of them: for
    gigabytes. They all report progress, every 10 MB or so, and that is where `cancelled` ends them.
    """
    with ThreadPoolExecutor(max_workers=1) as pool:
        future = pool.submit(download)
        try:
            return Path(future.result())
        except BaseException:
            cancelled.set()
            raise


def _reporting_tqdm(progress: Progress, cancelled: threading.Event) -> type:
    """A tqdm class that draws nothing, reports the bytes it hears of, and raises if cancelled."""
    from tqdm.auto import tqdm

    class Reporting(tqdm):
        def __init__(self, *args, **kwargs):
            kwargs.pop("name", None)  # huggingface_hub's own; tqdm refuses it
            self._counts_bytes = kwargs.get("unit") == "B"
            super().__init__(*args, **kwargs | {"disable": False, "delay": float("inf")})

        def display(self, *args, **kwargs) -> None:
            return None

        def update(self, n: float | None = 1) -> bool | None:
            if cancelled.is_set():
                raise InterruptedError("the download was cancelled")
            done = super().update(n)
            if self._counts_bytes and self.total:
                progress("downloading", int(self.n), int(self.total))
            return done

    return Reporting
