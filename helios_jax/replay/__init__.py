"""How would the scheduler have served recorded traffic?"""

from helios_jax.replay.simulate import Outcome, Targets, simulate, summarize
from helios_jax.replay.traces import Trace, read_azure_csv

__all__ = ["Outcome", "Targets", "Trace", "read_azure_csv", "simulate", "summarize"]
