"""The gRPC server and its clients: how do other programs, of any language, use an engine?

    proto           what goes over the wire: the service helios.v1.Inference
    run             a server's life: listen, load, serve, drain, exit
    config          its options and limits
    gate            what every call passes: authentication, admission, error codes, logs, metrics
    service         what the methods do
    convert         protos to the engine's types and back
    inbox           a request's updates, from the engine's thread to whoever writes them out
    errors          which status code and details does an exception become
    security        TLS and bearer tokens
    telemetry       Prometheus, log formats, OpenTelemetry
    client          `Client` and `AsyncClient`, which need neither jax nor a model
    client_convert  their arguments to protos, and answers back

A request's life: the gate lets it in; the service tokenises and submits it with the time that the
call has left as its deadline; the engine's thread hands updates to the loop, where they gather
until they are written; a call that ends early in any way aborts its request in the engine.

The server imports the engine and `llm`, and decides nothing about order or memory.
"""
