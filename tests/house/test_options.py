# SPDX-License-Identifier: Apache-2.0
"""The table of options, python/cuattn/_options.py, and all that carries an option agree.

`complaints` names each file that a table asks to change. The real one asks for none. A made-up
option, planted in a copy, asks for the files that docs/add_an_option.md lists, and for no other.
"""

import ast
import ctypes
import inspect
import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import cuattn

ROOT = Path(__file__).resolve().parents[2]
TABLE = ROOT / "python/cuattn/_options.py"
GENERATOR = runpy.run_path(str(ROOT / "cmake/generate_options.py"))
OPTIONS = runpy.run_path(str(TABLE))
MADE_UP = '("temper", "number", 0.5, ALL, "made up"),'

FUNCTIONS = {  # where each op is written by hand
    "attention": ("python/cuattn/attention.py", "python/cuattn/jax/attention.py"),
    "attention_varlen": ("python/cuattn/attention.py", "python/cuattn/jax/attention.py"),
    "paged_attention": ("python/cuattn/paged.py", "python/cuattn/jax/paged.py"),
    "paged_attention_v1": ("python/cuattn/paged.py",),
    "paged_attention_v2": ("python/cuattn/paged.py",),
    "paged_plan": ("python/cuattn/paged.py",),
    "cascade_attention": ("python/cuattn/cascade.py",),
    "append_attention": ("python/cuattn/append.py",),
}
C_TYPES = {
    "size_t": ctypes.c_size_t,
    "int32_t": ctypes.c_int32,
    "int64_t": ctypes.c_int64,
    "double": ctypes.c_double,
    "const DLTensor*": ctypes.c_void_p,
    "const char*": ctypes.c_char_p,
}
ANNOTATIONS = {
    "flag": "bool",
    "count": "int",
    "length": "int",
    "number": "float",
    "pair": "tuple[int, int]",
}
LITERALS = {  # of python/cuattn/_types.py; cuattn.jax says str
    "layout": "Layout",
    "kv_layout": "KvLayout",
    "kv_dtype": "KvDtype",
    "dtype": "KvDtype",
    "accumulate": "Accumulate",
    "backend": "Backend",
}
TYPES = "python/cuattn/_types.py"
SHARED = {"attention": "DenseOptions", "attention_varlen": "VarlenOptions",
          "paged_attention": "PagedOptions"}  # fmt: skip


def planted(row):
    """The names of the table's module with one row more."""
    text = TABLE.read_text().replace('    ("sinks", ', f'    {row}\n    ("sinks", ', 1)
    names = {"__name__": "planted"}
    exec(compile(text, str(TABLE), "exec"), names)
    assert len(names["TABLE"]) == len(OPTIONS["TABLE"]) + 1
    return names


def keywords_of(path, op):
    """By name: the default and the annotation of each argument of a function after the `*`."""
    for node in ast.parse((ROOT / path).read_text()).body:
        is_overload = isinstance(node, ast.FunctionDef) and "overload" in map(
            ast.unparse, node.decorator_list
        )
        if isinstance(node, ast.FunctionDef) and node.name == op and not is_overload:
            pairs = zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True)
            found = {
                a.arg: (d and ast.literal_eval(d), ast.unparse(a.annotation)) for a, d in pairs
            }
            positional = tuple(argument.arg for argument in node.args.args)
            return positional, found, ast.get_docstring(node)
    raise AssertionError(f"{path} has no {op}")


def described(docstring):
    """The names that the section Parameters of a docstring has a paragraph for."""
    section = docstring.split("Parameters\n----------\n")[1].split("\n\n")[0]
    lines = re.findall(r"^(\w[\w, ]*?)(?: : .*)?$", section, re.MULTILINE)
    return {name for line in lines for name in line.split(", ")}


def signatures(options):
    """What the signatures and docstrings of Python lack, file by file."""
    for op, paths in FUNCTIONS.items():
        for path in paths:
            positional, keywords, docstring = keywords_of(path, op)
            expected = {
                option.name: option
                for option in options["options_of"](op)
                if option.name not in options["OPS"][op].positional
                and not ("jax" in path and option.kind in options["PASSES"])
            }
            extents = set(options["OPS"][op].extents)
            if positional != options["OPS"][op].positional:
                yield path, f"{op} takes {positional} by place"
            if set(keywords) - extents != set(expected):
                names = sorted(set(keywords) - extents ^ set(expected))
                yield path, f"the signature of {op} differs in {names}"
            for name in sorted({*expected, *positional} - described(docstring)):
                yield path, f"the docstring of {op} has no paragraph on {name}"
            for name in set(keywords) & set(expected):
                option, (default, annotation) = expected[name], keywords[name]
                if default != option.default_of(op) or type(default) is not type(
                    option.default_of(op)
                ):
                    yield path, f"{op} says {name}={default!r}"
                word = "str" if "jax" in path else LITERALS.get(name)
                word = word if name in LITERALS else ANNOTATIONS.get(option.kind)
                if word and annotation != word + " | None" * (default is None):
                    yield path, f"{op} says {name}: {annotation}"


def typed_dicts():
    """The TypedDicts of _types.py: name, annotation of each key, those inherited included."""
    found = {}
    for node in ast.parse((ROOT / TYPES).read_text()).body:
        if isinstance(node, ast.ClassDef):
            fields = {}
            for base in node.bases:
                fields |= found.get(ast.unparse(base), {})
            for line in node.body:
                if isinstance(line, ast.AnnAssign):
                    fields[line.target.id] = ast.unparse(line.annotation)
            found[node.name] = fields
    return found


def types(options):
    """What the types that overloads share lack: each option, annotated as the function does."""
    dicts = typed_dicts()
    for op, name in SHARED.items():
        _, keywords, _ = keywords_of(FUNCTIONS[op][0], op)
        expected = {
            option.name
            for option in options["options_of"](op)
            if option.name not in options["OPS"][op].positional
        } - {"return_lse", "lse_out"}  # which each overload says itself
        if set(dicts[name]) != expected:
            yield TYPES, f"{name} differs in {sorted(set(dicts[name]) ^ expected)}"
        for key in set(dicts[name]) & set(keywords):
            annotation = keywords[key][1].replace("ArrayT", "Array")
            if dicts[name][key] != annotation:
                yield TYPES, f"{name} says {key}: {dicts[name][key]}, {op} says {annotation}"


def c_fields(options, option, default):
    """The fields of an option in a C struct: type, name, and the default, None if NULL or unset."""
    name = option.name
    match option.kind:
        case "flag" | "count":
            return [("int32_t", name, int(default))]
        case "length":
            return [("int64_t", name, default)]  # None is what the struct says, 0 or -1
        case "number" if default is None:
            return [("int32_t", f"has_{name}", 0), ("double", name, None)]
        case "number":
            return [("double", name, default)]
        case "pair":
            sides = zip(("left", "right"), default, strict=True)
            return [("int64_t", f"{name}_{side}", value) for side, value in sides]
        case "word":
            return [("int32_t", name, options["WORDS"][name].index(default))]
        case "text":
            return [("const char*", name, None)]  # NULL stands for the default
        case "scale":
            return [("double", name, 1.0), ("const DLTensor*", f"{name}s", None)]
        case _:
            return [("const DLTensor*", name, None)]


def c_struct(struct):
    """The fields of a struct of c_api.h: (name, type)."""
    text = re.sub(r"/\*.*?\*/", "", (ROOT / "include/cuattn/c_api.h").read_text(), flags=re.DOTALL)
    body = text.split(f"}} cuattn_{struct}_options;")[0].rpartition("typedef struct {")[2]
    fields = []
    for declaration in filter(None, map(str.strip, body.split(";"))):
        words, *more = declaration.replace(" *", "* ").split(",")
        kind, _, first = words.rpartition(" ")
        fields += [(n.replace("*", "").strip(), kind.strip()) for n in (first, *more)]
    return fields


def c_defaults(struct):
    """The struct as the library's own init leaves it."""
    fields = [(name, C_TYPES[kind]) for name, kind in c_struct(struct)]
    layout = type(struct, (ctypes.Structure,), {"_fields_": fields})
    (library,) = (Path(cuattn.__file__).parent / "lib").glob("libcuattn.so*")
    options = layout()
    init = getattr(ctypes.CDLL(str(library)), f"cuattn_{struct}_options_init")
    init(ctypes.byref(options), ctypes.c_size_t(ctypes.sizeof(layout)))
    assert options.struct_size == ctypes.sizeof(layout)
    return options


def c_structs(options):
    """What the structs of c_api.h lack, and which defaults the library sets otherwise."""
    path, rules = "include/cuattn/c_api.h", "src/options.h"
    for struct, first in (("attention", "attention"), ("paged", "paged_attention")):
        found, defaults = dict(c_struct(struct)), c_defaults(struct)
        expected = {"struct_size", "version" if struct == "paged" else "reserved"}
        text = (ROOT / rules).read_text()
        text = text.split(f"struct OptionsRules<cuattn_{struct}_options> {{")[1].split("};")[0]
        for option in options["fields_of"](struct):
            for kind, name, default in c_fields(options, option, option.default_of(first)):
                expected.add(name)
                if found.get(name) != kind:
                    yield path, f"cuattn_{struct}_options has {name}: {found.get(name)}"
                elif default is not None and getattr(defaults, name) != default:
                    yield rules, f"cuattn_{struct}_options_init sets {name} otherwise"
                if default and not re.search(rf"\bo\.{name} =", text):
                    yield rules, f"{name} of cuattn_{struct}_options has no default"
        for name in sorted(set(found) - expected):
            yield path, f"cuattn_{struct}_options has {name}, which is no option"
        if f"offsetof(cuattn_{struct}_options, {list(found)[-1]})" not in text:
            yield rules, f"kEnd is not that of {list(found)[-1]}"


def cpp_fields(option, default):
    """The fields of an option in a C++ struct: its name, and its default as it is spelled."""
    name = option.name
    match option.kind:
        case "flag":
            return [(name, str(default).lower())]
        case "pair":
            return [(f"{name}_left", "kUnlimited"), (f"{name}_right", "kUnlimited")]
        case "number" if default is None:
            return [(name, 'std::nan("")')]
        case "length" if default is None:
            return [(name, "-1")]
        case "word":
            kinds = {"layout": "Layout", "kv_layout": "KvLayout", "accumulate": "Accumulate"}
            kind = kinds.get(name, "KvDtype")
            return [(name, f"{kind}::{default or 'automatic'}")]
        case "text":
            return [(name, f'"{default}"')]
        case "scale":
            return [(name, "1.0"), (f"{name}s", "nullptr")]
        case "array" | "buffer":
            return [(name, "nullptr")]
        case _:
            return [(name, str(default))]


def cpp_structs(options):
    """What the structs of attention.h lack: the field with its default, and its copy into C."""
    path = "include/cuattn/attention.h"
    text = " ".join((ROOT / path).read_text().split())
    for struct, first, name, copy in (
        ("attention", "attention", "AttentionOptions", "COptions"),
        ("paged", "paged_attention", "PagedOptions", "CPagedOptions"),
    ):
        body = text.split(f"struct {name} {{")[1].split("};")[0]
        copied = text.split(f"explicit {copy}(")[1].split("};")[0]
        ops = {op: row for op, row in options["OPS"].items() if row.struct == struct}
        for option in options["fields_of"](struct):
            if all(option.name in ops[op].positional for op in option.ops if op in ops):
                continue  # an argument of the function
            if option.name == "return_lse":
                continue  # which `lse` says
            for field, default in cpp_fields(option, option.default_of(first)):
                if not re.search(rf"\b{field} = {re.escape(default)}[,;]", body):
                    yield path, f"{name} has no {field} = {default}"
                if not re.search(rf"\bc\.{field} = ", copied):
                    yield path, f"{copy} does not copy {field}"


def generated(options):
    """Which generated files are not what the table makes of them."""
    for path, text in GENERATOR["written"](options).items():
        if path.read_text() != text:
            yield str(path.relative_to(ROOT)), "run cmake/generate_options.py"


def complaints(options):
    """All of them: a file, and what it lacks."""
    checks = (generated, signatures, types, c_structs, cpp_structs)
    return [complaint for check in checks for complaint in check(options)]


def test_all_that_carries_an_option_agrees_with_the_table():
    assert not complaints(OPTIONS)


def test_a_made_up_option_asks_for_the_files_that_the_page_lists():
    page = (ROOT / "docs/add_an_option.md").read_text()
    carriers = page.split("## What carries it")[1].split("\n## ")[0]
    listed = {link.removeprefix("../") for link in re.findall(r"\]\(([^)]+)\)", carriers)}
    listed = {"docs/" + link if "/" not in link else link for link in listed}
    asked = {path for path, _ in complaints(planted(MADE_UP))}
    assert asked == listed - {"python/cuattn/_options.py", "cmake/generate_options.py"}


def test_a_made_up_option_is_generated():
    texts = {p.name + p.parent.name: t for p, t in GENERATOR["written"](planted(MADE_UP)).items()}
    call, xla = texts["options.hcall"], texts["options.hxla"]
    assert call.count("  nb::handle temper;") == 2
    assert call.count('{"temper", &Args::temper},') == 5  # of both structs, and three functions
    line = 'if (args.temper.is_valid()) o.temper = parse_double(op, "temper", args.temper);'
    assert call.count(line) == 2
    assert xla.count('o.temper = number(frame, "temper");') == 2
    assert "| `temper` | `0.5` | `0.5` | `0.5` |  |  |  | made up |" in texts["layouts.mddocs"]


def test_literals_are_the_words_of_the_table_and_the_rungs_of_the_ladder():
    from cuattn import _types

    words = OPTIONS["WORDS"]
    assert _types.Layout.__args__ == words["layout"][:2]  # merge_states alone has the others
    assert _types.KvLayout.__args__ == words["kv_layout"]
    assert (None, *_types.KvDtype.__args__) == words["kv_dtype"]
    assert _types.Accumulate.__args__ == words["accumulate"]
    q = np.ones((1, 1, 1, 8), np.float32)
    with pytest.raises(ValueError, match="backend must be") as refused:
        cuattn.attention(q, q, q, backend="nosuch")
    rungs = re.findall(r"'(\w+)'", str(refused.value).split(", got")[0])
    assert set(_types.Backend.__args__) == set(rungs)


@pytest.mark.parametrize(
    ("row", "line"),
    [
        ('("temper", "flag", False, ROWS, "")', 'o.temper = parse_bool(op, "temper"'),
        ('("temper", "count", 0, ROWS, "")', 'o.temper = parse_int32(op, "temper"'),
        (
            '("temper", "length", None, ROWS, "")',
            "if (is_given(args.temper)) o.temper = parse_int(",
        ),
        ('("temper", "number", None, ROWS, "")', "o.has_temper = is_given(args.temper);"),
        ('("temper", "pair", (0, 0), ROWS, "")', "args.temper, o.temper_left, o.temper_right)"),
        ('("temper", "array int32", None, ROWS, "")', "temper, Holds::int32},"),
        ('("temper", "scale", None, PAGED, "")', "temper, &cuattn_paged_options::tempers"),
    ],
)
def test_each_kind_is_generated(row, line):
    assert line in GENERATOR["call_header"](planted(row + ","))


def test_builtins_show_the_signatures_of_their_python_functions():
    for op, (path, *_) in FUNCTIONS.items():
        positional, keywords, docstring = keywords_of(path, op)
        parameters = inspect.signature(getattr(cuattn, op)).parameters.values()
        assert tuple(p.name for p in parameters if p.kind is not p.KEYWORD_ONLY) == positional
        shown = {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY}
        assert list(shown) == list(keywords)
        for name, default in shown.items():
            assert default is inspect.Parameter.empty or default == keywords[name][0]
        assert inspect.getdoc(getattr(cuattn, op)) == docstring


def test_words_are_numbered_as_the_enums_of_c_are():
    text = (ROOT / "include/cuattn/c_api.h").read_text()
    words = {"layout": "LAYOUT", "kv_layout": "KV", "kv_dtype": "KV_DTYPE", "dtype": "KV_DTYPE",
             "accumulate": "ACCUMULATE"}  # fmt: skip
    spelled = {None: "AUTO", "float8_e4m3fn": "E4M3"}
    for name, prefix in words.items():
        for code, word in enumerate(OPTIONS["WORDS"][name]):
            symbol = f"CUATTN_{prefix}_{spelled.get(word) or word.upper()}"
            assert re.search(rf"\b{symbol} = {code}\b", text)


IN_A_COPY = """
import importlib.util, cuattn
from cuattn._explain.rows import DEFAULTS
assert DEFAULTS["temper"] == 0.5
shape = (1, 4, 2, 8)
cuattn.explain("attention", shape, shape, shape, dtype="float32", device="cpu", temper=0.25)
if importlib.util.find_spec("torch"):
    import torch, cuattn.torch
    for op in (torch.ops.cuattn.attention, torch.ops.cuattn.attention_varlen):
        assert "float temper=0.5" in str(op.default._schema)
if importlib.util.find_spec("jax"):
    from cuattn.jax import attention, call, paged
    import sys
    for module in ("attention", "paged"):
        numbers = sys.modules[f"cuattn.jax.{module}"].NUMBERS
        assert call.attributes(numbers, {"causal": True})["temper"] == 0.5
"""


def test_a_made_up_option_reaches_explain_torch_and_jax_by_the_table_alone(tmp_path):
    package = tmp_path / "cuattn"
    shutil.copytree(Path(cuattn.__file__).parent, package)
    table = package / "_options.py"
    table.write_text(table.read_text().replace('    ("sinks", ', f'    {MADE_UP}\n    ("sinks", '))
    done = subprocess.run(
        [sys.executable, "-c", IN_A_COPY], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
