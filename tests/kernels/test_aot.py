"""Does the compile check read compiled code right, and fail on what it must fail on?"""

import dataclasses
import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

from pallas_kernels.aot import __main__ as command
from pallas_kernels.aot import cases, ptx, report
from pallas_kernels.aot.cases import Compile
from pallas_kernels.aot.judge import judge
from pallas_kernels.devices import DEVICES
from pallas_kernels.predict import occupancy

PTX = """
.visible .entry toy(
	.param .u64 .ptr .align 16 toy_param_0,
	.param .u64 .ptr .align 16 toy_param_1
)
{
	.reg .b64 	%rd<12>;

	ld.param::entry.b64 	%rd1, [toy_param_0];
	ld.param::entry.b64 	%rd2, [toy_param_1];
	cvta.to.global.u64 	%rd3, %rd1;
	cvta.to.global.u64 	%rd4, %rd2;
	add.s64 	%rd9, %rd4, 128;
$L__BB0_1:
	add.s64 	%rd5, %rd3, %rd8;
	// begin inline asm
	cp.async.cg.shared.global [ %r8 + 0 ], [ %rd5 + 0 ], 0x10, %p1;
	// end inline asm
	ld.global.v2.b32 	{%r1, %r2}, [ %rd9 + 0 ];
	// begin inline asm
	{ .reg .b32 t; and.b32 t, %r1, 15; prmt.b32 %r3, t, 0x43, 0x4140; }
	// end inline asm
	mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32
		{%r4, %r5},
		{%r3, %r3},
		{%r1, %r2};
	@%p2 bra 	$L__BB0_1;
	ret;
}
"""


def test_main_loop_is_read():
    loop = ptx._main_loop(PTX, "toy")
    assert loop == ptx.Loop(alu=3, matrix=1, asynchronous=True, load_bytes={0: 16, 1: 8})


def test_an_empty_file_has_no_kernels(tmp_path):
    """jax 0.10.2 dumps one for a module that holds constants only."""
    path = tmp_path / "module.ptx"
    path.write_text("")
    assert ptx.kernels(path, "no assembler is asked") == []


def good_facts():
    return dict(
        config=None,
        big_arguments=[2],
        big_bytes=2**20,
        kernels=[
            dict(name="int4_matmul", registers=128, stack_bytes=0, spill_bytes=0, atomics=0,
                 loop=dict(alu=9, matrix=1, asynchronous=True, load_bytes={"2": 16}))
        ],
        launches=[dict(name="int4_matmul", grid=9, threads=64, shared_bytes=1024)],
        largest_copy_bytes=4,
        collectives=[],
    )  # fmt: skip


CASE = Compile("int4_matmul", "l4", dict(M=1, N=64, K=128), critical=True)


def test_good_code_passes():
    assert judge(CASE, good_facts()) == []


@pytest.mark.parametrize(
    ("harm", "message"),
    [
        (lambda f: f["kernels"][0].update(spill_bytes=8), "spills 8 bytes"),
        (lambda f: f["kernels"][0].update(atomics=1), "1 atomic instructions"),
        (lambda f: f["launches"][0].update(shared_bytes=200_000), "the device has 101376"),
        (lambda f: f.update(largest_copy_bytes=2**20), "is copied"),
        (lambda f: f["kernels"][0]["loop"]["load_bytes"].update({"2": 4}), "under 8"),
        (lambda f: f.update(kernels=[]), "no kernel of ours"),
    ],
)
def test_bad_code_is_an_error(harm, message):
    facts = good_facts()
    harm(facts)
    assert message in judge(CASE, facts)[0]


def test_a_sharded_program_must_not_gather():
    facts = good_facts() | dict(collectives=["all-gather"])
    sharded = Compile("int4_matmul", "l4", dict(M=1, N=64, K=128), num_devices=4)
    assert "communicates" in judge(sharded, facts)[0]


def test_table_says_why_loads_are_narrow():
    """A 16 x 64 tile of 4-bit codes is 512 bytes: 8 for each of 64 threads."""
    config = dict(block_n=16, block_m=16, block_k=64, split_k=1, scaling="pre", num_warps=2,
                  num_stages=3)  # fmt: skip
    cost = dict(bytes_read=2**20, bytes_written=0, flops=2**20)
    facts = good_facts() | dict(config=config, cost=cost)
    assert report.record(CASE, facts)["note"] is None
    facts["kernels"][0]["loop"]["load_bytes"] = {"2": 8}
    line = report.record(CASE, facts)
    assert line["note"] == "load: a tile is 512 bytes for 64 threads"
    assert report.row("l4", line).endswith(line["note"])
    assert tuple(line) == report.COLUMNS


def test_bars_compare_many_rows_with_few_and_fp8_with_bfloat16():
    cost = dict(bytes_read=2**26, bytes_written=0, flops=2**20)
    config = dict(block_n=64, block_m=16, block_k=128, split_k=1, scaling="pre", num_warps=2,
                  num_stages=3)  # fmt: skip
    few = good_facts() | dict(config=config, cost=cost)
    many = few | dict(cost=cost | dict(bytes_read=2**28))
    results = [
        (Compile("int4_matmul", "h200", dict(M=M, N=64, K=128), critical=True), facts)
        for M, facts in ((16, few), (64, many))
    ]
    [line] = report.bars("h200", results)
    assert "64 rows take 4.0 to 4.0 times" in line
    assert line.endswith("1 of 1 weights over, limited by memory (1)")
    assert report.bars("a100", results) == []


def test_one_compilation_serves_devices_with_the_same_code():
    every = cases.all_cases()
    assert {c.device: c.also for c in every if c.op == "append_kv"} == {
        "a100": (), "l4": (), "h100": ("h200",),
    }  # fmt: skip
    judged = {d for c in every for d in (c.device, *c.also)}
    assert judged == set(DEVICES)


def test_a_stopped_run_is_resumed(tmp_path, monkeypatch):
    """What was compiled is taken from the folder; other cases, configurations, sources are not."""
    compiled = []
    monkeypatch.setattr(command, "_compile", lambda c: compiled.append(c) or dict(seen=c.case))
    for _ in range(2):
        assert command._run(CASE, tmp_path) == dict(seen=CASE.case)
    assert len(compiled) == 1
    command._run(dataclasses.replace(CASE, config=dict(block_n=64)), tmp_path)
    command._run(dataclasses.replace(CASE, device="a100"), tmp_path)
    command._run(dataclasses.replace(CASE, critical=False, also=("h100",)), tmp_path)
    assert len(compiled) == 3
    monkeypatch.setattr(command, "_sources", lambda by_rule: "changed")
    command._run(CASE, tmp_path)
    assert len(compiled) == 4


def test_kept_table_replaces_the_devices_of_the_run(tmp_path):
    path = tmp_path / "results" / "table.json"
    config = dict(block_n=16, block_m=16, block_k=64, split_k=1, scaling="pre", num_warps=2,
                  num_stages=3)  # fmt: skip
    facts = good_facts() | dict(
        config=config, cost=dict(bytes_read=2**20, bytes_written=0, flops=2**20)
    )
    a100 = dataclasses.replace(CASE, device="a100")
    command._keep(path, [(CASE, facts), (a100, facts)], dict(l4=[], a100=["bad"]), 3.2)
    command._keep(path, [(a100, facts), (a100, facts)], dict(a100=[]), 3.2)
    table = json.loads(path.read_text())
    assert [len(table[d]["rows"]) for d in ("l4", "a100")] == [1, 2]
    assert table["a100"]["errors"] == [] and table["l4"]["seconds"] == 3
    assert len(table["l4"]["rows"][0]) == len(table["l4"]["columns"])


def test_atomics_are_counted():
    text = "atom.global.add.f32 %f1, [%rd1], %f2; redux.sync.add.s32 %r1, %r2; red.add.f32 [%rd1];"
    assert ptx._ATOMIC.findall(text) == ["atom.", "red."]


def test_occupancy_counts_each_limit():
    """64 threads at 128 registers: 8 blocks by registers, fewer by shared memory or grid."""
    h200 = DEVICES["h200"]
    roomy = dict(registers=128, shared_bytes=1000, threads=64, stage_bytes=4096, num_stages=4)
    assert occupancy(h200, grid=10_000, **roomy).blocks == 8
    assert occupancy(h200, grid=10_000, **(roomy | dict(shared_bytes=50_000))).blocks == 4
    few = occupancy(h200, grid=132, **roomy)
    assert (few.blocks, few.warps, few.bytes_in_flight) == (1, 2, 3 * 4096)


def test_every_code_path_is_in_the_reduced_set():
    picks = cases.reduced()
    assert {c.device for c in picks} == {"a100", "l4", "h200"}
    assert {c.op for c in picks if c.num_devices == 4} == {
        "int4_matmul", "paged_attention", "append_kv",
    }  # fmt: skip
    formats = {c.case.get("kv_dtype") for c in picks} - {None}
    assert formats >= {"fp8_e4m3", "fp8_e5m2", "int8", "bfloat16", "float16"}


@pytest.mark.skipif(
    importlib.util.find_spec("jax_cuda12_plugin") is None, reason="needs the compiler wheels"
)
@pytest.mark.parametrize("device", ["a100", "l4", "h200"])
def test_a_kernel_compiles(device):
    request = dict(op="int4_matmul", device=device, case=dict(M=16, N=4096, K=4096))
    run = subprocess.run(
        [sys.executable, "-m", "pallas_kernels.aot.compile_case", json.dumps(request)],
        capture_output=True, text=True, cwd=Path(__file__).parents[2],
    )  # fmt: skip
    assert run.returncode == 0, run.stderr[-2000:]
    assert judge(Compile(**request, critical=True), json.loads(run.stdout)) == []
