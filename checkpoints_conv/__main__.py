"""The command line of `python -m checkpoints_conv SOURCE TARGET`."""

import argparse
import sys

from checkpoints_conv.command import run_convert


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m checkpoints_conv",
        description="Convert a GGUF file, a Hugging Face folder or a native checkpoint to a native "
        "checkpoint folder.",
    )
    parser.add_argument("source", metavar="SOURCE", help="a .gguf file or a checkpoint folder")
    parser.add_argument("target", metavar="TARGET", help="the folder to write")
    parser.add_argument(
        "--overwrite", action="store_true", help="replace a native checkpoint at TARGET"
    )
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    options = parser.parse_args()
    return run_convert(options.source, options.target, options.overwrite, options.debug)


if __name__ == "__main__":
    sys.exit(main())
