# SPDX-License-Identifier: Apache-2.0
"""mypy --strict over the Python samples of README.md and docs/use.md, and over typed_calls.py.

A step of .ci/lint, which has the pinned mypy. Functions of the samples need no annotations.
"""

import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGES = ("README.md", "docs/use.md")
LEAST = 9  # samples that there are


def main() -> int:
    """Write each sample into a file that is named after its page; the result is mypy's."""
    with tempfile.TemporaryDirectory() as folder:
        files = []
        for page in PAGES:
            text = (ROOT / page).read_text(encoding="utf-8")
            samples = re.finditer(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
            for sample in samples:
                line = text[: sample.start()].count("\n") + 1
                name = page.removesuffix(".md").replace("/", "_").lower()
                files.append(Path(folder, f"{name}_line_{line}.py"))
                files[-1].write_text(sample[1], encoding="utf-8")
        assert len(files) >= LEAST, "the pages have lost their samples"
        mypy = [sys.executable, "-m", "mypy"]  # strict, as pyproject.toml says
        samples = subprocess.run(
            [*mypy, "--allow-untyped-defs", "--allow-untyped-calls", *files], cwd=ROOT
        )
        calls = subprocess.run([*mypy, "tests/house/typed_calls.py"], cwd=ROOT)
    return samples.returncode or calls.returncode


if __name__ == "__main__":
    sys.exit(main())
