"""`helios client`: talk to a server that runs elsewhere."""

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from helios_jax.cli import options
from helios_jax.cli.options import Debug

app = typer.Typer(name="client", help="Talk to a running server.", no_args_is_help=True)

_CONNECTION = "Connection"

Address = Annotated[str, typer.Option(rich_help_panel=_CONNECTION, help="The server's host:port.")]
TlsCa = Annotated[
    str | None,
    typer.Option(
        rich_help_panel=_CONNECTION,
        help="Use TLS: PEM of who signed the server's certificate; '' for those trusted here.",
    ),
]
TlsCert = Annotated[
    Path | None, typer.Option(rich_help_panel=_CONNECTION, help="PEM: a certificate of your own.")
]
TlsKey = Annotated[Path | None, typer.Option(rich_help_panel=_CONNECTION, help="PEM: its key.")]
TokenFile = Annotated[
    Path | None,
    typer.Option(rich_help_panel=_CONNECTION, help="A file whose first line is your token."),
]
Retry = Annotated[
    float,
    typer.Option(
        "--retry-seconds", rich_help_panel=_CONNECTION, help="Try so long while it is away or full."
    ),
]
_DEFAULT_ADDRESS = "127.0.0.1:50051"


@app.command()
def generate(
    prompt: Annotated[str, typer.Argument(help="The prompt; - reads it from standard input.")],
    address: Address = _DEFAULT_ADDRESS,
    chat: options.Chat = None,
    system: options.System = None,
    timeout: Annotated[
        float | None, typer.Option(help="Seconds: the deadline, which the scheduler heeds.")
    ] = None,
    stats: options.Stats = True,
    tls_ca: TlsCa = None,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
    token_file: TokenFile = None,
    retry_seconds: Retry = 0.0,
    max_tokens: options.MaxTokens = 256,
    min_tokens: options.MinTokens = 0,
    temperature: options.Temperature = 0.0,
    top_p: options.TopP = 1.0,
    top_k: options.TopK = 0,
    min_p: options.MinP = 0.0,
    seed: options.Seed = None,
    stop: options.Stop = None,
    ignore_eos: options.IgnoreEos = False,
    repetition_penalty: options.RepetitionPenalty = 1.0,
    presence_penalty: options.PresencePenalty = 0.0,
    frequency_penalty: options.FrequencyPenalty = 0.0,
    debug: Debug = False,
) -> None:
    """Generate text on a server, printed as it comes."""
    text = options.read_prompt(prompt)
    sampling = dict(
        max_tokens=max_tokens, min_tokens=min_tokens, temperature=temperature, top_p=top_p,
        top_k=top_k, min_p=min_p, seed=seed, stop=stop, ignore_eos=ignore_eos,
        repetition_penalty=repetition_penalty, presence_penalty=presence_penalty,
        frequency_penalty=frequency_penalty,
    )  # fmt: skip
    with _connect(address, tls_ca, tls_cert, tls_key, token_file, retry_seconds) as client, _told():
        is_chat = client.model_info().has_chat_template if chat is None else chat
        if system is not None and not is_chat:
            raise ValueError(f"system={system!r}: needs a chat; write it into the prompt")
        if is_chat:
            messages = [{"role": "system", "content": system}] if system is not None else []
            messages.append({"role": "user", "content": text})
            parts = client.stream_chat(messages, timeout=timeout, **sampling)
        else:
            parts = client.stream(text, timeout=timeout, **sampling)
        outcome: Any = None
        for part in parts:
            sys.stdout.write(part.text)
            sys.stdout.flush()
            outcome = part.request_output
        print(flush=True)
        if stats:
            print(f"[{_describe(outcome)}]", file=sys.stderr)


@app.command()
def info(
    address: Address = _DEFAULT_ADDRESS,
    tls_ca: TlsCa = None,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
    token_file: TokenFile = None,
    retry_seconds: Retry = 0.0,
    debug: Debug = False,
) -> None:
    """Print what a server serves, its limits and its load, as JSON."""
    from google.protobuf import json_format

    from helios_jax.server.proto import inference_pb2 as pb

    with _connect(address, tls_ca, tls_cert, tls_key, token_file, retry_seconds) as client, _told():
        server = client.server_info()
        known = {"server": server}
        if server.state != pb.SERVER_STATE_LOADING:
            known["model"] = client.model_info()
        shown = {
            name: json_format.MessageToDict(message, preserving_proto_field_name=True)
            for name, message in known.items()
        }
        print(json.dumps(shown, indent=2, ensure_ascii=False))


def _connect(
    address: str,
    tls_ca: str | None,
    tls_cert: Path | None,
    tls_key: Path | None,
    token_file: Path | None,
    retry_seconds: float,
) -> Any:
    from helios_jax.server.client import Client

    token = None
    if token_file is not None:
        token = token_file.read_text(encoding="utf-8").split("\n")[0].strip()
    return Client(
        address, token=token, tls_ca=tls_ca, tls_cert=tls_cert, tls_key=tls_key,
        retry_seconds=retry_seconds,
    )  # fmt: skip


@contextmanager
def _told() -> Iterator[None]:
    """Says what the server said where it refuses."""
    import grpc

    try:
        yield
    except grpc.RpcError as error:
        code = error.code()  # pyright: ignore[reportAttributeAccessIssue]
        text = f"{code.name}: {error.details()}"  # pyright: ignore[reportAttributeAccessIssue]
        # What was asked for cannot be, or it failed: as with the other verbs.
        wrong = (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.UNIMPLEMENTED)
        raise (ValueError if code in wrong else OSError)(text) from error


def _describe(outcome: Any) -> str:
    usage, timings = outcome.usage, outcome.timings
    rate = f", {1 / timings.tpot_seconds:.1f} tokens/s" if timings.tpot_seconds else ""
    accepted = ""
    if outcome.acceptance is not None and outcome.acceptance.num_draft_tokens:
        accepted = f", {outcome.acceptance.acceptance_rate:.0%} of drafts accepted"
    return (
        f"prompt {usage.prompt_tokens} tokens, first token {timings.ttft_seconds:.2f} s; "
        f"{usage.completion_tokens} tokens, {outcome.outputs[0].finish_reason}{rate}{accepted}"
    )
