"""Does a test fail for every rule of the step, of allocation and of scheduling that is broken?

python tests/mutations.py [WORD]: applies one change after another to a copy of the
library and runs the test named beside it, which must fail. WORD picks the rules that contain it.
Last runs, 30 November 2026, 2 cores AMD Zen 5: 9443d9a, jax 0.12.0.1: the 28 of allocation and of
scheduling; fbf5a88, jax 0.10.2: the 12 of the step, four of which (donated, no branch, recompiles,
host) once more when their tests had moved. All 40 caught.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]


class Mutation(NamedTuple):
    rule: str
    file: str
    old: str
    new: str
    test: str


BLOCKS, PREFIX = "helios_jax/cache/blocks.py", "helios_jax/cache/prefix.py"
SCHEDULE, ORDER = "helios_jax/scheduler/schedule.py", "helios_jax/scheduler/order.py"
REQUESTS, RELEASE = "helios_jax/scheduler/requests.py", "helios_jax/scheduler/release.py"
COMMIT, POLICY = "helios_jax/scheduler/commit.py", "helios_jax/scheduler/urgency.py"
CASES, HISTORIES = "tests/scheduler/test_schedule.py", "tests/scheduler/test_properties.py"
URGENCY = "tests/scheduler/test_urgency.py"
POOL, PROGRAMS = "tests/cache/test_blocks.py", "tests/scheduler/test_programs.py"
STAGES, STEP = "helios_jax/engine/programs.py", "helios_jax/engine/step.py"
CHUNK = "helios_jax/engine/chunk.py"
DRAW, VERDICT = "helios_jax/sampling/draw.py", "helios_jax/speculative/acceptance.py"
ENGINE, COMPILED = "tests/engine/test_engine.py", "tests/engine/test_programs.py"
FAULTS = "tests/engine/test_faults.py"
DRAWS = "tests/sampling/test_sampling_draw.py"
ATTENTION = "tests/kernels/test_paged_attention.py"

MUTATIONS = [
    Mutation(
        "a block has one owner",
        BLOCKS, "num_ready=pool.num_ready - num_taken,", "num_ready=pool.num_ready,", POOL,
    ),
    Mutation(
        "free + used = total: a block is free once, whoever releases it",
        BLOCKS, "freed_K &= get_any(marks_P, blocks_K) == mark_K", "", POOL,
    ),
    Mutation(
        "free + used = total: a migrated row gives its narrow blocks back",
        SCHEDULE, "pool=blocks.release(pool, sources_M)", "pool=pool",
        HISTORIES,
    ),
    Mutation(
        "free + used = total: an aborted row gives its blocks back",
        REQUESTS, "return release_rows(dataclasses.replace(state, status_R=status_R))",
        "return dataclasses.replace(state, status_R=status_R)", CASES,
    ),
    Mutation(
        "findable blocks are reused least recently freed first",
        BLOCKS, "blocks_K = blocks_K[::-1]", "pass", POOL,
    ),
    Mutation(
        "the queue of findable blocks never fills",
        BLOCKS, "return _sweep(pool, _SWEEP_FACTOR * width)", "return pool", POOL,
    ),
    Mutation(
        "a shared block is copied before it is written",
        BLOCKS, "(get_any(pool.refcount_P, blocks_B) > 1)", "(blocks_B < -1)", HISTORIES,
    ),
    Mutation(
        "a findable block that is written is not found by its old content",
        BLOCKS, "pool = unpublish(pool, jnp.where(named_B & ~shared_B, blocks_B, -1))", "pass",
        POOL,
    ),
    Mutation(
        "precision is part of the prefix key",
        SCHEDULE, "num_hashed_R=state.num_hashed_R.at[row].set(0),", "", HISTORIES,
    ),
    Mutation(
        "a prefix ends at the first missing block",
        PREFIX, "blocks_W = jnp.where(missing_W, -1, blocks_W)", "pass", POOL,
    ),
    Mutation(
        "what can never fit is refused at submission",
        REQUESTS, "fits_N = needed_N <= ", "fits_N = 0 * needed_N <= ", CASES,
    ),
    Mutation(
        "a block is taken when its first token exists",
        SCHEDULE, "jnp.where(count_O > 0, demand.needed_R[order.rows_R], 0)",
        "demand.needed_R[order.rows_R]", CASES,
    ),
    Mutation(
        "the most urgent always goes on",
        SCHEDULE, "last = jnp.argmax(jnp.where(state.is_running_R, order.rank_R, -1))",
        "last = jnp.argmax(jnp.where(state.is_running_R, -order.rank_R, -999))", CASES,
    ),
    Mutation(
        "a migration that can never fit starts again and pushes out nobody",
        SCHEDULE, "(row >= 0) & (both > state.pool.num_blocks)", "jnp.bool_(False)", CASES,
    ),
    Mutation(
        "a strictly more urgent request preempts when all slots are taken",
        SCHEDULE, "can_preempt = jnp.any(victims_R)", "can_preempt = jnp.bool_(False)", CASES,
    ),
    Mutation(
        "equal urgency preempts nobody",
        ORDER, "order.urgency_R < urgency)", "order.urgency_R <= urgency)", CASES,
    ),
    Mutation(
        "nobody is preempted in vain",
        SCHEDULE, "can_preempt & (needed <= supply + gained)", "can_preempt", CASES,
    ),
    Mutation(
        "skipping is bounded",
        ORDER, "is_skipped_R = state.num_skips_R >= state.limits.max_skips",
        "is_skipped_R = jnp.zeros_like(state.is_aged_R)", CASES,
    ),
    Mutation(
        "preemptions are capped",
        ORDER, "return is_skipped_R | (state.num_preemptions_R >= state.limits.max_preemptions)",
        "return is_skipped_R", CASES,
    ),
    Mutation(
        "waiting rows age",
        ORDER, "state.is_aged_R | (state.is_waiting_R & has_waited_R)", "state.is_aged_R", CASES,
    ),
    Mutation(
        "of rows that waited long one goes first",
        ORDER, "(_is_capped(state) | (state.sequence_R == oldest))", "True", URGENCY,
    ),
    Mutation(
        "a first token that cannot be in time is in nobody's way",
        POLICY, "is_lost_R = end_R > ", "is_lost_R = end_R > 1e9 + ", URGENCY,
    ),
    Mutation(
        "the longest prefills are put off when not all can be in time",
        POLICY, "is_put_off_R = work_R > ", "is_put_off_R = work_R > 1e9 + ", URGENCY,
    ),
    Mutation(
        "nobody pushes out a row that decodes to be in time",
        POLICY, "return jnp.where(decodes_R, ", "return jnp.where(decodes_R & False, ", URGENCY,
    ),
    Mutation(
        "a chunk keeps the token budget",
        SCHEDULE, "jnp.clip(left_O, 0, pending_O)", "pending_O", CASES,
    ),
    Mutation(
        "a narrow row stops at the watermark until it has migrated",
        COMMIT, "return state, named_B & ~crossed_B & taken.granted_B",
        "return state, named_B & taken.granted_B", CASES,
    ),
    Mutation(
        "schedule has no effects",
        SCHEDULE, "    state = age_rows(state, now)",
        "    import jax; jax.debug.print('{}', now); state = age_rows(state, now)", PROGRAMS,
    ),
    Mutation(
        "schedule's cost does not grow with the pool",
        BLOCKS, "return self.num_ready + self.num_cached",
        "return jnp.sum(self.refcount_P == 0) - self.refcount_P.shape[0] + self.num_blocks",
        PROGRAMS,
    ),
    Mutation(
        "the KV pools are never copied: they are donated",
        STAGES, 'donate_argnames="state", ', "", f"{COMPILED}::test_no_stage_copies_the_pools",
    ),
    Mutation(
        "the KV pools are never copied: no branch holds them",
        CHUNK, "lax.fori_loop(0, -(-num_tokens // T), run_tile, (work.pools, hidden_CD))",
        "lax.cond(\n        num_tokens > 0, lambda x: run_tile(0, x), lambda x: x, "
        "(work.pools, hidden_CD)\n    )",
        f"{COMPILED}::test_no_stage_copies_the_pools",
    ),
    Mutation(
        "nothing recompiles once warm",
        STAGES, "if (name, key) not in self._futures:",
        "if (name, key) not in self._futures or name == 'end' and not jax.clear_caches():\n"
        "            forget()",
        f"{COMPILED}::test_nothing_compiles_once_warm",
    ),
    Mutation(
        "no stage waits for the host",
        STEP, "    scheduler = state.scheduler\n    failed_R",
        "    jax.debug.print('{}', state.telemetry.num_steps)\n"
        "    scheduler = state.scheduler\n    failed_R",
        f"{COMPILED}::test_no_stage_copies_the_pools",
    ),
    Mutation(
        "equality with the pure generate",
        CHUNK, "slot_T = block_T * block_tokens + tokens.position_T % block_tokens",
        "slot_T = block_T * block_tokens + (tokens.position_T + 1) % block_tokens",
        f"{ENGINE}::test_requests_get_what_they_would_get_alone",
    ),
    Mutation(
        "sampled speculative output has the target's law",
        VERDICT, "residual_BV = jnp.maximum(p_BV - _at(q_BJV, place_B), 0.0)",
        "residual_BV = p_BV", "tests/speculative/test_acceptance.py",
    ),
    Mutation(
        "a seeded row's tokens do not depend on the batch",
        DRAW, "return jax.vmap(row)(seed_B2, position_B)",
        "return jax.vmap(row)(seed_B2 + len(seed_B2), position_B)",
        f"{DRAWS}::test_a_seeded_row_draws_the_same_alone_and_in_any_batch",
    ),
    Mutation(
        "a row that is not a number fails alone",
        CHUNK, "drawn_B1 = jnp.where(draws_B & ~is_bad_B, drawn_B, -1)[:, None]",
        "drawn_B1 = jnp.where(draws_B & ~jnp.any(is_bad_B), drawn_B, -1)[:, None]",
        f"{FAULTS}::test_a_row_that_is_not_a_number_fails_alone",
    ),
    Mutation(
        "unused KV slots may hold NaN",
        "pallas_kernels/paged_attention/reference.py",
        "values = jnp.where(written[None, :, None], values, 0)", "", ATTENTION,
    ),
    Mutation(
        "casts to FP8 saturate",
        "pallas_kernels/kv_format.py", "limited = jnp.clip(values, -fmt.largest, fmt.largest)",
        "limited = values", "tests/kernels/test_append_kv.py",
    ),
    Mutation(
        "the vocabulary is never sorted",
        DRAW, "    def draw(adjusted_BV):",
        "    adjusted_BV = adjusted_BV + 0 * jnp.sort(adjusted_BV)\n\n    def draw(adjusted_BV):",
        f"{DRAWS}::test_nothing_sorts_the_vocabulary_and_nothing_calls_the_host",
    ),
    Mutation(
        "greedy rows pay for a maximum only",
        DRAW, "return lax.cond(jnp.all(is_greedy(sampling)), first_argmax, draw, adjusted_BV)",
        "return draw(adjusted_BV)", f"{DRAWS}::test_a_greedy_batch_pays_for_a_maximum_only",
    ),
]  # fmt: skip


def main() -> int:
    word = sys.argv[1] if len(sys.argv) > 1 else ""
    missed = 0
    for mutation in [mutation for mutation in MUTATIONS if word in mutation.rule]:
        with tempfile.TemporaryDirectory() as folder:
            for name in ("helios_jax", "pallas_kernels", "checkpoints_conv", "tests"):
                shutil.copytree(ROOT / name, Path(folder) / name)
            shutil.copy(ROOT / "pyproject.toml", folder)
            path = Path(folder) / mutation.file
            text = path.read_text()
            assert text.count(mutation.old) == 1, f"{mutation.rule}: {mutation.old!r} is not there"
            path.write_text(text.replace(mutation.old, mutation.new))
            command = [
                sys.executable,
                "-m",
                "pytest",
                "-q",
                "-x",
                "-n",
                "0",
                "-p",
                "no:cacheprovider",
            ]
            done = subprocess.run(
                [*command, mutation.test],
                cwd=folder, env=os.environ | {"PYTHONPATH": folder}, capture_output=True, text=True,
                timeout=300,
            )  # fmt: skip
        failed = [line for line in done.stdout.splitlines() if line.startswith("FAILED")]
        is_caught = done.returncode == 1 and bool(failed)
        missed += not is_caught
        print(f"{'caught' if is_caught else 'MISSED'}: {mutation.rule}", flush=True)
        print(f"    {failed[0][:110] if failed else done.stdout[-300:]}", flush=True)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
