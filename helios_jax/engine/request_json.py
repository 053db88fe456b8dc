"""How are requests in flight written as JSON, and made from it again?

Times are relative: an arrival to the origin of the device's clock, what the host measures to the
moment of writing (ages), so that clocks go on where they stopped.
"""

import dataclasses
from typing import Any

from helios_jax.config import require
from helios_jax.engine.requests import EngineRequest, Targets, start_row
from helios_jax.engine.row_progress import Row, RowProgress
from helios_jax.outputs import Logprob, PositionLogprobs
from helios_jax.sampling import SamplingParams
from helios_jax.tokenizer import Tokenizer

Json = dict[str, Any]

_PARAMS = {field.name: field.default for field in dataclasses.fields(SamplingParams)}
_TARGETS = {field.name: field.default for field in dataclasses.fields(Targets)}


def request_to_json(request: EngineRequest, origin: float) -> Json:
    """A request as it was submitted.

    Its outputs differ in their seeds only; parameters and targets that are defaults are left out.

    Args:
      origin: of the device's clock, on `time.monotonic`'s.
    """
    params = [row.row.params for row in request.rows]
    return {
        "request_id": request.request_id,
        "row_ids": request.row_ids,
        "prompt_token_ids": list(request.prompt_token_ids),
        "arrival_seconds": request.arrival_seconds - origin,
        "sampling": _params_to_json(params[0]),
        "seeds": [each.seed for each in params],
        "targets": {
            name: getattr(request.targets, name)
            for name, default in _TARGETS.items()
            if getattr(request.targets, name) != default
        },
        "is_streamed": request.is_streamed,
        "speculates": request.speculates,
    }


def request_from_json(
    fields: Json, tokenizer: Tokenizer, eos_token_ids: tuple[int, ...], origin: float
) -> EngineRequest:
    """The inverse; nobody waits for it, and nothing of its outputs is known.

    Raises:
      KeyError, TypeError, ValueError: `fields` are not what `request_to_json` gives.
    """
    ids = [int(token) for token in fields["prompt_token_ids"]]
    sampling = _params_from_json(fields["sampling"])
    rows = [
        start_row(Row(ids, dataclasses.replace(sampling, seed=seed)), tokenizer, eos_token_ids)
        for seed in fields["seeds"]
    ]
    row_ids = [int(row_id) for row_id in fields["row_ids"]]
    require(len(row_ids) == len(rows), f"row_ids={row_ids}: must be {len(rows)}, one per seed")
    return EngineRequest(
        request_id=int(fields["request_id"]),
        prompt=None,
        prompt_token_ids=ids,
        rows=rows,
        row_ids=row_ids,
        targets=Targets(**fields["targets"]),
        arrival_seconds=fields["arrival_seconds"] + origin,
        submitted_seconds=0.0,
        on_update=None,
        is_streamed=bool(fields["is_streamed"]),
        speculates=bool(fields["speculates"]),
    )


def progress_to_json(row: RowProgress, now: float) -> Json:
    """What is known of an output.

    Args:
      now: on `time.perf_counter`'s clock.
    """
    return {
        "token_ids": row.token_ids,
        "logprobs": [_position_to_json(position) for position in row.logprobs],
        "prompt_logprobs": None
        if row.prompt_logprobs is None
        else [_position_to_json(position) for position in row.prompt_logprobs],
        "text": row.text,
        "finish_reason": row.finish_reason,
        "stop_reason": row.stop_reason,
        "acceptance": None if row.acceptance is None else dataclasses.astuple(row.acceptance),
        "first_token_age_seconds": now - row.first_token_seconds if row.first_token_seconds else 0,
        "last_token_age_seconds": now - row.last_token_seconds if row.last_token_seconds else 0,
    }


def resume_row(row: RowProgress, fields: Json, now: float) -> None:
    """Brings an output that knows nothing to where `progress_to_json` found it.

    The tokens of a row that goes on are added again, one by one as they came: so its decoder and
    its stop strings are in the middle of what they were in the middle of.

    Raises:
      KeyError, TypeError, ValueError: `fields` are not what `progress_to_json` gives, or the
        tokenizer spells their tokens otherwise.
    """
    token_ids = [int(token) for token in fields["token_ids"]]
    logprobs = [_position_from_json(position) or {} for position in fields["logprobs"]]
    if fields["prompt_logprobs"] is not None:
        row.prompt_logprobs = [_position_from_json(p) for p in fields["prompt_logprobs"]]
    if fields["finish_reason"] is None:
        for i, token in enumerate(token_ids):
            row.add(token, logprobs[i] if logprobs else None)
        require(
            row.text == fields["text"] and row.finish_reason is None,
            f"text={fields['text']!r}: the tokenizer spells its tokens {row.text!r}; use the one "
            "that they were made with",
        )
    else:
        row.token_ids, row.logprobs, row.text = token_ids, logprobs, fields["text"]
        row.finish_reason, row.stop_reason = fields["finish_reason"], fields["stop_reason"]
    row.begin_step()
    if counts := fields.get("acceptance"):
        row.count_drafts(*counts)
    if age := fields["first_token_age_seconds"]:
        row.first_token_seconds = now - age
    if age := fields["last_token_age_seconds"]:
        row.last_token_seconds = now - age


def _params_to_json(params: SamplingParams) -> Json:
    """Without n, which is 1, and without the seed."""
    changed = {
        name: getattr(params, name)
        for name, default in _PARAMS.items()
        if name not in ("n", "seed") and getattr(params, name) != default
    }
    if params.logit_bias is not None:
        # JSON has no integer keys.
        changed["logit_bias"] = list(params.logit_bias.items())
    return changed


def _params_from_json(fields: Json) -> SamplingParams:
    if "logit_bias" in fields:
        fields = fields | {"logit_bias": {token: bias for token, bias in fields["logit_bias"]}}
    return SamplingParams(**fields)


def _position_to_json(position: PositionLogprobs | None) -> list[list] | None:
    """[[token, logprob, rank, text], ...]"""
    if position is None:
        return None
    return [[token, *logprob] for token, logprob in position.items()]


def _position_from_json(entries: list[list] | None) -> PositionLogprobs | None:
    if entries is None:
        return None
    return {token: Logprob(*logprob) for token, *logprob in entries}
