# SPDX-License-Identifier: Apache-2.0
"""The command line: ``cuattn info | doctor | kernels | ...``, or ``python -m cuattn info``."""

from __future__ import annotations

import argparse
import os
import pathlib
import signal
import sys


def _info(arguments: argparse.Namespace) -> int:
    from ._cli import system

    return system.show_info(arguments)


def _kernels(arguments: argparse.Namespace) -> int:
    from ._cli import system

    return system.show_kernels(arguments)


def _doctor(arguments: argparse.Namespace) -> int:
    from ._cli import doctor

    return doctor.main(arguments)


def _demo(arguments: argparse.Namespace) -> int:
    from ._cli import demo

    return demo.main()


def _bench(arguments: argparse.Namespace) -> int:
    from ._bench import runner

    return runner.main(arguments)


def _plot(arguments: argparse.Namespace) -> int:
    from ._cli import plot

    return plot.main(arguments.results, arguments.output, arguments.format)


def _explain(arguments: argparse.Namespace) -> int:
    from ._cli import system

    return system.show_explain(arguments)


def parser() -> argparse.ArgumentParser:
    """Build the command line."""
    from . import __version__
    from ._bench import options
    from ._cli import system

    is_script = os.path.basename(sys.argv[0]) == "cuattn"
    top = argparse.ArgumentParser(
        prog="cuattn" if is_script else "python -m cuattn",
        description="Attention on any array, on CPU and CUDA.",
    )
    top.add_argument("--version", action="version", version=f"cuattn {__version__}")
    commands = top.add_subparsers(required=True, metavar="command")

    info = commands.add_parser("info", help="this build, the CPU, GPUs and array libraries")
    info.add_argument("--json", action="store_true", help="as a JSON object")
    info.set_defaults(run=_info)

    doctor = commands.add_parser(
        "doctor", help="what is wrong with this installation, and what to type"
    )
    doctor.add_argument("--json", action="store_true", help="as a JSON list")
    doctor.set_defaults(run=_doctor)

    kernels = commands.add_parser("kernels", help="every compiled kernel")
    kernels.add_argument("--json", action="store_true", help="as a JSON list")
    kernels.set_defaults(run=_kernels)

    demo = commands.add_parser(
        "demo", help="attention on real sentences and on a long input, checked and timed"
    )
    demo.set_defaults(run=_demo)

    bench = commands.add_parser("bench", help="time the library beside others on named workloads")
    options.add_arguments(bench)
    bench.set_defaults(run=_bench)

    plot = commands.add_parser(
        "plot", help="draw speed and memory over the sequence length from bench results"
    )
    plot.add_argument("results", nargs="+", type=pathlib.Path, help="JSON files written by bench")
    plot.add_argument(
        "-o",
        "--output",
        type=pathlib.Path,
        default=pathlib.Path(),
        help="folder for the pictures",
    )
    plot.add_argument("--format", choices=("svg", "png"), default="svg", help="default: svg")
    plot.set_defaults(run=_plot)

    explain = commands.add_parser(
        "explain", help="which kernel a call of attention would run, and why"
    )
    system.add_explain_arguments(explain)
    explain.set_defaults(run=_explain)
    return top


def main() -> int:
    """Run one command; the result is the exit code: 0 good, 1 a failure, 2 a wrong command line."""
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `| head` ends it quietly
    arguments = parser().parse_args()
    try:
        return arguments.run(arguments)
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
