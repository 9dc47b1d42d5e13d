# SPDX-License-Identifier: Apache-2.0
"""Turns CUDA sources into C++ for the emulator (docs/emulator.md): translate.py ROOT INTO ROOM...

Every .cu, .cuh and .h of each ROOM, a folder of ROOT, is written below INTO at its own path (.cu as
.cu.cpp) with the same line numbers. What g++ does not know is rewritten:

    kernel<<<grid, block, ...>>>(x)     ::emulate::launch(::emulate::Config(grid, block, ...),
                                                          kernel, x)
    __shared__ T x[n];                  auto& x = ::emulate::shared<T[n], ...>();
    extern __shared__ T x[];            auto* x = ::emulate::dynamic_shared<T, ...>();
    asm("cvt.rn.f16.f32 %0, %1;" ...)   ::emulate::ptx::cvt_rn_f16_f32(y, x);
    __global__ void f(...) {            the same, and ::emulate::enter(__PRETTY_FUNCTION__);

A PTX instruction is thus a C++ function of its operands in their order (emulate/ptx.h).
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

OPEN, CLOSE = "([{", ")]}"


def blank(text: str) -> str:
    """Return `text` with comments and the insides of strings as spaces, at the same places."""
    pattern = r'//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])+\''

    def spaces(match: re.Match[str]) -> str:
        body = re.sub(r"[^\n]", " ", match[0])
        return f'"{body[1:-1]}"' if match[0][0] == '"' else body

    return re.sub(pattern, spaces, text, flags=re.DOTALL)


def closing(code: str, start: int) -> int:
    """Return the place behind the bracket that closes the one at `start`."""
    depth = 0
    for at in range(start, len(code)):
        depth += (code[at] in OPEN) - (code[at] in CLOSE)
        if depth == 0:
            return at + 1
    raise ValueError(f"no bracket closes the one before: {code[start : start + 60]!r}")


def split(text: str, mark: str, brackets: str = "([{)]}") -> list[str]:
    """Cut `text` at every `mark` outside of brackets and strings."""
    half = len(brackets) // 2
    parts, depth, begin, code = [], 0, 0, blank(text)
    for at, char in enumerate(code):
        depth += (char in brackets[:half]) - (char in brackets[half:])
        if char == mark and depth == 0:
            parts.append(text[begin:at])
            begin = at + 1
    return [*parts, text[begin:]]


def replace(text: str, begin: int, end: int, new: str) -> str:
    """Put `new` in the place of text[begin:end], with as many line ends."""
    lines = text.count("\n", begin, end) - new.count("\n")
    return text[:begin] + new + "\n" * max(lines, 0) + text[end:]


def launches(text: str) -> str:
    """Rewrite kernel<<<...>>>(...)."""
    while (at := blank(text).rfind("<<<")) >= 0:
        code = blank(text)
        begin = len(code[:at].rstrip())
        if code[begin - 1] == ">":  # template arguments
            depth = 0
            while True:
                begin -= 1
                depth += (code[begin] == ">") - (code[begin] == "<")
                if depth == 0:
                    break
        begin = re.search(r"[\w:]+\s*$", code[:begin]).start()  # type: ignore[union-attr]
        config = code.index(">>>", at)
        arguments = config + 3 + len(code[config + 3 :]) - len(code[config + 3 :].lstrip())
        end = closing(code, arguments)
        kernel, given = text[begin:at].strip(), text[arguments + 1 : end - 1].strip()
        new = f"::emulate::launch(::emulate::Config({text[at + 3 : config]}), {kernel}"
        text = replace(text, begin, end, new + (f", {given})" if given else ")"))
    return text


SHARED = re.compile(r"(extern\s+)?__shared__\s+((?:__align__|alignas)\s*\(([^()]*)\)\s*)?")
DECLARATOR = re.compile(r"(.*?)(\w+)\s*((?:\[[^\]]*\]\s*)*)", re.DOTALL)


def shared_variables(text: str) -> str:
    """Rewrite declarations of shared memory."""
    while match := SHARED.search(blank(text)):
        end = blank(text).index(";", match.end())
        align = text[match.start(3) : match.end(3)] if match[3] else "0"
        kind, statements = "", []
        for declarator in split(text[match.end() : end], ",", "([{<)]}>"):
            named = re.fullmatch(
                r"(.*?)(\w+)\s*((?:\[[^\]]*\]\s*)*)", declarator.strip(), re.DOTALL
            )
            assert named, f"cannot read __shared__ {declarator!r}"
            kind = kind or named[1].strip()
            if match[1]:
                statements.append(
                    f"auto* {named[2]} = ::emulate::dynamic_shared<{kind}, {align}>()"
                )
                continue
            of = f"{kind}{named[3]}, {align}, decltype([] {{}})"  # each lambda is its own type
            statements.append(f"auto& {named[2]} = ::emulate::shared<{of}>()")
        text = replace(text, match.start(), end, "; ".join(statements))
    return text


OPERAND = re.compile(r'\s*"([^"]*)"\s*\((.*)\)\s*', re.DOTALL)


def instruction(template: str, sections: list[str]) -> str:
    """Return the call for one asm statement."""
    values = []
    for operand in (part for section in sections[:2] for part in split(section, ",")):
        if match := OPERAND.fullmatch(operand):
            values.append(f"({match[2]})")
    lines = [line.strip() for line in template.split(";") if line.strip()]
    if not lines:  # what only the optimiser reads
        return "static_cast<void>(0)"
    match = re.fullmatch(r"([a-z][\w.:]*)\s*(.*)", lines[0], re.DOTALL) if lines else None
    reads_a_special_register = "%%" in template
    if len(lines) != 1 or match is None or reads_a_special_register:
        return f'::emulate::fail("this PTX is not emulated: {" ".join(template.split())}")'
    operands = [word for word in re.split(r"[\s,{}\[\]]+", match[2]) if word]
    given = [values[int(word[1:])] if word[0] == "%" else word for word in operands]
    return f"::emulate::ptx::{re.sub('[.:]+', '_', match[1])}({', '.join(given)})"


def assembly(text: str) -> str:
    """Rewrite asm statements."""
    while match := re.search(r"\basm\s*(?:volatile\s*)?\(", blank(text)):
        end = closing(blank(text), match.end() - 1)
        strings, *sections = split(text[match.end() : end - 1], ":")
        literals = re.findall(r'"((?:\\.|[^"\\])*)"', strings)
        template = "".join(literals).replace("\\n", "\n").replace("\\t", " ")
        text = replace(text, match.start(), end, instruction(template, sections))
    return text


def kernels(text: str) -> str:
    """Let each kernel say its name."""
    at = 0
    while (at := blank(text).find("__global__", at + 1)) >= 0:
        code, place = blank(text), at
        while code[place] not in "{;":
            place = closing(code, place) if code[place] == "(" else place + 1
        if code[place] == "{":
            enter = " ::emulate::enter(__PRETTY_FUNCTION__);"
            text = text[: place + 1] + enter + text[place + 1 :]
    return text


def translate(text: str, path: str) -> str:
    """Return the C++ of the CUDA source `text`, whose lines are those of `path`."""
    for step in (shared_variables, assembly, kernels, launches):
        text = step(text)
    return f'#line 1 "{path}"\n{text}'


def main(root: Path, into: Path, rooms: list[str]) -> None:
    """Write every source that is not there yet, or has changed."""
    for room in rooms:
        for path in sorted((root / room).rglob("*")):
            if path.suffix not in (".cu", ".cuh", ".h"):
                continue
            name = str(path.relative_to(root))
            made = into / (name + ".cpp" if path.suffix == ".cu" else name)
            text = translate(path.read_text(), name)
            if not made.exists() or made.read_text() != text:  # else what includes it stays built
                made.parent.mkdir(parents=True, exist_ok=True)
                made.write_text(text)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:])
