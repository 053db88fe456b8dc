"""`helios serve`: a model for many clients, over gRPC."""

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from helios_jax.cli import options
from helios_jax.cli.options import Debug

_SERVER = "Server"


def serve(
    model: Annotated[
        str,
        typer.Argument(help="As for --model elsewhere: a known name, hf:org/name, a local path."),
    ] = options.DEFAULT_MODEL,
    host: Annotated[
        str, typer.Option(rich_help_panel=_SERVER, help="Address to listen on.")
    ] = "127.0.0.1",
    port: Annotated[
        int, typer.Option(rich_help_panel=_SERVER, help="0 takes a free one; the log names it.")
    ] = 50051,
    tls_cert: Annotated[
        Path | None, typer.Option(rich_help_panel=_SERVER, help="PEM: the certificate chain.")
    ] = None,
    tls_key: Annotated[
        Path | None, typer.Option(rich_help_panel=_SERVER, help="PEM: its private key.")
    ] = None,
    tls_client_ca: Annotated[
        Path | None,
        typer.Option(
            rich_help_panel=_SERVER, help="PEM: clients need a certificate that this one signed."
        ),
    ] = None,
    auth_token_file: Annotated[
        Path | None,
        typer.Option(rich_help_panel=_SERVER, help="Bearer tokens, one a line; clients need one."),
    ] = None,
    metrics_port: Annotated[
        int | None, typer.Option(rich_help_panel=_SERVER, help="Serve Prometheus there, on --host.")
    ] = None,
    max_requests_per_client: Annotated[
        int, typer.Option(rich_help_panel=_SERVER, help="Calls at a time of one client.")
    ] = 128,
    max_message_bytes: Annotated[
        int, typer.Option(rich_help_panel=_SERVER, help="Of one message, either way.")
    ] = 4 << 20,
    grace_seconds: Annotated[
        float, typer.Option(rich_help_panel=_SERVER, help="To finish requests after SIGTERM.")
    ] = 30.0,
    write_timeout_seconds: Annotated[
        float, typer.Option(rich_help_panel=_SERVER, help="How long a stream may stay unread.")
    ] = 60.0,
    warm_up: Annotated[
        bool,
        typer.Option(
            "--warm-up/--no-warm-up",
            rich_help_panel=_SERVER,
            help="Compile what short requests need before the first one.",
        ),
    ] = True,
    log_format: Annotated[
        str, typer.Option(rich_help_panel=_SERVER, help="text or json, on standard error.")
    ] = "text",
    log_prompts: Annotated[
        bool, typer.Option("--log-prompts", rich_help_panel=_SERVER, help="Log prompts, too.")
    ] = False,
    record: Annotated[
        Path | None,
        typer.Option(
            rich_help_panel=_SERVER,
            help="A new file: what arrives once it is ready, and when, prompts included.",
        ),
    ] = None,
    print_proto: Annotated[
        bool,
        typer.Option("--print-proto", help="Print the proto for clients' protoc, and leave."),
    ] = False,
    dtype: options.Dtype = "auto",
    max_model_len: options.MaxModelLen = None,
    max_num_seqs: Annotated[
        int, typer.Option(rich_help_panel=options.LOADING, help="Outputs that run together.")
    ] = 8,
    max_num_rows: Annotated[
        int,
        typer.Option(rich_help_panel=options.LOADING, help="That run or wait; more are refused."),
    ] = 256,
    max_num_batched_tokens: Annotated[
        int,
        typer.Option(rich_help_panel=options.LOADING, help="Tokens of a step, prefill included."),
    ] = 512,
    kv_cache_dtype: options.KvCacheDtype = "auto",
    kv_watermark: options.KvWatermark = 4000,
    kv_cache_memory_bytes: Annotated[
        int | None,
        typer.Option(
            rich_help_panel=options.LOADING, help="Size of the KV pool; default: what is free."
        ),
    ] = None,
    gpu_memory_utilization: Annotated[
        float,
        typer.Option(rich_help_panel=options.LOADING, help="Share of the GPU's memory in all."),
    ] = 0.9,
    prompt_lookup: options.PromptLookup = None,
    draft: options.DraftModel = None,
    speculative_config: options.SpeculativeConfig = None,
    seed: Annotated[
        int | None,
        typer.Option(rich_help_panel=options.LOADING, help="Of requests that have none."),
    ] = None,
    debug: Debug = False,
) -> None:
    """Serve a model over gRPC.

    SIGTERM or Ctrl-C ends it once the requests in flight are done, or after --grace-seconds; a
    second one at once. Without --tls-cert nothing is encrypted, so it listens on this machine only
    unless --host says otherwise.
    """
    if print_proto:
        from helios_jax.server.proto import proto_text

        sys.stdout.write(proto_text())
        return
    if log_format not in ("text", "json"):
        raise ValueError(f"log_format={log_format!r}: must be text or json")
    speculation = options.speculating(prompt_lookup, draft, speculative_config)
    from helios_jax.server.config import ServerConfig
    from helios_jax.server.run import run_server
    from helios_jax.server.telemetry import log_to_stderr

    config = ServerConfig(
        model_name=model,
        host=host,
        port=port,
        tls_cert=tls_cert,
        tls_key=tls_key,
        tls_client_ca=tls_client_ca,
        auth_token_file=auth_token_file,
        metrics_port=metrics_port,
        max_requests_per_client=max_requests_per_client,
        max_message_bytes=max_message_bytes,
        grace_seconds=grace_seconds,
        write_timeout_seconds=write_timeout_seconds,
        warm_up=warm_up,
        log_prompts=log_prompts,
        record=record,
    )
    log_to_stderr(log_format)

    def load() -> Any:
        return options.load_llm(
            model, dtype=dtype, max_model_len=max_model_len, max_num_seqs=max_num_seqs,
            max_num_rows=max_num_rows, max_num_batched_tokens=max_num_batched_tokens,
            kv_cache_dtype=kv_cache_dtype, kv_watermark=kv_watermark,
            kv_cache_memory_bytes=kv_cache_memory_bytes,
            gpu_memory_utilization=gpu_memory_utilization, seed=seed, **speculation,
        )  # fmt: skip

    run_server(config, load)
