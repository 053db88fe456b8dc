"""Real servers in processes of their own, and what their logs say."""

import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
# Few programs: one context, rounds of one and two rows.
LLM_OPTIONS: dict[str, Any] = dict(max_model_len=256, max_num_seqs=2, max_num_rows=8)


def environment(folder: Path) -> dict[str, str]:
    """Variables of a process that finds this code, and programs that others have compiled."""
    return {
        "PYTHONPATH": str(ROOT),
        # Beside the tests' own process a GPU has no room.
        "JAX_PLATFORMS": "cpu",
        "JAX_COMPILATION_CACHE_DIR": str(folder / "xla"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }


class Process:
    """A server process; its log is a file of JSON lines.

    Args:
      folder: for the log, and for compiled programs that servers of one test run share.
      command: what follows the Python interpreter.
      waits: whether to come back when it takes requests, and not as soon as it listens.
    """

    def __init__(self, folder: Path, command: list[str], waits: bool = True):
        self.log_path = folder / f"server{time.monotonic_ns()}.log"
        with open(self.log_path, "w") as log:
            self.process = subprocess.Popen(
                [sys.executable, *command], stderr=log, stdout=log, cwd=ROOT,
                env=os.environ | environment(folder),
            )  # fmt: skip
        listening = self.wait_for("listening")
        self.port, self.metrics_port = listening["port"], listening.get("metrics_port")
        self.address = f"127.0.0.1:{self.port}"
        if waits:
            self.wait_for("ready")

    def lines(self) -> list[dict[str, Any]]:
        """What was logged so far, but for what gRPC's core says of handshakes."""
        lines = self.log_path.read_text().splitlines(keepends=True)
        whole = [line for line in lines if line.endswith("\n")]
        return [json.loads(line) for line in whole if "ssl_transport_security" not in line]

    def calls(self, **wanted: Any) -> list[dict[str, Any]]:
        """The calls that ended, with these fields."""
        return [
            line
            for line in self.lines()
            if line["message"] == "call" and wanted.items() <= line.items()
        ]

    def wait_for(self, message: str, seconds: float = 120) -> dict[str, Any]:
        """The first line with this message."""
        ends = time.monotonic() + seconds
        while time.monotonic() < ends:
            for line in self.lines():
                if line["message"] == message:
                    return line
            if self.process.poll() is not None:
                break
            time.sleep(0.02)
        raise AssertionError(f"no {message!r} in the log: {self.log_path.read_text()[-3000:]}")

    def metrics(self) -> dict[str, float]:
        """Prometheus' samples, by name and labels as they are written."""
        url = f"http://127.0.0.1:{self.metrics_port}/metrics"
        with urllib.request.urlopen(url, timeout=10) as response:
            text = response.read().decode()
        return {
            name: float(value)
            for name, value in re.findall(r"^([^#\s]\S*(?:\{[^}]*\})?) (\S+)$", text, re.M)
        }

    @property
    def memory_bytes(self) -> int:
        """What the process has allocated, also what the machine has put aside since."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        found = re.findall(r"^(?:RssAnon|VmSwap):\s+(\d+) kB", status, re.M)
        assert len(found) == 2
        return sum(map(int, found)) << 10

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def stop(self, seconds: float = 30) -> int:
        """SIGTERM, and the exit code."""
        if self.process.poll() is None:
            self.signal(signal.SIGTERM)
        return self.process.wait(seconds)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


class Server(Process):
    """On the tiny model.

    Args:
      llm, server: see `tiny_server`.
    """

    def __init__(
        self, folder: Path, llm: dict[str, Any] | None = None, waits: bool = True, **server: Any
    ):
        job = {"llm": LLM_OPTIONS | (llm or {}), "server": server}
        super().__init__(folder, ["-m", "tests.server.tiny_server", json.dumps(job)], waits)
