"""How do requests look to the device: `Arrivals`, filled in on the host?"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from helios_jax.config import ModelConfig
from helios_jax.engine.requests import EngineRequest
from helios_jax.engine.state import Arrivals, EngineState, init_arrivals
from helios_jax.engine.variants import size_bucket
from helios_jax.sampling import MAX_NUMBER, SamplingParams, SamplingShapes, stack_sampling

# Requests that one admission calls off at most; more take several.
MAX_ABORTS = 8
_MIN_PROMPT_WIDTH = 64


def make_arrivals(
    state: EngineState,
    taken: Sequence[tuple[EngineRequest, int]],
    aborted: Sequence[int],
    number: int,
    *,
    shapes: SamplingShapes,
    model_config: ModelConfig,
    origin: float,
) -> Arrivals:
    """Arrivals of `number` places.

    Args:
      taken: outputs of requests that enter, (request, index), at most `number`.
      aborted: row ids that are called off, at most `MAX_ABORTS`.
      shapes: of the state's sampling parameters.
      origin: when the device's clock was 0, seconds on `time.monotonic`'s clock.
    """
    longest = max((len(request.prompt_token_ids) for request, _ in taken), default=1)
    width = size_bucket(longest, _MIN_PROMPT_WIDTH, 8, state.tokens_RS.shape[1])
    params = [request.rows[index].row.params for request, index in taken]
    params += [SamplingParams(temperature=0.0, seed=0)] * (number - len(taken))
    sampling = stack_sampling(
        params,
        vocab_size=model_config.vocab_size,
        eos_token_ids=model_config.eos_token_ids,
        shapes=shapes,
    )
    arrivals = init_arrivals(state, number, width, MAX_ABORTS, sampling)
    requests: Any = arrivals.requests
    for i, (request, index) in enumerate(taken):
        arrival = request.arrival_seconds - origin
        targets = request.targets
        requests.request_id_N[i] = request.row_ids[index]
        requests.num_prompt_N[i] = len(request.prompt_token_ids)
        requests.max_tokens_N[i] = params[i].max_tokens
        requests.priority_N[i] = targets.priority
        requests.arrival_time_N[i] = arrival
        for array, seconds in (
            (requests.deadline_N, targets.deadline_seconds),
            (requests.ttft_target_N, targets.ttft_target_seconds),
            (requests.tpot_target_N, targets.tpot_target_seconds),
        ):
            if seconds is not None:
                array[i] = min(seconds, MAX_NUMBER)
        requests.deadline_N[i] += arrival
        np.asarray(arrivals.tokens_NS)[i, : len(request.prompt_token_ids)] = (
            request.prompt_token_ids
        )
        # Their every position must be computed.
        np.asarray(arrivals.shares_prefix_N)[i] = params[i].prompt_logprobs is None
        np.asarray(arrivals.speculates_N)[i] = request.speculates
    np.asarray(arrivals.abort_ids_A)[: len(aborted)] = aborted
    return arrivals
