"""Is the generated code what protoc makes of the proto, and does the proto fit the library?"""

import dataclasses
import re
from typing import Any

import pytest

from helios_jax import SamplingParams
from helios_jax.server.client_convert import options_to_proto
from helios_jax.server.config import MAX_STOP_TOKEN_IDS
from helios_jax.server.convert import sampling_from_proto
from helios_jax.server.errors import RpcError, blaming_input, to_rpc_error
from helios_jax.server.proto import PROTO_ROOT
from helios_jax.server.proto import inference_pb2 as pb
from helios_jax.server.proto.generate import generate

EVERY = SamplingParams(
    n=2, temperature=0.5, top_p=0.9, top_k=7, min_p=0.1, repetition_penalty=1.2,
    presence_penalty=0.3, frequency_penalty=-0.4, logit_bias={3: -1.5}, allowed_token_ids=[1, 2],
    bad_words=["bad"], max_tokens=9, min_tokens=2, stop=["end", "fin"], stop_token_ids=[5, 6],
    include_stop_str_in_output=True, ignore_eos=True, seed=-7, logprobs=3, prompt_logprobs=0,
    detokenize=True, skip_special_tokens=False,
)  # fmt: skip


def without_versions(text: str) -> str:
    """Numbers of the generator's version, which need not be those of the runtime."""
    text = re.sub(r"(?<=Protobuf Python Version: )\S+|(?<=GENERATED_VERSION = ')[\d.]+", "", text)
    return re.sub(r"(?<=Domain\.PUBLIC,)[\s\d,]+", "", text)


def test_the_generated_code_is_protocs():
    for name, text in generate().items():
        committed = (PROTO_ROOT / name).read_text()
        assert without_versions(committed) == without_versions(text), (
            f"{name} is not what protoc writes: run python -m helios_jax.server.proto.generate"
        )


def test_every_sampling_parameter_has_a_field():
    names = {field.name for field in dataclasses.fields(SamplingParams)}
    assert names == set(pb.SamplingParams.DESCRIPTOR.fields_by_name)


def received(**options: Any) -> SamplingParams:
    """What the server makes of a client's options."""
    sampling, _ = options_to_proto(options)
    return sampling_from_proto(pb.SamplingParams.FromString(sampling.SerializeToString()))


def test_sampling_parameters_survive_the_wire():
    options = {field.name: getattr(EVERY, field.name) for field in dataclasses.fields(EVERY)}
    assert received(**options) == EVERY
    assert sampling_from_proto(pb.SamplingParams()) == SamplingParams()
    # Zero is not "not set".
    zero = received(temperature=0, logprobs=0, detokenize=False)
    assert zero == SamplingParams(temperature=0, logprobs=0, detokenize=False)
    words = received(bad_words_token_ids=[[1, 2], [3]])
    assert words.bad_words_token_ids == ((1, 2), (3,))


@pytest.mark.parametrize(
    "options, message",
    [
        (dict(tempurature=1), "tempurature is no option of a request; must be one of n, temp"),
        (dict(max_tokens="many"), "max_tokens='many': is not what the option takes"),
        (dict(logit_bias={"a": 1.0}), "logit_bias={'a': 1.0}: is not what"),
        (dict(seed=2**64), "seed=18446744073709551616: is not what"),
    ],
)
def test_the_client_names_what_it_cannot_send(options, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        options_to_proto(options)


def test_long_lists_are_refused_before_they_are_compiled_for():
    with pytest.raises(RpcError, match="stop_token_ids has 129 entries: must be at most 128"):
        sampling_from_proto(pb.SamplingParams(stop_token_ids=range(MAX_STOP_TOKEN_IDS + 1)))
    both = pb.SamplingParams(bad_words=["x"], bad_words_token_ids=[pb.TokenIds(ids=[1])])
    with pytest.raises(RpcError, match="must not both be given"):
        sampling_from_proto(both)


def test_an_error_fits_the_headers_that_carry_it():
    with pytest.raises(RpcError) as raised, blaming_input():
        raise ValueError("stop contains " + "ß\n🙂" * 10_000)
    status = raised.value.status()
    assert status.ByteSize() < 3000 and status.message.endswith("…")
    assert to_rpc_error(KeyError("secret path")).message.startswith("internal error")
