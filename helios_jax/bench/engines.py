"""Which engines can be measured, and how is a process of one run?"""

import json
import subprocess
import sys
import tempfile
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from helios_jax import hub
from helios_jax.hub.names import local_format

_FOLDER = Path(__file__).parent


@dataclass(frozen=True)
class Peer:
    """Another engine.

    Attributes:
      worker: the file that measures it.
      modules: what its interpreter must have.
      formats: of the checkpoints it reads, see `local_format`.
    """

    worker: Path
    modules: tuple[str, ...]
    formats: tuple[str, ...]


PEERS = {
    "transformers": Peer(
        _FOLDER / "transformers_worker.py",
        ("torch", "transformers", "accelerate", "gguf"),
        ("gguf", "huggingface"),
    ),
    "llama.cpp": Peer(_FOLDER / "llama_cpp_worker.py", ("xllamacpp",), ("gguf",)),
}


def check_peer(name: str, interpreter: str) -> None:
    """ValueError if there is no such peer, or the interpreter lacks what it needs."""
    if name not in PEERS:
        raise ValueError(f"against={name!r}: must be one of {', '.join(PEERS)}")
    modules = PEERS[name].modules
    find = "import importlib.util, sys; print(*filter(lambda m: not importlib.util.find_spec(m), "
    try:
        found = subprocess.run(
            [interpreter, "-P", "-c", find + "sys.argv[1:]))", *modules],
            capture_output=True,
            text=True,
        )
    except OSError as error:
        raise ValueError(
            f"peer_python={interpreter!r}: cannot be run ({error.strerror}); name a Python "
            "interpreter, 3.11 or newer"
        ) from error
    if found.returncode:
        raise ValueError(
            f"peer_python={interpreter!r}: is no Python 3.11 or newer: {found.stderr.strip()}"
        )
    missing = found.stdout.split()
    if missing:
        raise ValueError(
            f"against={name!r}: {interpreter} lacks {', '.join(missing)}; "
            "pip install 'helios-jax[bench]', or name another interpreter with --peer-python"
        )


def peer_checkpoint(name: str, model: str) -> Path:
    """The file or folder with `model`'s weights that the peer reads: of a known model its GGUF."""
    path = hub.fetch_gguf(model) if model in hub.KNOWN_MODELS else hub.resolve(model)
    found, formats = local_format(path), PEERS[name].formats
    if found not in formats:
        raise ValueError(
            f"against={name!r}: reads {' or '.join(formats)}, and {path} is {found}; "
            "measure the checkpoint that it was converted from"
        )
    return path


def run_helios(job: Mapping[str, Any]) -> dict[str, Any]:
    """What `helios_worker.measure` returns, from a new process."""
    return run_worker([sys.executable, "-m", "helios_jax.bench.helios_worker"], job)


def run_peer(name: str, interpreter: str, job: Mapping[str, Any]) -> dict[str, Any]:
    """What the peer's `measure` returns, from a new process."""
    # -P: this folder must not come before the peer's own packages.
    return run_worker([interpreter, "-P", str(PEERS[name].worker)], job)


def run_worker(
    command: list[str],
    job: Mapping[str, Any],
    progress: Callable[[str], None] = lambda line: None,
) -> dict[str, Any]:
    """Runs `command JOB RESULT` on files, since engines print to standard output.

    Args:
      progress: told every line of its standard error.

    Raises:
      RuntimeError: it failed; with the end of what it wrote to standard error.
    """
    with tempfile.TemporaryDirectory() as folder:
        job_path, result_path = Path(folder, "job.json"), Path(folder, "result.json")
        job_path.write_text(json.dumps(job))
        last_lines: deque[str] = deque(maxlen=15)
        with subprocess.Popen(
            [*command, str(job_path), str(result_path)],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
        ) as process:
            assert process.stderr is not None, "it is a pipe"
            for line in process.stderr:
                last_lines.append(line.rstrip())
                progress(last_lines[-1])
        if process.returncode or not result_path.exists():
            raise RuntimeError(
                f"{' '.join(command)} ended with code {process.returncode}:\n"
                + "\n".join(last_lines)
            )
        return json.loads(result_path.read_text())
