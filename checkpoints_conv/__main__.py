"""The command line of `python -m checkpoints_conv SOURCE TARGET`."""

import argparse
import sys

from checkpoints_conv.command import run_convert
from checkpoints_conv.converting import DTYPES, FORMATS, QUANT_TYPES


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m checkpoints_conv",
        description="Convert a GGUF file, a Hugging Face folder (dense, AWQ, GPTQ, "
        "compressed-tensors, FP8) or a native checkpoint to another format.",
    )
    parser.add_argument("source", metavar="SOURCE", help="a .gguf file or a checkpoint folder")
    parser.add_argument("target", metavar="TARGET", help="the folder, or GGUF file, to write")
    parser.add_argument("--format", default="native", choices=FORMATS)
    parser.add_argument(
        "--quant-type", choices=QUANT_TYPES, help="gguf: by default as each matrix is stored"
    )
    parser.add_argument("--dtype", choices=DTYPES, help="huggingface: bfloat16 by default")
    parser.add_argument(
        "--kv-heads",
        type=int,
        metavar="N",
        help="give the model N KV heads: fewer are means of the present ones, more are copies",
    )
    parser.add_argument(
        "--verify", action="store_true", help="compare samples of what was written with the source"
    )
    parser.add_argument(
        "--overwrite", action="store_true", help="replace an earlier conversion to this format"
    )
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    options = parser.parse_args()
    return run_convert(
        options.source,
        options.target,
        options.overwrite,
        options.debug,
        format=options.format,
        quant_type=options.quant_type,
        dtype=options.dtype,
        num_kv_heads=options.kv_heads,
        verify=options.verify,
    )


if __name__ == "__main__":
    sys.exit(main())
