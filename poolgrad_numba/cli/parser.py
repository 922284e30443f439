"""The arguments of the command and of its subcommands, with their help texts."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Final, NoReturn

from poolgrad_numba import OPS, __version__
from poolgrad_numba.bench.cases import BY_NAME, QUICK
from poolgrad_numba.cli.common import CommandError
from poolgrad_numba.config import DETERMINISTIC_VARIABLE, NUM_THREADS_VARIABLE
from poolgrad_numba.problem import INDEX_DTYPES, VALUE_DTYPES

PROGRAM: Final = "poolgrad-numba"

_DEMO = """\
Run the four operators on real input: the photograph that ships with Matplotlib
and the brain scan that ships with NiBabel. A forward pooling makes the indices;
each operator then runs in both modes, with one thread and with all, is compared
with a plain Python loop, and is timed. One picture shows the inputs and their
gradients. The exit code is 0 if every check holds, 1 if one fails.

Needs the extra packages: pip install 'poolgrad_numba[demo]'
"""

_RUN = """\
Run one operator on the arrays in a .npz file, as numpy.savez writes it:

  grad_output  float32, float64, float16 or bfloat16; of the output's shape
  indices      int32 or int64, of the same shape; for max pooling only
  input_shape  (N, C, spatial sizes...) or (C, spatial sizes...)

Other keys are ignored. The result is written as grad_input, of input_shape and
of grad_output's dtype.

NumPy files have no name for bfloat16: numpy.savez stores it as raw items of two
bytes, |V2. So a grad_output of |V2 is read as bfloat16, and a grad_input of
bfloat16 is stored as |V2: array.view(ml_dtypes.bfloat16) gives it back.
"""

_RUN_END = """\
A window option takes one number for all axes or one for each axis, and is
allowed only where the operator has it. --kernel-size is then required; the
others have the operator's own defaults. The output file is replaced in one
step, or not at all. The time that is printed includes loading or compiling the
kernels.

example: poolgrad-numba run avg_pool3d_backward in.npz -o out.npz
           --kernel-size 3 --stride 2 --padding 1 0 0
"""

_INFO = """\
Print what decides how the operators run here: versions, processor, threads,
settings, and the place of the kernel cache.
"""

_WARMUP = """\
Compile kernels now, so that later processes load them from the cache. Every
algorithm of the operators that are asked for runs once on tiny input.

Needs the extra packages: pip install 'poolgrad_numba[demo]'
"""

_BENCH = """\
Time both modes beside a plain copy and a streaming copy of as many bytes, and
beside PyTorch and JAX where they are installed. All take turns inside this
process, and every result is checked first. The tables show medians; the files
hold all numbers.

Needs the extra packages: pip install 'poolgrad_numba[demo]'
"""

_BENCH_END = """\
examples: poolgrad-numba bench --quick --json now.json
          poolgrad-numba bench compare before.json now.json
"""

_COMPARE = """\
Compare two files of bench --json, row by row. A time counts beside what its own
run took for a plain copy and for a fixed piece of the interpreter's work, so
that two machines, or a busy one, can be compared. The exit code is 0 if no row
of BASE became slower by more than the threshold or is missing in HEAD, else 1.
"""


class _Parser(argparse.ArgumentParser):
    """A parser whose errors are one line, without the usage text, and whose options must be spelled out."""

    def __init__(self, **options: object) -> None:
        defaults = {"allow_abbrev": False, "formatter_class": argparse.RawDescriptionHelpFormatter}
        super().__init__(**{**defaults, **options})  # type: ignore[arg-type]

    def error(self, message: str) -> NoReturn:
        raise CommandError(f"{message} (see {self.prog} --help)")


def make_parser() -> argparse.ArgumentParser:
    """Build the parser; what it returns has ``command``, the name of the subcommand's module."""
    parser = _Parser(
        prog=PROGRAM,
        description="Gradients of pooling on multicore CPUs, in a fast mode and in a deterministic mode that gives "
        "the same bits for any number of threads.",
        epilog="Exit codes: 0 done, 1 a check of the demo failed or a comparison found something slower, 2 an error, "
        "which one line on stderr names.",
        formatter_class=argparse.HelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"{PROGRAM} {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    _add_demo(commands.add_parser("demo", help="run, check, time and draw all operators", description=_DEMO))
    run = commands.add_parser("run", help="run one operator on a file", description=_RUN, epilog=_RUN_END)
    _add_run(run)
    info = commands.add_parser("info", help="print versions, processor, threads and settings", description=_INFO)
    info.add_argument("--json", action="store_true", help="print one JSON object instead of lines")
    _add_warmup(commands.add_parser("warmup", help="compile kernels into the cache", description=_WARMUP))
    _add_bench(
        commands.add_parser(
            "bench", help="time the operators, or compare two such runs", description=_BENCH, epilog=_BENCH_END
        )
    )
    return parser


def _add_demo(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--picture",
        metavar="PATH",
        type=Path,
        default=Path("poolgrad_demo.png"),
        help="where to write the picture, a PNG file (default: poolgrad_demo.png in the current directory)",
    )


def _add_run(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("operator", metavar="OPERATOR", choices=sorted(OPS), help=f"one of: {', '.join(sorted(OPS))}")
    parser.add_argument("input", metavar="IN.npz", type=Path, help="file with the operands")
    parser.add_argument(
        "-o", "--output", metavar="OUT.npz", type=Path, required=True, help="file for the result; may be the input"
    )

    # Only what the user gives is passed on, so that the operators' own defaults hold.
    window = parser.add_argument_group("window", argument_default=argparse.SUPPRESS)
    for option, text in (
        ("--kernel-size", "cells of the window"),
        ("--stride", "cells from one window to the next (default: the kernel size)"),
        ("--padding", "cells of padding on both sides (default: 0)"),
        ("--dilation", "cells from one tap of the window to the next (default: 1)"),
    ):
        window.add_argument(option, metavar="N", type=int, nargs="+", help=text)
    window.add_argument("--ceil-mode", action="store_true", help="let a last window hang over the end")
    window.add_argument(
        "--exclude-pad",
        "--no-count-include-pad",
        dest="count_include_pad",
        action="store_false",
        help="leave the padding out of the average's divisor",
    )
    window.add_argument(
        "--divisor-override", metavar="N", type=int, help="divide by this number; may be negative, not 0"
    )

    how = parser.add_argument_group(
        "how to run",
        f"Without these, the environment variables {DETERMINISTIC_VARIABLE} (0 or 1)\n"
        f"and {NUM_THREADS_VARIABLE} hold; without those, fast mode and all threads.",
    )
    mode = how.add_mutually_exclusive_group()
    mode.add_argument(
        "--deterministic", action="store_const", const=True, dest="deterministic", help="the same bits, always"
    )
    mode.add_argument(
        "--fast", action="store_const", const=False, dest="deterministic", help="free to reorder additions"
    )
    how.add_argument("--threads", metavar="N", type=int, help="the most threads to use")


def _add_warmup(parser: argparse.ArgumentParser) -> None:
    def add(option: str, choices: list[str], default: list[str], text: str) -> None:
        names = ", ".join(choices)
        parser.add_argument(
            option,
            metavar=option[2:-1].upper(),
            nargs="+",
            choices=choices,
            default=default,
            help=f"{text}, one or more of: {names} (default: {'all' if default == choices else ' '.join(default)})",
        )

    add("--ops", sorted(OPS), sorted(OPS), "operators")
    add("--dtypes", [dtype.name for dtype in VALUE_DTYPES], ["float32"], "dtypes of the values")
    add("--index-dtypes", [dtype.name for dtype in INDEX_DTYPES], ["int64"], "dtypes of the indices")
    add("--modes", ["fast", "deterministic"], ["fast", "deterministic"], "modes")


def _add_bench(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--cases", metavar="NAME", nargs="+", choices=list(BY_NAME), help=f"one or more of: {', '.join(BY_NAME)}"
    )
    parser.add_argument(
        "--threads", metavar="N", type=int, nargs="+", help="numbers of threads, one after the other (default: all)"
    )
    parser.add_argument("--rounds", metavar="N", type=_positive, help="turns of each (default: 20; with --quick, 5)")
    parser.add_argument("--quick", action="store_true", help=f"fewer rounds, and only: {', '.join(QUICK)}")
    parser.add_argument("--cold-start", action="store_true", help="also time first calls in fresh processes (minutes)")
    for option, text in (
        ("--json", "where to write all numbers, for compare"),
        ("--csv", "where to write the rows as a table"),
        ("--picture", "where to write a picture of the shares of the copy limit, a PNG file"),
        ("--markdown", "where to write the tables for a page of documentation"),
    ):
        parser.add_argument(option, metavar="FILE", type=Path, help=text)
    actions = parser.add_subparsers(dest="action", metavar="compare")
    compare = actions.add_parser("compare", help="compare two files of --json", description=_COMPARE)
    compare.add_argument("base", metavar="BASE", type=Path, help="file of the earlier run")
    compare.add_argument("head", metavar="HEAD", type=Path, help="file of the later run")
    compare.add_argument(
        "--threshold", metavar="X", type=float, default=1.25, help="slowdown that is still allowed (default: 1.25)"
    )


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"got {number}, wanted at least 1")
    return number
