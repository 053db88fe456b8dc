"""What do the source articles report? Their figures, to set ours beside; claims of others.

One 7B model (32 layers, 8 KV heads after a GQA fine-tune, group-128 AWQ, 16-token blocks, gamma 4,
a 60M draft) on one H100 or A100, private traffic.
"""

# Row: median TTFT ms, p95 TTFT ms, median tokens/s per user, tokens/s of the GPU.
LADDER = {
    "FP16 + MHA + greedy": (412, 738, 31, 1980),
    "+ AWQ 4-bit weights": (366, 651, 35, 2240),
    "+ GQA + FP8 KV": (318, 554, 38, 2610),
    "+ speculative decoding (gamma 4)": (342, 589, 76, 4830),
    "+ priority-aware paged batching": (289, 497, 68, 5410),
}
LADDER_4BIT = "+ AWQ 4-bit weights"
LADDER_COLUMNS = ("median TTFT, ms", "p95 TTFT, ms", "median tok/s per user", "tok/s in all")

# Format: MB a sequence of 2048 tokens, perplexity on their domain.
KV_PRECISION = {
    "FP16": (256, 9.41),
    "FP8 E4M3": (128, 9.44),
    "INT8 symmetric": (128, 9.52),
    "FP8 E5M2": (128, 9.58),
}
# Of AWQ at 4 bits over 16 bits: perplexity at most; what scale search gains over rounding.
AWQ_LOSS, AWQ_GAIN_OVER_RTN = 0.3, (0.1, 0.2)
# Draft distilled on, target: acceptance.
ACCEPTANCE = {
    "draft of the FP16 target, FP16 target": 0.78,
    "draft of the FP16 target, AWQ target": 0.62,
    "draft of the AWQ target, AWQ target": 0.75,
}
ACCEPTANCE_AT_TEMPERATURE = {0.1: 0.75, 1.0: 0.63}
KV_SHARE = 0.23
STALL_SHARE = 0.82
# Share of requests preempted at first, and with 20% more admission pressure; ms of p95 TTFT more.
PREEMPTED = (0.012, 0.07)
PREEMPTION_TTFT_MS = 100.0
SPEED_UP = 2.1
