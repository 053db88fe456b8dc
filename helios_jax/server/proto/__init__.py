"""What do messages look like on the wire? `helios/v1/inference.proto`, and what protoc makes of it.

`helios_jax.server.proto.generate` writes `inference_pb2.py`, `inference_pb2.pyi` and
`inference_pb2_grpc.py`, which lie here so that nobody needs protoc to install.
"""

from pathlib import Path

# Import paths in protos begin here.
PROTO_ROOT = Path(__file__).parent
PROTO_FILE = "helios/v1/inference.proto"
SERVICE = "helios.v1.Inference"


def proto_text() -> str:
    """The proto file, for clients of other languages."""
    return (PROTO_ROOT / PROTO_FILE).read_text(encoding="utf-8")
