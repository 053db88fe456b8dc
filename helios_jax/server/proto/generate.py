"""What does protoc make of the proto? `python -m helios_jax.server.proto.generate` writes it here.

Needs grpcio-tools, which is in the extra `dev`.
"""

import tempfile
from pathlib import Path

from helios_jax.server.proto import PROTO_FILE, PROTO_ROOT

_PACKAGE = "helios_jax.server.proto"


def generate() -> dict[str, str]:
    """The text of each generated file, by name."""
    import grpc_tools
    from grpc_tools import protoc

    well_known = Path(grpc_tools.__file__).parent / "_proto"
    with tempfile.TemporaryDirectory() as folder:
        flags = [f"--{kind}_out={folder}" for kind in ("python", "pyi", "grpc_python")]
        status = protoc.main(["", f"-I{PROTO_ROOT}", f"-I{well_known}", *flags, PROTO_FILE])
        if status != 0:
            raise RuntimeError(f"protoc failed with status {status} on {PROTO_FILE}")
        written = (Path(folder) / PROTO_FILE).parent
        # Python's package is not the proto's.
        return {
            path.name: path.read_text().replace("from helios.v1 import", f"from {_PACKAGE} import")
            for path in sorted(written.iterdir())
        }


def main() -> None:
    for name, text in generate().items():
        (PROTO_ROOT / name).write_text(text)


if __name__ == "__main__":
    main()
