# SPDX-License-Identifier: Apache-2.0
"""Write the table of docs/kernels.md from cuattn.kernels(), the list of what is compiled.

python docs/make_kernels.py            # needs a build with CUDA
python docs/make_kernels.py --check    # only say whether the table is up to date
"""

from __future__ import annotations

import argparse
import pathlib
import sys
from typing import Any

import cuattn

PAGE = pathlib.Path(__file__).resolve().parent / "kernels.md"
BEGIN, END = "<!-- kernels:begin -->", "<!-- kernels:end -->"
HEADINGS = ("op", "kernel", "dtypes", "head_dim", "masks", "scores", "instances")


def is_cuda(row: dict[str, Any]) -> bool:
    """Whether an instance runs on GPUs: its arch then begins with a compute capability."""
    return row["arch"][:1].isdigit()


def unique(values: Any) -> list[Any]:
    """Drop repetitions, keep the order."""
    return list(dict.fromkeys(values))


def words(values: Any) -> str:
    """List what occurs, once each."""
    return ", ".join(map(str, unique(values)))


def head_dim(row: dict[str, Any]) -> str:
    """Name the head size: one number, or two where that of v differs."""
    if row["head_dim"] == row["head_dim_v"]:
        return str(row["head_dim"])
    return f"{row['head_dim']} x {row['head_dim_v']}"


def table() -> str:
    """Format one line for each op and kernel.

    Archs and instruction sets, which a build chooses, are left out, so that the table is the same
    for every build with CUDA.
    """
    rows = sorted(cuattn.kernels(), key=is_cuda)
    lines = [f"| {' | '.join(HEADINGS)} |", "| --- " * len(HEADINGS) + "|"]
    for op, kernel, cuda in unique((r["op"], r["kernel"], is_cuda(r)) for r in rows):
        group = [r for r in rows if (r["op"], r["kernel"], is_cuda(r)) == (op, kernel, cuda)]
        dims = words(head_dim(r) for r in sorted(group, key=lambda r: (r["head_dim"], head_dim(r))))
        if len({r["mask"] for r in group}) == 1 and group[0]["mask"] == "any":
            dims = f"to {dims}"
        cells = (
            op,
            f"{kernel} ({'CUDA' if cuda else 'CPU'})",
            words(r["dtype"] for r in group),
            dims,
            words(r["mask"] for r in group),
            words(r["score"] for r in group),
            str(len(group)),
        )
        lines.append(f"| {' | '.join(cells)} |")
    count = sum(map(is_cuda, rows))
    lines += ["", f"{count} of these {len(rows)} entries are CUDA kernels."]
    return "\n".join(lines)


def replaced(text: str) -> str:
    """Return the page with the table rewritten."""
    before, rest = text.split(BEGIN)
    return f"{before}{BEGIN}\n{table()}\n{END}{rest.split(END)[1]}"


def main() -> int:
    """Rewrite or check the page."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="change nothing; 1 if out of date")
    arguments = parser.parse_args()
    if cuattn.info()["cuda"] is None:
        print("make_kernels: this build has no CUDA kernels to list", file=sys.stderr)
        return 2
    old = PAGE.read_text(encoding="utf-8")
    new = replaced(old)
    if arguments.check:
        return int(new != old)
    PAGE.write_text(new, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
