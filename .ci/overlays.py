"""Folders of links from which tests import mfwrap, with one mutated file or with noted calls."""

import ast
import importlib.util
import marshal
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from mutations import Mutant

ROOT = Path(__file__).resolve().parent.parent

# The module that traced code imports. A function's first call in a process is written at once, so
# that the calls of killed processes are known, too.
_TRACER = '''
"""Note which functions of mfwrap are called, in this and all other processes."""

from pathlib import Path

_CALLS = Path(__file__).with_name("calls.txt")
_noted = set()


def note(function):
    """Note the call of a function."""
    if function not in _noted:
        _noted.add(function)
        with _CALLS.open("a", encoding="utf-8") as file:
            file.write(function + "\\n")
'''


class Overlay:
    """A folder in which mfwrap is a tree of links to the source files, to be put on the path.

    Args:
        folder: Folder to make anew.
        traced: Whether the functions of mfwrap note their calls.
    """

    def __init__(self, folder: Path, *, traced: bool = False) -> None:
        self.folder = folder
        self._mutated: Path | None = None
        shutil.rmtree(folder, ignore_errors=True)
        for top in ("mfwrap", "callbacks", "recipes"):
            for path in (ROOT / top).rglob("*"):
                if path.is_file() and "__pycache__" not in path.parts:
                    link = self.link(path)
                    link.parent.mkdir(parents=True, exist_ok=True)
                    link.symlink_to(path)
                    if traced and path.suffix == ".py":
                        _compile_traced(link, path.relative_to(ROOT).as_posix())
        (folder / "mfwrap_calls.py").write_text(_TRACER, encoding="utf-8")
        if not traced:
            compile_all = [sys.executable, "-m", "compileall", "-q", str(folder / "mfwrap")]
            subprocess.run(compile_all, check=True)

    def link(self, path: Path) -> Path:
        """Return the place of a source file in this folder."""
        parts = path.relative_to(ROOT).parts
        return self.folder.joinpath(*(() if parts[0] == "mfwrap" else ("mfwrap",)), *parts)

    def hold(self, mutant: Mutant | None) -> None:
        """Replace the link of a mutant's file by the mutated file; restore the previous link."""
        if self._mutated is not None:
            self._replace(self._mutated, None)
        self._mutated = None if mutant is None else ROOT / mutant.path
        if mutant is not None:
            self._replace(ROOT / mutant.path, mutant)

    def _replace(self, original: Path, mutant: Mutant | None) -> None:
        link = self.link(original)
        link.unlink()
        if mutant is None:
            link.symlink_to(original)
        else:
            link.write_bytes(mutant.source(original.read_bytes()))

    def taken_calls(self) -> list[str]:
        """Return the functions called since the last time: file in the repository, dotted name."""
        noted = self.folder / "calls.txt"
        calls = noted.read_text(encoding="utf-8").splitlines() if noted.exists() else []
        noted.unlink(missing_ok=True)
        return sorted(set(calls))


def _compile_traced(source: Path, path: str) -> None:
    """Write compiled code for a source file, in which each function notes its call.

    The source stays as it is, so that tracebacks and `inspect` show its lines. An unchecked
    hash-based file is used without a comparison with the source (PEP 552).
    """
    content = source.read_bytes()
    tree = ast.parse(content)
    for name, function in _functions(tree):
        if "is_compiling" in ast.unparse(function):
            continue  # torch.compile cannot compile the note
        at = 0 if ast.get_docstring(function) is None else 1
        [call] = ast.parse(f"__import__('mfwrap_calls').note({f'{path} {name}'!r})").body
        for node in ast.walk(call):
            ast.copy_location(node, function.body[min(at, len(function.body) - 1)])
        function.body.insert(at, call)
    code = compile(tree, str(source), "exec", dont_inherit=True)
    compiled = Path(importlib.util.cache_from_source(str(source)))
    compiled.parent.mkdir(exist_ok=True)
    header = importlib.util.MAGIC_NUMBER + (1).to_bytes(4, "little")
    compiled.write_bytes(header + importlib.util.source_hash(content) + marshal.dumps(code))


def _functions(tree: ast.Module) -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    """Yield dotted name and node of each function, without functions inside of functions."""
    pending: list[tuple[str, ast.AST]] = [("", tree)]
    while pending:
        outer, node = pending.pop()
        for child in ast.iter_child_nodes(node):
            if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef)):
                yield f"{outer}.{child.name}".lstrip("."), child
            else:
                is_class = isinstance(child, ast.ClassDef)
                name = f"{outer}.{child.name}".lstrip(".") if is_class else outer
                pending.append((name, child))
