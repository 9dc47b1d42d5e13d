# SPDX-License-Identifier: Apache-2.0
"""Join results of one family whose rows were measured apart, on GPUs of one kind at the same time.

    python benchmarks/join.py FIRST.json SECOND.json ... RESULT.json

Machine, libraries and settings must be the same. Each row keeps its commit; a row of the first file
that measured it counts. Bars that compare with rows of another file are judged again.
"""

from __future__ import annotations

import json
import pathlib
import sys
from typing import Any

from cuattn._bench import bars, runner
from cuattn._bench.families import FAMILIES


def joined(paths: list[pathlib.Path]) -> dict[str, Any]:
    """Return the first document with the rows of all, in the order of their family."""
    document = json.loads(paths[0].read_text(encoding="utf-8"))
    rows: dict[str, dict[str, Any]] = {}
    for path in paths:
        for row in runner.kept_rows(path, document):
            rows.setdefault(row["workload"]["name"], row)
    workloads = [w for w in FAMILIES[document["family"]].workloads if w.name in rows]
    document["rows"] = []
    for w in workloads:
        bars.judge(getattr(w, "bars", ()), rows[w.name], document["rows"], document["ceilings"])
        document["rows"].append(rows[w.name])
    document["complete"] = len(workloads) == len(FAMILIES[document["family"]].workloads)
    document["files_joined"] = len(paths)
    return document


def main(words: list[str]) -> int:
    if len(words) < 3:
        print(__doc__, file=sys.stderr)
        return 2
    *paths, result = map(pathlib.Path, words)
    runner.writer(result)(joined(paths))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
