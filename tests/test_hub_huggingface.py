"""Does the real Hugging Face client bring a repository here, and say clearly why it cannot?"""

import http.server
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import huggingface_hub.constants
import pytest

from helios_jax import hub
from helios_jax.hub import huggingface

COMMITS = {"main": "a" * 40, "v1": "b" * 40}
CONFIG = json.dumps({"model_type": "llama"}).encode()
SHARDS = json.dumps({"weight_map": {"x": "model-1.safetensors", "y": "model-2.safetensors"}})
CARD = b"---\nlicense: mit\n---\n# tiny\n"
WEIGHTS = {"model-1.safetensors": b"1" * 3_000_000, "model-2.safetensors": b"2" * 500}
REPOSITORIES = {
    "org/tiny": {
        "config.json": CONFIG,
        "model.safetensors.index.json": SHARDS.encode(),
        **WEIGHTS,
        "tokenizer.json": b"{}",
        "chat_template.jinja": b"{{ messages }}",
        "README.md": CARD,
        "pytorch_model.bin": b"not wanted",
        "consolidated.safetensors": b"not wanted",
        "onnx/config.json": b"not wanted",
    },
    "org/ggufs": {"small.gguf": b"GGUF small", "q/large.gguf": b"GGUF large", "README.md": CARD},
    "org/torch": {"config.json": CONFIG, "pytorch_model.bin": b"x"},
    "org/gated": {"config.json": CONFIG},
}


class Hub(http.server.BaseHTTPRequestHandler):
    """The part of the hub's API that downloads use."""

    protocol_version = "HTTP/1.1"
    requests: list[str] = []
    seconds_per_write = 0.0

    def log_message(self, format, *args):
        self.requests.append(self.requestline)

    def do_HEAD(self):
        self.do_GET()

    def do_GET(self):
        parts = self.path.partition("?")[0].strip("/").split("/")
        if parts[:2] == ["api", "models"]:
            self.answer_api("/".join(parts[2:4]), *parts[4:6])
        else:
            self.answer_file("/".join(parts[:2]), parts[3], "/".join(parts[4:]))

    def answer_api(self, repo, question="revision", revision="main"):
        if repo not in REPOSITORIES:
            return self.refuse(404, "RepoNotFound")
        commit = COMMITS.get(revision, revision)
        if commit not in COMMITS.values():
            return self.refuse(404, "RevisionNotFound")
        files = REPOSITORIES[repo]
        if question == "tree":
            return self.send_json(
                [
                    {"type": "file", "path": path, "size": len(data), "oid": "c" * 40}
                    for path, data in files.items()
                ]
            )
        siblings = [{"rfilename": path} for path in files]
        return self.send_json({"_id": "1", "id": repo, "sha": commit, "siblings": siblings})

    def answer_file(self, repo: str, revision: str, path: str):
        if repo == "org/gated":
            return self.refuse(403, "GatedRepo")
        if path not in REPOSITORIES.get(repo, {}):
            return self.refuse(404, "EntryNotFound")
        commit = COMMITS.get(revision) or revision
        self.send(REPOSITORIES[repo][path], headers={"ETag": f'"{path}"', "X-Repo-Commit": commit})

    def refuse(self, status: int, code: str):
        self.send(b"", status, {"X-Error-Code": code, "X-Error-Message": code})

    def send_json(self, value):
        self.send(json.dumps(value).encode(), headers={"Content-Type": "application/json"})

    def send(self, body: bytes, status: int = 200, headers: dict[str, str] | None = None):
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "GET":
            for start in range(0, len(body), 100_000):
                self.wfile.write(body[start : start + 100_000])
                time.sleep(self.seconds_per_write)


class Server(http.server.ThreadingHTTPServer):
    def handle_error(self, request, client_address):
        """Nothing: a client that was interrupted left in the middle of an answer."""


@pytest.fixture(scope="module")
def server():
    with Server(("127.0.0.1", 0), Hub) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()


@pytest.fixture
def endpoint(server, tmp_path, monkeypatch):
    use_endpoint(monkeypatch, server)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hf"))
    monkeypatch.setenv("HELIOS_CACHE", str(tmp_path / "helios"))
    Hub.requests.clear()
    return server


def use_endpoint(monkeypatch, url):
    constants = huggingface_hub.constants
    template = constants.HUGGINGFACE_CO_URL_TEMPLATE.replace(constants.ENDPOINT, url)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(constants, "ENDPOINT", url)


@pytest.mark.parametrize(
    "model, parsed",
    [
        ("hf:org/name", ("org/name", None, None)),
        ("hf:org/name@v1", ("org/name", None, "v1")),
        ("hf:org/name@refs/pr/1", ("org/name", None, "refs/pr/1")),
        ("hf:org/name/file.gguf", ("org/name", "file.gguf", None)),
        ("hf:org/name/sub/file.gguf@v1", ("org/name", "sub/file.gguf", "v1")),
    ],
)
def test_names(model, parsed):
    repository = huggingface.Repository.parse(model)
    assert (repository.repo_id, repository.gguf, repository.revision) == parsed
    assert str(repository) == model


@pytest.mark.parametrize(
    "model", ["hf:", "hf:name", "hf:org/", "hf:/name", "hf:org/name/file.bin", "hf:org/name@"]
)
def test_names_of_no_known_form(model):
    with pytest.raises(ValueError, match="must be hf:org/name"):
        hub.resolve(model, hub.no_progress)


def test_a_repository_is_fetched_once_and_listed(endpoint):
    seen = []
    path = hub.resolve("hf:org/tiny", lambda *report: seen.append(report))
    assert {file.name for file in path.iterdir()} == {
        "config.json",
        "model.safetensors.index.json",
        *WEIGHTS,
        "tokenizer.json",
        "chat_template.jinja",
        "README.md",
    }
    assert all((path / name).read_bytes() == data for name, data in WEIGHTS.items())
    assert {stage for stage, _, _ in seen} == {"downloading"}
    assert seen[-1][1] > 3_000_000
    Hub.requests.clear()
    assert hub.resolve("hf:org/tiny", hub.no_progress) == path
    assert Hub.requests == []
    [info] = [model for model in hub.list_models() if model.path]
    assert (info.name, info.path, info.format) == ("hf:org/tiny", path, "huggingface")
    assert info.licence == "mit" and info.size_bytes > 3_000_000


def test_force_fetches_again(endpoint):
    path = hub.pull("hf:org/tiny", hub.no_progress)
    damaged = path / "model-2.safetensors"
    damaged.resolve().write_bytes(b"?")
    assert (hub.pull("hf:org/tiny", hub.no_progress) / damaged.name).read_bytes() == b"?"
    hub.pull("hf:org/tiny", hub.no_progress, force=True)
    assert damaged.read_bytes() == WEIGHTS[damaged.name]


def test_a_revision(endpoint):
    path = hub.resolve("hf:org/tiny@v1", hub.no_progress)
    assert path.name == COMMITS["v1"]
    assert [model.name for model in hub.list_models() if model.path] == ["hf:org/tiny@v1"]
    assert hub.resolve("hf:org/tiny", hub.no_progress).name == COMMITS["main"]


@pytest.mark.parametrize("file", ["small.gguf", "q/large.gguf"])
def test_one_gguf_file(endpoint, file):
    path = hub.pull(f"hf:org/ggufs/{file}", hub.no_progress)
    assert path.read_bytes() == REPOSITORIES["org/ggufs"][file]
    assert hub.resolve(f"hf:org/ggufs/{file}", hub.no_progress) == path
    [info] = [model for model in hub.list_models() if model.path]
    assert (info.name, info.format) == (f"hf:org/ggufs/{file}", "gguf")


def test_an_incomplete_copy_is_completed(endpoint):
    path = hub.resolve("hf:org/tiny", hub.no_progress)
    (path / "model-2.safetensors").unlink()
    assert [model for model in hub.list_models() if model.path] == []
    assert hub.resolve("hf:org/tiny", hub.no_progress) == path
    assert (path / "model-2.safetensors").read_bytes() == WEIGHTS["model-2.safetensors"]


def test_an_interrupted_download_is_no_model(endpoint):
    def interrupt(stage, done, total):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        hub.pull("hf:org/tiny", interrupt)
    repository = huggingface.Repository.parse("hf:org/tiny")
    assert huggingface.cached_path(repository) is None
    assert [model for model in hub.list_models() if model.path] == []


@pytest.mark.parametrize(
    "model, kind, message",
    [
        ("hf:org/nowhere", hub.PullError, "has no such repository, or it is private"),
        ("hf:org/tiny@v9", hub.PullError, "no revision 'v9'"),
        ("hf:org/gated", hub.PullError, "accept its licence"),
        ("hf:org/ggufs", ValueError, "hf:org/ggufs/small.gguf, hf:org/ggufs/q/large.gguf"),
        ("hf:org/ggufs/none.gguf", ValueError, "has no none.gguf; its GGUF files are hf:org/"),
        ("hf:org/torch", ValueError, "has no model.safetensors.*choose a repository with"),
        ("hf:org/na--me..", ValueError, "hf:org/na--me.."),
    ],
)
def test_what_cannot_be_fetched(endpoint, model, kind, message):
    with pytest.raises(kind, match=message):
        hub.resolve(model, hub.no_progress)


def test_no_network(endpoint, monkeypatch):
    cached = hub.pull("hf:org/tiny", hub.no_progress)
    use_endpoint(monkeypatch, "http://127.0.0.1:9")  # discard: refuses
    assert hub.resolve("hf:org/tiny", hub.no_progress) == cached
    with pytest.raises(hub.PullError, match="cannot reach http://127.0.0.1:9 .*HF_ENDPOINT"):
        hub.resolve("hf:org/tiny@v1", hub.no_progress)


def pull_in_a_process(server, tmp_path) -> subprocess.Popen:
    # The client asks about progress once per chunk, of 10 MB: too coarse for a small test.
    command = (
        "import huggingface_hub.constants as constants; constants.DOWNLOAD_CHUNK_SIZE = 100_000; "
        "from helios_jax.cli.main import main; main(['pull', 'hf:org/tiny'])"
    )
    environment = os.environ | {"HF_ENDPOINT": server, "HF_HOME": str(tmp_path / "home")}
    environment |= {"PYTHONPATH": str(Path(__file__).parent.parent)}
    environment.pop("HF_HUB_CACHE", None)
    return subprocess.Popen(
        [sys.executable, "-W", "error", "-c", command],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.skipif(os.name != "posix", reason="signals")
def test_ctrl_c_does_not_wait_for_the_download(server, tmp_path, monkeypatch):
    monkeypatch.setattr(Hub, "seconds_per_write", 0.5)  # 15 s for the larger file
    with pull_in_a_process(server, tmp_path) as process:
        deadline = time.monotonic() + 20
        while not list(tmp_path.rglob("*.incomplete")):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        time.sleep(0.3)
        interrupted = time.monotonic()
        process.send_signal(signal.SIGINT)
        assert process.communicate(timeout=20) == ("", "")
    assert process.returncode == 130
    assert time.monotonic() - interrupted < 5


def test_the_environment_chooses_endpoint_and_cache(server, tmp_path):
    with pull_in_a_process(server, tmp_path) as process:
        out, err = process.communicate()
    assert process.returncode == 0, err
    assert Path(out.strip()).is_relative_to(tmp_path / "home")
    assert err.startswith("downloading: 3.0 MB")
