# SPDX-License-Identifier: Apache-2.0
"""Same as `python -m cuattn bench`; results go to benchmarks/results unless -o says otherwise."""

import argparse
import pathlib
import sys

from cuattn._bench import options, runner


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    options.add_arguments(parser)
    parser.set_defaults(output=pathlib.Path(__file__).parent / "results")
    return runner.main(parser.parse_args())


if __name__ == "__main__":
    sys.exit(main())
