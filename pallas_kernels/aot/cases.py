"""What the compile check compiles: the edges of shapes.py, and every configuration of tuned/."""

import dataclasses
from dataclasses import dataclass
from typing import Any

from pallas_kernels import tuning
from pallas_kernels.append_kv import shapes as append_shapes
from pallas_kernels.devices import DEVICES
from pallas_kernels.int4_matmul import config as matmul_configs
from pallas_kernels.int4_matmul import shapes as matmul_shapes
from pallas_kernels.paged_attention import config as attention_configs
from pallas_kernels.paged_attention import shapes as attention_shapes

CASE_TYPES: dict[str, Any] = {
    "int4_matmul": matmul_shapes.Case,
    "paged_attention": attention_shapes.Case,
    "append_kv": append_shapes.Case,
}


@dataclass(frozen=True)
class Compile:
    """One compilation: an op's case for a device, on `num_devices` of them.

    `config` None takes what a call would take. In a `critical` case, one of a model's shapes,
    narrow loads of weights or of keys and values are an error; elsewhere they are reported.
    `also` names the devices that get the same code, and for which it is judged too.
    """

    op: str
    device: str
    case: dict
    config: dict | None = None
    critical: bool = False
    num_devices: int = 1
    also: tuple[str, ...] = ()

    @property
    def label(self) -> str:
        return describe(self.op, self.case) + (
            f" on {self.num_devices} devices" if self.num_devices > 1 else ""
        )


def case_of(op: str, fields: dict):
    """The Case that `fields` (from JSON, so with lists) state."""
    fields = dict(fields)
    if "rows" in fields:
        fields["rows"] = tuple(tuple(row) for row in fields["rows"])
    return CASE_TYPES[op](**fields)


def describe(op: str, fields: dict) -> str:
    """A case in a few words."""
    case = case_of(op, fields)
    if op == "int4_matmul":
        gate = f" {case.gate_activation}" if case.gate_activation else ""
        group = case.group_size if case.group_size > 0 else "K"
        size = f"{case.M}x{case.N}x{case.K}"
        return f"{size} w{case.bits} g{group} {case.zero_kind} {case.x_dtype}{gate}"
    if op == "append_kv":
        return f"{case.T} tokens {case.K}x{case.H} {case.kv_dtype}"
    contexts = {context for context, _ in case.rows}
    extra = "".join(
        f" {name}"
        for name, given in (
            (f"window {case.sliding_window}", case.sliding_window),
            ("cap", case.soft_cap),
            ("tree", case.tree),
        )
        if given
    )
    return (
        f"B{len(case.rows)} ctx{max(contexts)} q{case.max_query_len} {case.K}x{case.G}x{case.H} "
        f"{case.kv_dtype}{extra}"
    )


def tuned(device: str) -> list[Compile]:
    """Every configuration of tuned/<device>.json."""
    table = tuning.load(device)
    return [
        Compile(op, device, entry["case"], entry["config"], critical=True)
        for op in ("int4_matmul", "paged_attention")
        for entry in table.get(op, [])
    ]


def edges(device: str) -> list[Compile]:
    """The cases of the three shapes.py, cut as a call would be, and the sharded ops."""
    found = []
    for op, configs, cases in (
        ("int4_matmul", matmul_configs, (*matmul_shapes.EDGES, *matmul_shapes.SLOW_EDGES)),
        (
            "paged_attention",
            attention_configs,
            (*attention_shapes.EDGES, *attention_shapes.SLOW_EDGES),
        ),
    ):
        for case in cases:
            config = configs.config_for(configs.problem_of_case(case), DEVICES[device])
            found.append(Compile(op, device, dataclasses.asdict(case), dataclasses.asdict(config)))
    found += [
        Compile("append_kv", device, dataclasses.asdict(case)) for case in append_shapes.EDGES
    ]
    return found + sharded(device)


def sharded(device: str) -> list[Compile]:
    """Each op on four devices."""
    cases = (
        ("int4_matmul", matmul_shapes.Case(16, 4096, 4096)),
        ("int4_matmul", matmul_shapes.Case(16, 28672, 4096, gate_activation="silu")),
        ("paged_attention", attention_shapes.Case(8, 4, 128, ((4096, 1),) * 8)),
        ("append_kv", append_shapes.Case(8, 8, 128, "fp8_e4m3", num_blocks=2048)),
    )
    return [
        Compile(op, device, dataclasses.asdict(case), num_devices=4, critical=op != "append_kv")
        for op, case in cases
    ]


def model_cases() -> list[tuple[str, Any]]:
    """The (op, Case) pairs that tuned/ must cover: both models' matrices and attention shapes."""
    cases: list[tuple[str, Any]] = []
    for matrices, formats in (
        (matmul_shapes.LLAMA3_8B, matmul_shapes.LLAMA3_FORMATS),
        (matmul_shapes.SMOLLM2_135M, matmul_shapes.SMOLLM2_FORMATS),
    ):
        for name, N, K in matrices:
            gate = "silu" if name == "gate_up" else None
            for bits, group, kind, scale in formats:
                for M in (16, 32, 64, 512):
                    case = matmul_shapes.Case(
                        M, N, K, group, bits, 32, kind, "bfloat16", scale, gate
                    )
                    if ("int4_matmul", case) not in cases:
                        cases.append(("int4_matmul", case))
    for _, K, G, H in attention_shapes.MODELS:
        for kv_dtype in ("fp8_e4m3", "bfloat16"):
            scales = kv_dtype == "fp8_e4m3"
            for batch in attention_shapes.DECODE_BATCHES:
                for context in attention_shapes.DECODE_CONTEXTS:
                    rows = ((context, 1),) * batch
                    case = attention_shapes.Case(K, G, H, rows, kv_dtype, scales=scales)
                    cases.append(("paged_attention", case))
            for batch in (1, 8):
                rows = ((4096, attention_shapes.VERIFY_TOKENS),) * batch
                case = attention_shapes.Case(K, G, H, rows, kv_dtype, scales=scales)
                cases.append(("paged_attention", case))
            rows = ((4096, attention_shapes.PREFILL_CHUNK),)
            case = attention_shapes.Case(K, G, H, rows, kv_dtype, scales=scales)
            cases.append(("paged_attention", case))
    return cases


def reduced() -> list[Compile]:
    """A selection for continuous integration: every code path once, on every architecture."""
    picks: list[Compile] = []
    for device in ("a100", "l4", "h200"):
        table = tuned(device)
        wanted = (
            ("int4_matmul", dict(N=4096, K=4096)),
            ("int4_matmul", dict(N=28672, K=4096, M=16)),
            ("int4_matmul", dict(N=576, K=1536, M=16)),
        )
        for op, fields in wanted:
            picks += [
                c for c in table
                if c.op == op and all(c.case[k] == v for k, v in fields.items())
            ]  # fmt: skip
        picks += [
            c for c in table
            if c.op == "paged_attention" and (len(c.case["rows"]) == 8 or c.case["rows"][0][1] > 16)
            and c.case["rows"][0][0] == 4096
        ]  # fmt: skip
        picks += sharded(device)
    for device, case in zip(
        ("a100", "l4", "h200") * 20,
        (
            *matmul_shapes.EDGES[len(matmul_shapes.ROWS) + len(matmul_shapes.OUTPUTS) :],
            *attention_shapes.EDGES[1:5],  # the other formats
            *attention_shapes.EDGES[6::2],
            *append_shapes.EDGES[::2],
        ),
        strict=False,
    ):
        op = next(op for op, kind in CASE_TYPES.items() if isinstance(case, kind))
        picks.append(Compile(op, device, dataclasses.asdict(case)))
    return picks


def all_cases(devices: tuple[str, ...] = tuple(DEVICES)) -> list[Compile]:
    """Everything, with what compiles to the same code (H100 and H200) once."""
    seen: dict[tuple, Compile] = {}
    for device in devices:
        for c in (*tuned(device), *edges(device)):
            of = DEVICES[device]
            key = (of.arch, of.num_sms, c.op, str(c.case), str(c.config), c.num_devices)
            if key in seen:
                seen[key] = dataclasses.replace(seen[key], also=(*seen[key].also, device))
            else:
                seen[key] = c
    return list(seen.values())
