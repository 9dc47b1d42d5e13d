# SPDX-License-Identifier: Apache-2.0
"""mypy --strict and pyright over typed_calls.py and the samples of README.md and docs/use.md.

A step of .ci/lint, which has both pinned; pyright as basedpyright, whose wheel brings its engine.
Functions of the samples need no annotations.
"""

import json
import re
import shutil
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
        shutil.copy(ROOT / "tests/house/typed_calls.py", folder)
        read = run_pyright(folder)
    return samples.returncode or calls.returncode or read.returncode


def run_pyright(folder: str) -> subprocess.CompletedProcess[bytes]:
    """Run pyright in its standard mode over a folder, without the frameworks, as mypy here."""
    settings = {
        "typeCheckingMode": "standard",
        "extraPaths": [str(ROOT / "python")],
        "reportMissingImports": False,
        "reportMissingModuleSource": False,
    }
    Path(folder, "pyrightconfig.json").write_text(json.dumps(settings), encoding="utf-8")
    pyright = [sys.executable, "-m", "basedpyright", "-p", folder]
    return subprocess.run([*pyright, "--pythonpath", sys.executable])


if __name__ == "__main__":
    sys.exit(main())
