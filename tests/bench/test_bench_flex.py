# SPDX-License-Identifier: Apache-2.0
"""The benchmark of masks and scores as functions: results, the check, and what is counted."""

import numpy as np
import pytest

import cuattn
import frameworks
from cuattn._bench import devices, measure, peers
from cuattn._bench.families import FAMILIES
from cuattn._bench.flex import PLAIN, FlexWorkload, functions

torch = frameworks.require("torch")
SMOKE = FAMILIES["flex_smoke"].workloads


@pytest.mark.parametrize("workload", SMOKE, ids=lambda w: w.name)
def test_everybody_who_serves_a_row_gets_it_right(workload):
    contestants = [peers.our_contestant(name) for name in ("auto", "plain")]
    settings = measure.Settings(rounds=3, calls=1, heat_s=0.0)
    row = measure.Run(devices.CpuDevice(), settings, contestants).row(workload, 0.02)
    right = {result["name"] for result in row["results"] if result["status"] == "ok"}
    assert right == {"cuattn:auto"} | ({"cuattn:plain"} if workload.kind in PLAIN else set())


@pytest.mark.parametrize("workload", SMOKE[:9], ids=lambda w: w.name)
def test_the_check_sees_another_function(workload):
    x = workload.draw("cpu")
    sample = x.sample()
    result = peers.our_contestant("auto").prepare(workload, x).call()
    assert sample.error(result).ok
    shifted = lambda b, h, q, k: (k <= q) & (k != 3)  # noqa: E731

    assert not sample.error(cuattn.flex_attention(x.q, x.k, x.v, mask_mod=shifted)).ok


@pytest.mark.parametrize("kind", ["causal", "streaming", "blocks 10 %", "scaled"])
def test_pairs_are_those_that_the_mask_leaves(kind):
    w = FlexWorkload(kind, kind, seqlen=700)
    mask = functions(w, w.captured())[1]
    places = np.arange(700)
    seen = 700 * 700 if mask is None else np.sum(mask(0, 0, places[:, None], places[None, :]))
    assert w.pairs == seen
    assert w.flops == 4.0 * 2 * 16 * 128 * seen


@pytest.mark.parametrize("workload", FAMILIES["flex"].workloads, ids=lambda w: w.name)
def test_a_row_is_served_as_its_kind_says(workload):
    """No row of the table measures another path than the one it is named after."""
    import dataclasses

    w = dataclasses.replace(workload, seqlen=640)
    score, mask = functions(w, w.captured())
    rows = (w.batch, w.seqlen, w.num_heads_q, w.head_dim)
    given = {"device": "h100", "dtype": w.dtype, "score_mod": score, "mask_mod": mask}
    plan = cuattn.explain("flex_attention", rows, rows, rows, **given)
    is_option = w.kind in ("causal", "window", "alibi", "softcap", "scaled")
    is_rows = w.kind in ("documents", "causal rows")
    assert plan.kernel == "sm90"
    assert ("a functor" in plan.reason) == (not is_option and not is_rows)
    assert ("row ranges" in plan.reason) == is_rows
