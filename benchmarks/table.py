# SPDX-License-Identifier: Apache-2.0
"""Print results as Markdown tables: python benchmarks/table.py results.json ..."""

import pathlib
import sys

from cuattn._bench import report
from cuattn._cli.plot import caption, load


def main(paths: list[str]) -> None:
    for path in paths:
        document = load(pathlib.Path(path))
        print(f"{document['about']}\n\n{report.markdown(document)}\n\n{caption(document)}\n")


if __name__ == "__main__":
    main(sys.argv[1:])
