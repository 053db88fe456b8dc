"""Does the check of the compiled step read HLO right, and fail on what it must fail on?"""

import dataclasses
import json

import pytest

from helios_jax.engine.aot import __main__ as command
from helios_jax.engine.aot import hlo
from helios_jax.engine.aot.cases import StepCase, abstract_step
from helios_jax.engine.aot.hlo import Array
from helios_jax.engine.aot.judge import Expected, Memory, judge, launches_of, passes_of

POOL = "u16[64,2,64]"
BUFFERS = f"({POOL}, {POOL}, u8[48,16], bf16[32,96], bf16[4,32])"


def kernel(name: str, result: str, kind: str, *operands: str) -> str:
    code = r'"ML\EFR name = \22x\22 { }"'
    return (
        f"  %{name} = {result} custom-call({', '.join('%' + o for o in operands)}), "
        'custom_call_target="__gpu$xla.gpu.triton", operand_layout_constraints={u8[1]{0}}, '
        f'metadata={{op_name="jit(step)/while/body/{kind}/pallas_call"}}, '
        f'backend_config={{debug = false, ir = {code}, name = "{kind}", num_warps = 2 : i32}}'
    )


# A round: one linear of 48 outputs and 32 inputs, append, attention; a dense head of 96.
BODY = f"""
  %p = {BUFFERS} parameter(0)
  %k = {POOL}{{2,1,0}} get-tuple-element(%p), index=0
  %v = {POOL}{{2,1,0}} get-tuple-element(%p), index=1
  %codes = u8[48,16]{{1,0}} get-tuple-element(%p), index=2
  %head = bf16[32,96]{{1,0}} get-tuple-element(%p), index=3
  %x = bf16[4,32]{{1,0}} get-tuple-element(%p), index=4
  %view = u8[1,48,16]{{2,1,0}} bitcast(%codes)
{kernel("parts", "f32[2,4,48]{2,1,0}", "int4_matmul", "x", "view")}
{kernel("y", "bf16[4,48]{1,0}", "int4_matmul_reduce", "parts")}
{kernel("new", f"({POOL}, {POOL})", "append_kv_fp8_e4m3", "k", "v", "y")}
  %k2 = {POOL}{{2,1,0}} get-tuple-element(%new), index=0
  %v2 = {POOL}{{2,1,0}} get-tuple-element(%new), index=1
{kernel("out", "bf16[4,32]{1,0}", "paged_attention_fp8_e4m3", "y", "k2", "/*index=2*/v2")}
  %small = bf16[4,32]{{1,0}} copy(%out)
  %logits = f32[4,96]{{1,0}} fusion(%small, %head), kind=kCustom, calls=%gemm
  %greedy = pred[] constant(true)
  %token = s32[4]{{0}} conditional(%greedy, %logits, %logits), true_computation=%argmax, \
false_computation=%draw
  ROOT %r = {BUFFERS} tuple(%k2, %v2, %codes, %head, %small)"""

# A product with a weight that the fusion itself expands.
EXPANDED_GEMM = """
%expanded_gemm (a.1: bf16[4,32], c.1: u8[48,16]) -> f32[4,48] {
  %a.1 = bf16[4,32]{1,0} parameter(0)
  %c.1 = u8[48,16]{1,0} parameter(1)
  %w.1 = bf16[48,32]{1,0} convert(%c.1)
  ROOT %d.1 = f32[4,48]{1,0} dot(%a.1, %w.1), lhs_contracting_dims={1}, rhs_contracting_dims={1}
}
"""

PROGRAM = """HloModule jit_step, is_scheduled=true, entry_computation_layout={(u8[48,16])->u8[1]}

%gemm (a: bf16[4,32], b: bf16[32,96]) -> f32[4,96] {
  %a = bf16[4,32]{1,0} parameter(0)
  %b = bf16[32,96]{1,0} parameter(1)
  ROOT %d = f32[4,96]{1,0} dot(%a, %b), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}

%expand (c: u8[48,16]) -> bf16[48,32] {
  %c = u8[48,16]{1,0} parameter(0)
  ROOT %w = bf16[48,32]{1,0} convert(%c)
}

%argmax (l: f32[4,96]) -> s32[4] {
  %l = f32[4,96]{1,0} parameter(0)
  ROOT %best = s32[4]{0} fusion(%l), kind=kInput, calls=%expand
}

%draw (l.1: f32[4,96]) -> s32[4] {
  %l.1 = f32[4,96]{1,0} parameter(0)
  %s = f32[4,96]{1,0} sort(%l.1), dimensions={1}, to_apply=%expand
  %s2 = f32[4,96]{1,0} sort(%s), dimensions={1}, to_apply=%expand
  ROOT %drawn = s32[4]{0} fusion(%s2), kind=kInput, calls=%expand
}

%body (p: (u16[64,2,64], u8[48,16])) -> (u16[64,2,64], u8[48,16]) {BODY
}

%condition (q: (u16[64,2,64], u8[48,16])) -> pred[] {
  %q = (u16[64,2,64]) parameter(0)
  ROOT %more = pred[] fusion(%q), kind=kLoop, calls=%expand
}

ENTRY %main (args: (u16[64,2,64], u8[48,16])) -> (u16[64,2,64], u8[48,16]) {
  %args = BUFFERS parameter(0)
  ROOT %loop = BUFFERS while(%args), condition=%condition, body=%body
}
"""

EXPECTED = Expected(
    passes=({"int4_matmul": 1, "append_kv_fp8_e4m3": 1, "paged_attention_fp8_e4m3": 1},),
    codes=frozenset({(48, 16)}),
    dense=frozenset({(32, 96)}),
    weight_size=48 * 32,
    growing=frozenset({Array("u16", (64, 2, 64)), Array("s32", (64,))}),
    pool_bytes=2 * 64 * 2 * 64 * 2,
    logits=(4, 96),
)
MEMORY = Memory(temporary=500, alias=EXPECTED.pool_bytes, argument=0)


def program(*lines: str, without: str | None = None) -> hlo.Program:
    """The good program, with lines added to its loop or one left out."""
    kept = [line for line in BODY.split("\n") if not without or without not in line]
    body = "\n".join([*kept[:-1], *(f"  {line}" for line in lines), kept[-1]])
    text = PROGRAM.replace("BODY", body).replace("BUFFERS", BUFFERS)
    return hlo.parse(text + EXPANDED_GEMM if "expanded_gemm" in body else text)


def test_a_good_step_passes():
    assert judge(program(), MEMORY, EXPECTED) == []


def test_launches_are_counted():
    """Four kernels of ours, a copy, the head, the sampling's branch, the condition."""
    good = program()
    assert passes_of(good) == ["body"]
    launches = launches_of(good, "body", "condition")
    assert (launches.fewest, launches.most) == (4 + 1 + 1 + 1 + 1, 4 + 1 + 1 + 3 + 1)
    assert launches.num_decisions == 1
    assert launches.by_kind["fusion"] == 4 and launches.by_kind["sort"] == 2
    assert launches.by_kind["int4_matmul_reduce"] == 1


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (
            ["%z = f32[4,48]{1,0} fusion(%x, %codes), kind=kCustom, calls=%expanded_gemm"],
            "z (fusion) reads u8[48,16], the codes of a quantised linear",
        ),
        (
            ["%z = u8[1,48,16]{2,1,0} copy(%view)"],
            "z (copy) reads u8[1,48,16], the codes",
        ),
        (
            ["%z = bf16[48,32]{1,0} fusion(%head), kind=kLoop, calls=%expand"],
            "z (fusion) makes bf16[48,32]: as large as a weight",
        ),
        (
            ["%w = bf16[48,32]{1,0} bitcast(%v)",
             '%z = f32[4,48]{1,0} custom-call(%x, %w), custom_call_target="__cublas$gemm"'],
            "z (__cublas$gemm) multiplies bf16[48,32]",
        ),
        (
            [f"%z = {POOL}{{2,1,0}} copy(%k)"],
            "z (copy) copies u16[64,2,64], which grows with the KV pool",
        ),
        (
            [f"%z = ({POOL}{{2,1,0}}, {POOL}{{2,1,0}}, u32[]) copy-start(%k)"],
            "z (copy-start) copies u16[64,2,64]",
        ),
        (
            ["%table = s32[64]{0} get-tuple-element(%p), index=9", "%z = s32[64]{0} copy(%table)"],
            "z (copy) copies s32[64]",
        ),
        (
            ["%z.remat = f32[4,32]{1,0} fusion(%x), kind=kLoop, calls=%expand"],
            "1 operations are repeated to save memory, among them z.remat",
        ),
    ],
)  # fmt: skip
def test_what_must_not_be_there_is_an_error(lines, message):
    errors = judge(program(*lines), MEMORY, EXPECTED)
    assert any(error.startswith(message) for error in errors), errors


def test_a_product_inside_a_fusion_is_seen():
    """Also where no packed codes of a known shape lead to it."""
    fused = program("%z = f32[4,48]{1,0} fusion(%x, %codes), kind=kCustom, calls=%expanded_gemm")
    errors = judge(fused, MEMORY, dataclasses.replace(EXPECTED, codes=frozenset()))
    assert [error.split(":")[0] for error in errors] == ["d.1 (dot) multiplies bf16[48,32]"]


@pytest.mark.parametrize("kind", ["int4_matmul", "append_kv", "paged_attention"])
def test_a_missing_kernel_is_an_error(kind):
    [error, *_] = judge(program(without=f"{kind}_" if "_m" not in kind else "%parts"), MEMORY,
                        EXPECTED)  # fmt: skip
    assert kind in error and "0 times: must be 1" in error


def test_a_pass_without_kernels_is_an_error():
    twice = dataclasses.replace(EXPECTED, passes=EXPECTED.passes * 2)
    assert "1 loops of the step launch Pallas kernels: 2 passes" in judge(
        program(), MEMORY, twice
    )[0]  # fmt: skip


def test_temporaries_and_lost_donation_are_errors():
    errors = judge(program(), Memory(temporary=3000, alias=0, argument=0), EXPECTED)
    assert "more than 6% of the pools'" in errors[0]
    assert "updated in place: less than the pools'" in errors[1]


def test_text_that_is_no_program_is_refused():
    with pytest.raises(ValueError, match="no ENTRY computation"):
        hlo.parse("module @jit_step {}")


def test_abstract_step_knows_what_must_be_in_it():
    step = abstract_step(StepCase("h100", num_layers=2, num_rows=8, precisions="both"))
    kernels = step.expected.passes[0]
    assert kernels["int4_matmul"] == 4 * 2
    assert kernels["append_kv_bfloat16"] == kernels["paged_attention_fp8_e4m3"] == 2
    assert step.expected.codes == {(6144, 2048), (4096, 2048), (28672, 2048), (4096, 7168)}
    assert step.expected.dense == {(4096, 128256)}
    assert step.expected.weight_size == 4096 * 4096
    params, state = step.arguments[:2]
    assert params["params"]["lm_head"]["kernel"].dtype == "bfloat16"
    assert Array("u16", state.pools.k.shape) in step.expected.growing


def test_abstract_step_knows_the_passes_of_a_round_that_speculates():
    def kernels(drafter: str) -> dict[str, int]:
        case = StepCase("h100", num_layers=2, num_rows=8, drafter=drafter)
        return abstract_step(case).expected.passes[1]

    plain, lookup, model = map(kernels, ("none", "lookup", "model"))
    # Without drafts and with them; then three passes over two layers, of which one ends early.
    assert lookup == {name: 2 * count for name, count in plain.items()}
    assert model["int4_matmul"] == lookup["int4_matmul"] + 3 * 4 * 2 - 3
    assert model["append_kv_fp8_e4m3"] == lookup["append_kv_fp8_e4m3"] + 3 * 2
    assert model["paged_attention_fp8_e4m3"] == lookup["paged_attention_fp8_e4m3"] + 3 * 2 - 1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(device="b200"), "device='b200': must be one of"),
        (dict(precisions="wide"), "precisions='wide': must be one of"),
        (dict(drafter="eagle"), "drafter='eagle': must be one of none, lookup, model"),
        (dict(drafter="lookup", num_rows=128), "num_rows=128: above 512 tokens a100 multiplies"),
        (dict(num_layers=0), "num_layers=0: must be at least 1"),
        (dict(chunk_tokens=1024), "chunk_tokens=1024: above 512 tokens a100 multiplies"),
    ],
)
def test_cases_that_check_nothing_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        StepCase(**(dict(device="a100") | changes))


GOOD_FACTS = dict(
    errors=[], lower_seconds=1.0, compile_seconds=2.0, temporary_bytes=2**20,
    argument_bytes=2**30, alias_bytes=2**30, pool_bytes=2**30,
    chunk=dict(fewest=3, most=5, by_kind={"append_kv_fp8_e4m3": 2, "fusion": 1}, num_decisions=0),
    round=dict(fewest=4, most=6, by_kind={"int4_matmul": 2, "fusion": 1}, num_decisions=0),
)  # fmt: skip


def test_the_command_prints_figures_keeps_them_and_fails_on_errors(tmp_path, monkeypatch, capsys):
    # A case that speculates is one of "narrow" precision.
    facts = {"narrow": GOOD_FACTS, "both": dict(errors=["did not compile in 1800 s"])}
    monkeypatch.setattr(command, "_compile", lambda case: facts[case.precisions])
    path = tmp_path / "results" / "steps.json"
    arguments = ["--device", "h100", "--out", str(path)]
    assert command.main([*arguments, "--precisions", "narrow"]) == 0
    assert "4-6" in capsys.readouterr().out
    assert command.main(arguments) == 1
    printed = capsys.readouterr().out
    assert "error: h100, 2 layers, 64 rows, chunk of 512, FP8 and bfloat16 KV: did not" in printed
    kept = json.loads(path.read_text())
    cases = [(step["precisions"], step["drafter"]) for step in kept["steps"]]
    assert cases == [
        ("narrow", "none"),
        ("narrow", "lookup"),
        ("narrow", "model"),
        ("both", "none"),
    ]
    assert kept["steps"][0]["round"]["most"] == 6 and "jax" in kept["versions"]
    with pytest.raises(SystemExit):
        command.main(["--rows", "4096"])
    assert "num_rows=4096: above" in capsys.readouterr().err
