"""The filters written naively for one row, in python loops and float64."""

import numpy as np

from helios_jax.sampling import SamplingParams


def adjusted(logits, params: SamplingParams, prompt=(), output=(), eos=()):
    x = np.array(logits, np.float64)
    if params.allowed_token_ids is not None:
        barred = set(range(len(x))) - set(params.allowed_token_ids)
        x[sorted(barred)] = -np.inf
    for word in params.bad_words_token_ids or ():
        before = list(word[:-1])
        if len(before) <= len(output) and list(output)[len(output) - len(before) :] == before:
            x[word[-1]] = -np.inf
    if len(output) < params.min_tokens:
        x[sorted(set(eos) | set(params.stop_token_ids))] = -np.inf
    for token, bias in (params.logit_bias or {}).items():
        x[token] += bias
    for token in range(len(x)):
        count = list(output).count(token)
        if count or token in prompt:
            rate = params.repetition_penalty
            x[token] = x[token] / rate if x[token] > 0 else x[token] * rate
        x[token] -= params.frequency_penalty * count
        x[token] -= params.presence_penalty if count else 0.0
    return x


def kept(y, top_k, top_p, min_p):
    """Which tempered logits survive, ties at a threshold included; boundaries are not guarded."""
    y = np.asarray(y, np.float64)
    keep = np.exp(y - y.max()) >= min_p
    if top_k > 0:
        keep &= y >= np.sort(y)[::-1][min(top_k, len(y)) - 1]
    p = np.where(keep, np.exp(y - y.max()), 0)
    p /= p.sum()
    if top_p < 1:
        levels = np.unique(p[p > 0])[::-1]
        mass = [p[p >= level].sum() for level in levels]
        keep &= p >= levels[np.argmax(np.array(mass) >= top_p)]
    return keep


def distribution(logits, params: SamplingParams, prompt=(), output=(), eos=()):
    x = adjusted(logits, params, prompt, output, eos)
    if params.greedy:
        return np.eye(len(x))[np.argmax(x)]
    y = (x - x.max()) / params.temperature
    keep = kept(y, params.top_k, params.top_p, params.min_p)
    p = np.where(keep, np.exp(y), 0)
    return p / p.sum()
