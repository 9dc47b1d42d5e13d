# SPDX-License-Identifier: Apache-2.0
"""benchmarks/fp8_accuracy.py: the errors of quantised attention stay within those of the design's
model, each choice does what it is for, and docs/fp8.md shows the committed figures.
"""

import json
import runpy
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = runpy.run_path(str(ROOT / "benchmarks/fp8_accuracy.py"))
NEED = {"outliers": "hadamard", "channels": "smooth_k"}  # which option a distribution asks for


@pytest.mark.parametrize("name", SCRIPT["DISTRIBUTIONS"])
def test_errors_are_those_of_the_model(name):
    q, k, v = SCRIPT["draw"](name, np.random.default_rng(1), heads=2)
    q = np.ascontiguousarray(q[:, ::32])
    wanted = SCRIPT["exact"](q, k, v)

    def relative(**options):
        return SCRIPT["errors"](SCRIPT["quantised"](q, k, v, options), wanted)["relative"]

    model = SCRIPT["MODEL"]["block, both"][SCRIPT["DISTRIBUTIONS"].index(name)]
    found = relative()
    assert found <= 1.15 * model
    assert relative(mode="block", v_mode="channel") <= 1.15 * model
    if name in NEED:
        assert relative(**{NEED[name]: False}) >= 1.5 * found


def test_the_page_shows_the_committed_figures():
    known = json.loads(SCRIPT["RESULT"].read_text(encoding="utf-8"))
    assert SCRIPT["page"](known) == SCRIPT["PAGE"].read_text(encoding="utf-8")
    rows = known["rows"]
    assert set(rows) == {"bfloat16", *SCRIPT["MODES"]}
    for mode, model in SCRIPT["MODEL"].items():
        for name, bound in zip(SCRIPT["DISTRIBUTIONS"], model, strict=True):
            assert rows[mode][name]["relative"] <= 1.15 * bound, (mode, name)
