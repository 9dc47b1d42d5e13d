# SPDX-License-Identifier: Apache-2.0
"""Compiled functions: by the text of their source in memory, and on disk as machine code.

The folder is `CUATTN_CACHE_DIR`, else `cuattn` in the user's cache folder. It must belong to the
user, and nobody else may write there, as code is loaded from it. A file is written under another
name and renamed, so that two processes that compile the same need no lock.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import sys
import tempfile
import threading
import warnings
from pathlib import Path

from .. import _core
from .nvrtc import MAJOR, CompileError, nvrtc

MAGIC = b"cuattn functor 1\n"
MOST_BYTES = 256 << 20  # of the folder; what was used longest ago goes first
PACKAGE = Path(__file__).parents[1]

_known: dict[tuple[str, str], int] = {}  # functors of this process, by source and architecture
_lock = threading.Lock()
compiled = 0  # how many sources NVRTC has compiled


def folders() -> list[Path]:
    """Return where the headers of kernels lie."""
    return [PACKAGE / "include", PACKAGE / "include" / "cuattn" / "kernels"]


@functools.lru_cache(maxsize=1)
def headers_key() -> bytes:
    """Return a hash of all headers that a source may include."""
    hashed = hashlib.sha256()
    root = folders()[0]
    for path in sorted(root.rglob("*")):
        if path.suffix in (".h", ".cuh"):
            hashed.update(str(path.relative_to(root)).encode() + b"\0" + path.read_bytes())
    return hashed.digest()


def functor(source: str, arch: str, packed_heads: int = 1, reads_blocks: bool = False) -> int:
    """Return the number of a source's machine code, compiled the first time.

    The source says the same of packed heads and of blocks (packing.py).

    Raises
    ------
    CompileError
        If it is to be compiled and cannot be: no NVRTC, or CUATTN_DISABLE_JIT is set.
    """
    key = (source, arch)
    with _lock:
        if key not in _known:
            code = machine_code(source, arch)
            _known[key] = _core.add_functor(code, packed_heads, reads_blocks)
        return _known[key]


@functools.lru_cache(maxsize=1024)
def name_of(number: int) -> str:
    """Return the name of machine code, the same in every process, and tell XLA's calls of it."""
    with _lock:
        source, arch = next(key for key, found in _known.items() if found == number)
    name = hashlib.sha256(f"{arch}\0{source}".encode()).hexdigest()
    _core.name_functor(name, number)
    return name


def is_disabled() -> bool:
    """Whether CUATTN_DISABLE_JIT is set."""
    return os.environ.get("CUATTN_DISABLE_JIT", "0") not in ("", "0")


def can_compile() -> bool:
    """Whether a functor can be had that no call needs: one that is only faster."""
    with contextlib.suppress(CompileError):
        return not is_disabled() and bool(nvrtc())
    return False


def machine_code(source: str, arch: str) -> bytes:
    """Return the machine code of a source, from the disk or NVRTC."""
    if is_disabled():
        raise CompileError(
            "flex_attention: CUATTN_DISABLE_JIT is set, and this mask or score function would be "
            "compiled; unset it, or write the mask as causal, a window or one interval of keys a "
            "row"
        )
    key = hashlib.sha256(headers_key() + f"{MAJOR} {arch}\0{source}".encode()).hexdigest()
    folder = cache_folder()
    path = None if folder is None else folder / f"{key}.functor"
    found = None if path is None else stored(path)
    if found is None:
        found = compile_now(source, arch)
        if path is not None:
            store(path, found)
    return found


def compile_now(source: str, arch: str) -> bytes:
    """Return what NVRTC makes of a source; say on a terminal that it takes a moment."""
    global compiled
    library = nvrtc()
    if sys.stderr is not None and sys.stderr.isatty():
        print(f"cuattn: compiling a mask or score for {arch} (about 1 s, once)", file=sys.stderr)
    code, _ = library.compile(source, arch, folders())
    compiled += 1
    return code


# The disk


def warn(text: str) -> None:
    """Say once why the disk is of no use."""
    warnings.warn(f"cuattn: {text}", RuntimeWarning, stacklevel=2)


@functools.lru_cache(maxsize=8)
def usable(folder: Path) -> bool:
    """Make the folder, and say whether code may be kept there."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = folder.stat()
    except OSError as error:
        warn(f"compiled masks are not kept, as {folder} cannot be made: {error}")
        return False
    if status.st_uid != os.getuid() or status.st_mode & 0o022:
        warn(f"compiled masks are not kept, as {folder} belongs to or may be written by others")
        return False
    return True


def cache_folder() -> Path | None:
    """Return where machine code is kept; None where it cannot be."""
    given = os.environ.get("CUATTN_CACHE_DIR")
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    folder = Path(given or f"{base}/cuattn").expanduser()
    return folder if usable(folder) else None


def stored(path: Path) -> bytes | None:
    """Return the code of a file; None where there is none, or what is there is not whole."""
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        warn(f"{path} cannot be read, so the mask is compiled again: {error}")
        return None
    start = len(MAGIC) + 32
    code = content[start:]
    if content[:start] == MAGIC + hashlib.sha256(code).digest() and code:
        return code
    warn(f"{path} is damaged, so the mask is compiled again")
    path.unlink(missing_ok=True)
    return None


def store(path: Path, code: bytes) -> None:
    """Write a file whole or not at all, and keep the folder within its size."""
    try:
        place, name = tempfile.mkstemp(dir=path.parent, suffix=".part")
        try:
            with os.fdopen(place, "wb") as file:
                file.write(MAGIC + hashlib.sha256(code).digest() + code)
                file.flush()
                os.fsync(file.fileno())
            os.replace(name, path)
        except BaseException:
            Path(name).unlink(missing_ok=True)
            raise
        shrink(path)
    except OSError as error:
        warn(f"a compiled mask is not kept: {error}")


def shrink(newest: Path) -> None:
    """Remove the files used longest ago while the folder is too large."""
    files = [(p.stat(), p) for p in newest.parent.glob("*.functor") if p != newest]
    total = sum(status.st_size for status, _ in files) + newest.stat().st_size
    for status, path in sorted(files, key=lambda x: max(x[0].st_atime, x[0].st_mtime)):
        if total <= MOST_BYTES:
            return
        path.unlink(missing_ok=True)
        total -= status.st_size
