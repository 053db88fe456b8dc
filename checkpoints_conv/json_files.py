"""How the JSON files of a checkpoint are read: an object, or a ValueError that names the file."""

import json
from pathlib import Path
from typing import Any


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in `path`; a ValueError that names it where there is none."""
    try:
        value = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise ValueError(f"{path}: the file is missing") from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise ValueError(f"{path}: must hold a JSON object, not {type(value).__name__}")
    return value


def write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")
