"""What is run for the report? Commands of `helios`, each in a process of its own, kept as JSON.

A part whose command and inputs are those of a file that is there is not
run again; so an interrupted report goes on where it stopped.
"""

import hashlib
import json
import math
import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from helios_jax import hub
from helios_jax.calibrate.record import circumstances
from helios_jax.config import require
from helios_jax.replay.generated import Arrivals, write_azure_csv
from helios_jax.replay.prompts import DEFAULT_TEXT, read_text

PARTS, INPUTS, ARGUMENTS = "parts", "inputs", "inputs.json"
# Of the article's time, 30 requests a minute of a thousand tokens.
_GENERATED = Arrivals()
# Some ten thousand tokens.
_CALIBRATION_CHARS = 40_000


@dataclass(frozen=True)
class Inputs:
    """What the parts are run on, as files under the report's folder.

    Attributes:
      trace, text, calibration: their paths relative to the folder; the last is the text's end,
        which nothing is measured on.
      draft: a draft model; None drafts by prompt lookup.
      model: of the measured parts. A local model or draft is a link under the folder.
      descriptions: one line each on where they come from.
    """

    trace: str
    text: str
    calibration: str
    draft: str | None
    model: str
    descriptions: tuple[str, ...]


@dataclass(frozen=True)
class Part:
    """A command.

    Attributes:
      name: of its file.
      arguments: of `helios`, without --json.
      is_measured: whether it takes times, so that a repetition differs.
      title: for people.
    """

    name: str
    arguments: tuple[str, ...]
    is_measured: bool
    title: str


def make_inputs(
    folder: Path,
    *,
    model: str,
    trace: Path | None = None,
    text: Path | None = None,
    draft: str | None = None,
    as_before: bool = False,
) -> Inputs:
    """Copies what was given into the folder, links local models, and makes what was not given.

    Args:
      as_before: there are parts that stay, so that these must be the inputs they were run on.

    Raises:
      ValueError: a file that is not there, or other inputs than before.
    """
    inputs = folder / INPUTS
    inputs.mkdir(parents=True, exist_ok=True)
    described = []
    for name, path in (("trace", trace), ("text", text)):
        require(path is None or path.is_file(), f"{name}={str(path)!r}: is no file")
    model = _linked(folder, "model", model)
    draft = None if draft is None else _linked(folder, "draft", draft)
    arguments = {
        "model": model,
        "trace": None if trace is None else f"{INPUTS}/{trace.name}",
        "text": None if text is None else f"{INPUTS}/{text.name}",
        "draft": draft,
    }
    kept = folder / ARGUMENTS
    before = json.loads(kept.read_text()) if as_before and kept.is_file() else arguments
    require(
        before == arguments,
        f"out={str(folder)!r}: holds parts of {before}, not of {arguments}; leave --part out, or "
        "name another folder",
    )
    kept.write_text(json.dumps(arguments, indent=1) + "\n")
    if trace is None:
        trace_path = inputs / "generated.csv"
        write_azure_csv(_GENERATED.draw(), trace_path)
        described.append(
            f"trace: {_GENERATED.num_requests} generated requests, {_GENERATED.rate:g} a second, "
            f"burstiness {_GENERATED.burstiness:g}, prompts of {_GENERATED.median_prompt:g} tokens "
            f"and outputs of {_GENERATED.median_output:g} in the median, seed {_GENERATED.seed}"
        )
    else:
        trace_path = inputs / trace.name
        if trace.resolve() != trace_path.resolve():
            shutil.copyfile(trace, trace_path)
        described.append(f"trace: {trace.name}")
    text_path = inputs / (text.name if text is not None else "reference.txt")
    content = read_text(text)
    text_path.write_text(content, encoding="utf-8")
    calibration_path = inputs / f"end_of_{text_path.name}"
    calibration_path.write_text(content[-_CALIBRATION_CHARS:], encoding="utf-8")
    described.append(f"text: {DEFAULT_TEXT if text is None else text.name}")
    described.append(f"model: {Path(model).name if _is_linked(model) else model}")
    described.append("draft: prompt lookup" if draft is None else f"draft: {Path(draft).name}")
    names = [f"{INPUTS}/{path.name}" for path in (trace_path, text_path, calibration_path)]
    return Inputs(*names, draft=draft, model=model, descriptions=tuple(described))


def kept_inputs(folder: Path) -> Inputs:
    """Those of the report that is there, made again where the files are not.

    Raises:
      ValueError: there is no report, or what it was given is gone.
    """
    path = folder / ARGUMENTS
    require(path.is_file(), f"out={str(folder)!r}: holds no report; make it without --check first")
    given = json.loads(path.read_text())

    def there(name: str) -> Path | None:
        return None if given[name] is None else folder / given[name]

    models = {}
    for name in ("model", "draft"):
        is_local = _is_linked(given[name])
        require(
            not is_local or (folder / given[name]).exists(),
            f"{name}={given[name]!r}: what it links to in {str(folder)!r} is gone; make the report "
            "anew, or put it back",
        )
        models[name] = str(folder / given[name]) if is_local else given[name]
    return make_inputs(folder, trace=there("trace"), text=there("text"), **models)


def kept_parts(folder: Path, names: list[str]) -> dict[str, dict[str, Any]]:
    """What `run_part` left there, in the order of the names."""
    paths = {name: folder / PARTS / f"{name}.json" for name in names}
    return {name: json.loads(path.read_text()) for name, path in paths.items() if path.is_file()}


def _linked(folder: Path, kind: str, name: str) -> str:
    """What the commands, which run in the folder, call a model: a local one is linked there."""
    path = Path(name).expanduser()
    if name in hub.KNOWN_MODELS or not path.exists():
        return name
    link = folder / INPUTS / kind / os.path.basename(os.path.abspath(path))
    if path.resolve() != link.resolve():
        link.parent.mkdir(parents=True, exist_ok=True)
        link.unlink(missing_ok=True)
        link.symlink_to(path.resolve())
    return f"{INPUTS}/{kind}/{link.name}"


def _is_linked(model: str | None) -> bool:
    """Whether `_linked` put it there."""
    return model is not None and model.startswith(f"{INPUTS}/")


def parts_of(inputs: Inputs, quick: bool) -> list[Part]:
    """The commands of a report."""
    return [
        *_counted(inputs),
        *_simulated(inputs, quick),
        _kv_precision(inputs, quick),
        *_replayed(inputs, quick),
    ]


def _counted(inputs: Inputs) -> list[Part]:
    """Bytes, of the model that is here and of the article's."""
    measured = {
        "profile": (("--context-tokens", "2048"), "bytes of a decode step, and its time"),
        "profile_batch": (
            ("--context-tokens", "512", "--batch-size", "8"), "the same of eight rows",
        ),
    }  # fmt: skip
    seven_b = {
        "bytes_mha16": ("llama-2-7b", 16, "bfloat16", "16-bit KV, 32 KV heads"),
        "bytes_gqa16": ("llama-2-7b-gqa", 4, "bfloat16", "16-bit KV, 8 KV heads"),
        "bytes_gqa8": ("llama-2-7b-gqa", 4, "fp8_e4m3", "8-bit KV, 8 KV heads"),
    }
    parts = [
        Part(name, ("profile", inputs.model, *options), True, title)
        for name, (options, title) in measured.items()
    ]
    for name, (model, bits, kv, title) in seven_b.items():
        options = ("--weight-bits", str(bits), "--kv-cache-dtype", kv, "--context-tokens", "2048")
        parts.append(
            Part(name, ("profile", model, *options), False, f"bytes of a 7B model, {title}")
        )
    return parts


def _simulated(inputs: Inputs, quick: bool) -> list[Part]:
    """A 7B model on one H100."""
    # As many users at once as the article's figures imply, some sixty.
    busy = ("simulate", inputs.trace, "--max-model-len", "10240", "--time-stretch", "0.05")

    def on_h100(model: str, weight_bits: int, kv: str, policy: str) -> tuple[str, ...]:
        return (
            *busy, "--model", model, "--weight-bits", str(weight_bits), "--kv-cache-dtype", kv,
            "--policy", policy,
        )  # fmt: skip

    grouped = ("llama-2-7b-gqa", 4, "fp8")
    drafting = ("--acceptance-rate", "0.75")
    ladder = {
        "16 bits, multi-head": on_h100("llama-2-7b", 16, "bfloat16", "fcfs"),
        "4-bit weights": on_h100("llama-2-7b", 4, "bfloat16", "fcfs"),
        "grouped queries, FP8 KV": on_h100(*grouped, "fcfs"),
        "speculation at 75%": (*on_h100(*grouped, "fcfs"), *drafting),
        "deadlines": (*on_h100(*grouped, "deadline"), *drafting),
    }
    parts = [
        Part(f"predicted_{number}", arguments, False, f"a 7B model on one H100: {title}")
        for number, (title, arguments) in enumerate(ladder.items())
    ]
    pressed = ("--kv-cache-bytes", "1.5e9", "--load", "0.8", "--load", "0.96")
    few = ("--num-requests", "60" if quick else "200", "--max-num-seqs", "32")
    return [
        *parts,
        Part(
            "pressure", (*on_h100(*grouped, "deadline"), *pressed), False,
            "preemption as admission pressure grows by a fifth",
        ),
        Part(
            "sweep", (*busy, "--sweep", *few, "--load", "0.5", "--load", "0.8", "--load", "1.1"),
            False, "the load at which targets are still met, by policy",
        ),
    ]  # fmt: skip


def _kv_precision(inputs: Inputs, quick: bool) -> Part:
    formats = ("bfloat16", "fp8_e4m3", "fp8_e5m2", "int8")
    options = [option for each in formats for option in ("--kv-cache-dtype", each)]
    return Part(
        "kv_precision",
        (
            "evaluate", inputs.model, "--text", f"reference={inputs.text}", *options,
            "--kv-calibration", inputs.calibration, "--dtype", "bfloat16",
            "--max-text-tokens", "513" if quick else "4097",
            "--context", "512" if quick else "4096",
        ),
        False, "what 8-bit keys and values cost the model",
    )  # fmt: skip


def _replayed(inputs: Inputs, quick: bool) -> list[Part]:
    """Traffic on the model that is here, scaled to what a CPU serves."""
    drafting = ("--draft", inputs.draft) if inputs.draft else ("--prompt-lookup", "4")
    size = (
        "--length-scale", "0.1" if quick else "0.12",
        "--max-model-len", "256" if quick else "512",
        "--max-num-seqs", "2" if quick else "4",
        "--max-num-batched-tokens", "128", "--text", inputs.text,
    )  # fmt: skip

    def traffic(sample: str, time_stretch: str) -> tuple[str, ...]:
        return ("--sample", sample, "--time-stretch", time_stretch)

    replay = ("replay", inputs.trace, inputs.model)
    all_of_it = traffic("0.06", "0.03") if quick else traffic("0.5", "0.25")
    some = traffic("0.04", "0.02") if quick else traffic("0.2", "0.1")
    # A part each, so that what is done of them is kept.
    parts = [
        Part(
            f"ladder_{number}",
            (*replay, "--ladder", "--row", str(number + 1), *drafting, *size, *all_of_it),
            True, f"the article's configuration {number + 1} of 5, replayed",
        )
        for number in range(5)
    ]  # fmt: skip
    for temperature in (1.0,) if quick else (0.1, 1.0):
        parts.append(
            Part(
                f"acceptance_{str(temperature).replace('.', '')}",
                (*replay, *drafting, *size, *some, "--temperature", str(temperature)),
                True, f"acceptance at temperature {temperature}",
            )
        )  # fmt: skip
    return parts


def run_part(
    part: Part, folder: Path, say: Callable[[str], Any] = lambda text: None
) -> dict[str, Any]:
    """Runs it, or takes what it gave before.

    Returns:
      schema 1: {name, title, key, is_measured, circumstances (with the command), seconds, result}.

    Raises:
      RuntimeError: the command failed; with what it wrote to standard error.
    """
    path = folder / PARTS / f"{part.name}.json"
    key = _key(part, folder)
    if path.is_file():
        kept = json.loads(path.read_text())
        if kept.get("key") == key:
            say(f"{part.name}: kept")
            return kept
    say(f"{part.name}: {part.title}")
    found = execute(part.arguments, folder)
    kept = {
        "schema": 1, "name": part.name, "title": part.title, "key": key,
        "is_measured": part.is_measured, "arguments": list(part.arguments), **found,
    }  # fmt: skip
    path.parent.mkdir(parents=True, exist_ok=True)
    # Whole or not at all.
    draft = path.with_suffix(".partial")
    draft.write_text(json.dumps(kept, indent=1) + "\n")
    draft.replace(path)
    return kept


def execute(arguments: tuple[str, ...] | list[str], folder: Path) -> dict[str, Any]:
    """{circumstances, seconds, result} of `helios` with these arguments, run in the folder."""
    (folder / PARTS).mkdir(parents=True, exist_ok=True)
    result = folder / PARTS / f"running.{os.getpid()}.json"
    command = [sys.executable, "-m", "helios_jax.cli.main", *arguments, "--json", result.name]
    command[-1] = f"{PARTS}/{result.name}"
    root = str(Path(__file__).parents[2])
    paths = [root, *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
    started = time.perf_counter()
    ended = subprocess.run(
        command, cwd=folder, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
        text=True, errors="replace",
    )  # fmt: skip
    seconds = time.perf_counter() - started
    if ended.returncode or not result.is_file():
        last = "\n".join(ended.stderr.splitlines()[-15:])
        raise RuntimeError(f"helios {shlex.join(arguments)}: code {ended.returncode}:\n{last}")
    found = json.loads(result.read_text())
    result.unlink()
    about = circumstances() | {"command": f"helios {shlex.join(arguments)}"}
    return {"circumstances": about, "seconds": seconds, "result": _shortened(found)}


def _shortened(found: Any) -> Any:
    """Without what names places of this machine, and lists of a figure per request."""
    if isinstance(found, dict):
        dropped = ("circumstances", "errors", "input_lens", "output_lens")
        return {key: _shortened(value) for key, value in found.items() if key not in dropped}
    if isinstance(found, list):
        return [_shortened(value) for value in found]
    if isinstance(found, float):
        # JSON has no infinity, which is what a request that was refused waits.
        return float(f"{found:.6g}") if math.isfinite(found) else None
    return found


def _key(part: Part, folder: Path) -> str:
    """Of the command and the contents of the files that it reads.

    A native checkpoint's manifest has sums of all it holds; of another folder, names, sizes and
    times of its files count.
    """
    digest = hashlib.sha256(json.dumps(part.arguments).encode())
    for argument in part.arguments:
        path = folder / argument.partition("=")[2] if "=" in argument else folder / argument
        if path.is_dir() and (path / "manifest.json").is_file():
            path = path / "manifest.json"
        if path.is_file():
            with path.open("rb") as file:
                while block := file.read(1 << 20):
                    digest.update(block)
        elif path.is_dir():
            for file in sorted(path.iterdir()):
                about = file.stat()
                digest.update(f"{file.name} {about.st_size} {about.st_mtime_ns}".encode())
    return digest.hexdigest()[:16]
