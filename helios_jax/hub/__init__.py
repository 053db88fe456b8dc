"""Where models come from: a known name, Hugging Face or a local path -> a path that loads.

    resolve("smollm2-135m")                 the embedded model, pulled on first use
    resolve("hf:org/name@revision")         a Hugging Face repository (or hf:org/name/file.gguf)
    resolve_draft("default")                the draft that is shipped for the embedded model
    resolve("./folder"), resolve("m.gguf")  a Hugging Face folder, a native checkpoint, a GGUF file

Pulled models live under `cache_dir()` (Hugging Face's under its own cache). A pull is atomic: a
killed one leaves nothing that a later run would take for a model. Failures to fetch are
`PullError`; a name or path that cannot be meant is a ValueError. Both messages say what to do.
"""

from helios_jax.hub.embedded import KNOWN_MODELS, EmbeddedModel, fetch_gguf
from helios_jax.hub.names import ModelInfo, list_models, pull, resolve, resolve_draft
from helios_jax.hub.progress import Progress, no_progress
from helios_jax.hub.storage import PullError, cache_dir

__all__ = [
    "KNOWN_MODELS",
    "EmbeddedModel",
    "ModelInfo",
    "Progress",
    "PullError",
    "cache_dir",
    "fetch_gguf",
    "list_models",
    "no_progress",
    "pull",
    "resolve",
    "resolve_draft",
]
