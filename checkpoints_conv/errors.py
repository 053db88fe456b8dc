"""How an error comes to name the file that it is about, once."""

from pathlib import Path


def about(path: Path, error: Exception) -> ValueError:
    """A ValueError of the same text with `path` in front, unless the text names it already."""
    text = str(error)
    return ValueError(text if str(path) in text else f"{path}: {text}")
