"""Measures transformers on PyTorch in this process: `python transformers_worker.py JOB RESULT`.

Stands alone, so that an interpreter without Helios can run it.
"""

import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch  # pyright: ignore[reportMissingImports]
import transformers  # pyright: ignore[reportMissingImports]


def load(path: Path, dtype: torch.dtype):
    """The model with dense weights of `dtype`, from a folder or dequantised from a GGUF file."""
    options: dict[str, Any] = {"dtype": dtype, "attn_implementation": "sdpa"}
    folder = path
    if path.is_file():
        folder, options["gguf_file"] = path.parent, path.name
        # Newer versions would keep the blocks packed where they find a kernel for them.
        if hasattr(transformers, "GgufConfig"):
            options["quantization_config"] = transformers.GgufConfig(dequantize=True)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, **options).eval()
    linears = [module for module in model.modules() if isinstance(module, torch.nn.Linear)]
    assert linears and all(linear.weight.dtype == dtype for linear in linears), "not dense"
    return model


def measure(job: dict[str, Any]) -> dict[str, Any]:
    """Runs a `Workload.job` through `model.generate`: greedy, with a KV cache, never ending early.

    A stopping criterion, which `generate` calls after every token, takes the times: the prefill's
    up to the first token, decoding's over exactly `output_tokens` further ones.
    """
    torch.set_num_threads(job["num_threads"])
    model = load(Path(job["model"]), getattr(torch, job["dtype"]))

    def run(prompts: list[list[int]], num_tokens: int) -> tuple[float, float]:
        times: list[float] = []

        def note_time(input_ids, scores, **unused):
            times.append(time.perf_counter())
            return torch.zeros(len(prompts), dtype=torch.bool)

        tokens = torch.tensor(prompts)
        config = transformers.GenerationConfig(
            max_new_tokens=num_tokens,
            min_new_tokens=num_tokens,
            do_sample=False,
            use_cache=True,
            eos_token_id=None,
            pad_token_id=0,
        )
        started = time.perf_counter()
        with torch.inference_mode():
            model.generate(
                tokens,
                attention_mask=torch.ones_like(tokens),
                generation_config=config,
                stopping_criteria=transformers.StoppingCriteriaList([note_time]),
            )
        assert len(times) == num_tokens
        return times[0] - started, times[-1] - times[0]

    decode_seconds, total_seconds, cpu_seconds = [], [], []
    for prompts in job["decode_prompts"]:
        run(prompts, job["output_tokens"] + 1)
        cpu_started = time.process_time()
        to_first, to_last = run(prompts, job["output_tokens"] + 1)
        cpu_seconds.append(time.process_time() - cpu_started)
        decode_seconds.append(to_last)
        total_seconds.append(to_first + to_last)
    prefill = [job["prefill_prompt"]]
    run(prefill, 1)
    prefill_seconds = [run(prefill, 1)[0] for _ in range(job["num_prefills"])]
    return {
        "versions": {"transformers": transformers.__version__, "torch": torch.__version__},
        "weights": f"dense {job['dtype']}, sdpa attention",
        "decode_seconds": decode_seconds,
        "total_seconds": total_seconds,
        "cpu_seconds": cpu_seconds,
        "prefill_seconds": statistics.median(prefill_seconds),
    }


if __name__ == "__main__":
    result = measure(json.loads(Path(sys.argv[1]).read_text()))
    Path(sys.argv[2]).write_text(json.dumps(result))
