"""Does a client in another language, made from the proto alone, get the same tokens?"""

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from helios_jax.server.proto import PROTO_ROOT
from tests.server.test_calls import GREEDY, assert_idle

PACKAGES = ("@grpc/grpc-js@1.14.7", "@grpc/proto-loader@0.8.1")


@pytest.mark.slow
def test_node_streams(server, client, tmp_path):
    node, npm = shutil.which("node"), shutil.which("npm")
    if node is None or npm is None:
        pytest.skip("needs node and npm")
    install = [npm, "install", "--no-audit", "--no-fund", "--prefix", str(tmp_path), *PACKAGES]
    installed = subprocess.run(install, capture_output=True, text=True, timeout=300)
    assert installed.returncode == 0, installed.stderr
    done = subprocess.run(
        [node, str(Path(__file__).with_name("node_client.js")), server.address, str(PROTO_ROOT)],
        env=os.environ | {"NODE_PATH": str(tmp_path / "node_modules")},
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    wanted = client.generate("Hello", **GREEDY).outputs[0]
    assert found["token_ids"] == wanted.token_ids and found["text"] == wanted.text
    assert found["events"][0] == "started" and found["events"][-1] == "finished"
    assert found["finish_reason"] == "FINISH_REASON_LENGTH" and found["code"] == 0
    assert found["late"] == 4, "DEADLINE_EXCEEDED"
    assert_idle(client)
