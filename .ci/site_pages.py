# SPDX-License-Identifier: Apache-2.0
"""Hooks of mkdocs: the pages that docs/ does not hold, and the links to them.

README.md becomes the first page, __all__ of the package the page of the API, and every file or
folder of the tree that a page links to a page under source/, so that no link leaves the site.
"""

import ast
import os
import posixpath
import re
from pathlib import Path

from mkdocs.structure.files import File

ROOT = Path(__file__).resolve().parents[1]
LINK = re.compile(r"(\]\()([^)\s#:]+)(#[^)\s]*)?(\))")
PICTURES = (".svg", ".png")
HOME, API = "index.md", "api.md"
LONGEST = 200_000  # of a source that is shown, in bytes; results of benchmarks are longer


def page_of(path: str) -> str:
    """Say where a file or folder of the tree, given by its path there, lies in the site."""
    if path == "README.md":
        return HOME
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    shown = path.removeprefix(".")  # mkdocs leaves out what is hidden
    return f"source/{shown}" if path.endswith((".md", *PICTURES)) else f"source/{shown}.md"


def path_of(page: str) -> str:
    """Say where the text of a page lies in the tree."""
    if page == HOME:
        return "README.md"
    return page.removeprefix("source/") if page.startswith("source/") else f"docs/{page}"


def target(path: str, link: str) -> str | None:
    """Find the file or folder of the tree that a link in a page of the tree means, if any."""
    found = posixpath.normpath(posixpath.join(posixpath.dirname(path), link))
    return found if not found.startswith("..") and (ROOT / found).exists() else None


def targets(path: str) -> set[str]:
    """List the files and folders that a page of the tree links to."""
    text = (ROOT / path).read_text(encoding="utf-8")
    return {found for link in LINK.finditer(text) if (found := target(path, link[2]))}


def source_page(path: str) -> str:
    """Make a page that shows a source, or lists a folder."""
    if (ROOT / path).is_dir():
        names = sorted(x.name + "/" * x.is_dir() for x in (ROOT / path).iterdir())
        return f"# {path}/\n\n" + "".join(f"- `{name}`\n" for name in names if name[0] != ".")
    if (ROOT / path).stat().st_size > LONGEST:
        return f"# {path}\n\nData, too long for a page: it lies in the tree.\n"
    ending = Path(path).suffix
    kind = {".cuh": "cuda", ".cu": "cuda", ".h": "cpp"}.get(ending, ending[1:])
    text = (ROOT / path).read_text(encoding="utf-8")
    return f"# {path}\n\n~~~~~~ {kind}\n{text}\n~~~~~~\n"


def api_page() -> str:
    """Make the page of the API, from the docstrings of what the package says is public."""
    tree = ast.parse((ROOT / "python/cuattn/__init__.py").read_text(encoding="utf-8"))
    (names,) = (
        ast.literal_eval(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign) and node.targets[0].id == "__all__"
    )
    package = ROOT / "python/cuattn"  # where a function may have the name of its module
    twice = {name for name in names if (package / f"{name}.py").exists()}
    public = [f"cuattn.{name}" + f".{name}" * (name in twice) for name in names if name[0] != "_"]
    public += ["cuattn.torch", "cuattn.jax"]
    compiled = {"cuattn.CudaError", "cuattn.OutOfBlocksError"}  # without a source to read
    return "# API\n\n" + "".join(f"::: {name}\n\n" for name in public if name not in compiled)


def on_files(files, config):
    """Add the pages that docs/ does not hold."""
    seen, ahead = set(), {"README.md", "CHANGELOG.md", "CONTRIBUTING.md"}
    ahead |= {f"docs/{file.src_uri}" for file in files.documentation_pages()}
    while ahead:
        path = ahead.pop()
        seen.add(path)
        if path.endswith(".md"):
            ahead |= targets(path) - seen
    for path in sorted(seen):
        if path.startswith("docs/") or path == "docs":
            continue
        if path.endswith((".md", *PICTURES)):
            added = File.generated(config, page_of(path), abs_src_path=str(ROOT / path))
        else:
            added = File.generated(config, page_of(path), content=source_page(path))
        files.append(added)
    files.append(File.generated(config, API, content=api_page()))
    return files


def on_page_markdown(markdown, page, config, files):
    """Point the links of a page to the pages of the site."""
    here = page.file.src_uri
    if here == API or (here.startswith("source/") and not (ROOT / path_of(here)).exists()):
        return markdown

    def rewrite(link):
        found = target(path_of(here), link[2])
        if found is None:
            return link[0]
        to = page_of(found)
        if (ROOT / found).is_dir() and found.startswith("docs"):
            inside = sorted((ROOT / found).glob("*.md"))
            to = page_of(str(inside[0].relative_to(ROOT)))
        anchor = link[3] or ""
        return f"{link[1]}{os.path.relpath(to, posixpath.dirname(here) or '.')}{anchor}{link[4]}"

    return LINK.sub(rewrite, markdown)
