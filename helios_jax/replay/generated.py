"""What traffic stands in where there is no trace? Seeded arrivals of a given burstiness."""

import csv
import datetime
import os
from dataclasses import dataclass

import numpy as np

from helios_jax.config import require
from helios_jax.replay.traces import Trace

_EPOCH = datetime.datetime(2000, 1, 1)


@dataclass(frozen=True)
class Arrivals:
    """A generator's options.

    Attributes:
      num_requests: how many.
      rate: of them, a second, on average.
      burstiness: shape of the gamma distribution of the gaps, as in vLLM's benchmark: 1 is Poisson,
        below is burstier (the gaps' coefficient of variation is its square root's inverse).
      median_prompt, median_output: tokens; lengths are log-normal.
      sigma_prompt, sigma_output: of their logarithms.
      seed: of all of it.
    """

    num_requests: int = 300
    rate: float = 0.5
    burstiness: float = 0.5
    median_prompt: float = 1000
    median_output: float = 130
    sigma_prompt: float = 0.9
    sigma_output: float = 0.9
    seed: int = 0

    def __post_init__(self):
        for name in ("num_requests", "rate", "burstiness", "median_prompt", "median_output"):
            value = getattr(self, name)
            require(value > 0, f"{name}={value}: must be above 0")
        for name in ("sigma_prompt", "sigma_output"):
            value = getattr(self, name)
            require(value >= 0, f"{name}={value}: must be 0 or more")

    def draw(self) -> Trace:
        """The requests; the same options draw the same ones."""
        rng = np.random.default_rng(self.seed)
        shape, number = self.burstiness, self.num_requests
        gaps = rng.gamma(shape, 1 / (self.rate * shape), number)

        def lengths(median: float, sigma: float) -> np.ndarray:
            drawn = np.exp(rng.normal(np.log(median), sigma, number))
            return np.maximum(np.round(drawn), 1).astype(np.int32)

        times = np.cumsum(gaps)
        return Trace(
            arrival_seconds=times - times[0],
            num_prompt=lengths(self.median_prompt, self.sigma_prompt),
            num_output=lengths(self.median_output, self.sigma_output),
        )


def write_azure_csv(trace: Trace, path: str | os.PathLike) -> None:
    """Writes arrivals and lengths as `read_azure_csv` reads them, to a microsecond."""
    with open(path, "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(("TIMESTAMP", "ContextTokens", "GeneratedTokens"))
        for seconds, prompt, output in zip(
            trace.arrival_seconds.tolist(), trace.num_prompt.tolist(), trace.num_output.tolist(),
            strict=True,
        ):  # fmt: skip
            moment = _EPOCH + datetime.timedelta(seconds=seconds)
            writer.writerow((moment.isoformat(sep=" ", timespec="microseconds"), prompt, output))
