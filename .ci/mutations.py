"""Make mutants: small faults that are planted into a source file, one at a time.

A mutant replaces one expression or statement. Faults that nearly every test notices, such as an
argument that becomes None, are left out: they would only raise the score. Texts are left out, too.
"""

import ast
import hashlib
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

_COMPARISONS = {
    ast.Lt: "<=",
    ast.LtE: "<",
    ast.Gt: ">=",
    ast.GtE: ">",
    ast.Eq: "!=",
    ast.NotEq: "==",
    ast.Is: "is not",
    ast.IsNot: "is",
    ast.In: "not in",
    ast.NotIn: "in",
}
_ARITHMETIC: dict[type[ast.operator], ast.operator] = {
    ast.Add: ast.Sub(),
    ast.Sub: ast.Add(),
    ast.Mult: ast.Div(),
    ast.Div: ast.Mult(),
    ast.FloorDiv: ast.Mult(),
    ast.Mod: ast.FloorDiv(),
    ast.Pow: ast.Mult(),
    ast.BitAnd: ast.BitOr(),
    ast.BitOr: ast.BitAnd(),
}
_NAMES = {"min": "max", "max": "min", "any": "all", "all": "any"}


@dataclass(frozen=True)
class Mutant:
    """One fault: the text between two byte offsets of a file is replaced."""

    path: str
    """Path of the file, relative to the repository."""
    function: str
    """Dotted name of the function around the fault, within its module."""
    start: int
    end: int
    replacement: str
    before: str
    """The changed source without the line breaks and indentation."""
    after: str
    """The same source with the fault."""

    @property
    def key(self) -> str:
        """Identity of the mutant, which does not depend on its line number."""
        return f"{self.path} {self.function}: {self.before} -> {self.after}"

    def source(self, original: bytes) -> bytes:
        """Return the file's content with the fault."""
        return original[: self.start] + self.replacement.encode() + original[self.end :]


def mutants_of(path: Path, root: Path) -> list[Mutant]:
    """Return all mutants of a file, in the order of their places.

    Only the bodies and default arguments of functions are mutated.
    """
    source = path.read_bytes()
    starts = [0]
    for line in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    found: dict[str, Mutant] = {}
    for function, statement, node, text in _faults(ast.parse(source)):
        start, end = (
            starts[line - 1] + column
            for line, column in (
                (node.lineno, node.col_offset),
                (node.end_lineno, node.end_col_offset),
            )
        )
        first, last = starts[statement.lineno - 1], starts[_last_line(statement)]
        whole = source[first:start] + text.encode() + source[end:last]
        mutant = Mutant(
            path=path.relative_to(root).as_posix(),
            function=function,
            start=start,
            end=end,
            replacement=text,
            before=" ".join(source[first:last].decode().split()),
            after=" ".join(whole.decode().split()),
        )
        found.setdefault(mutant.key, mutant)
    return list(found.values())


def sampled(mutants: Sequence[Mutant], size: int, seed: int) -> list[Mutant]:
    """Choose `size` mutants, from each file in proportion to the number of its mutants.

    A mutant is chosen by a hash of the seed and its key. So a change of other code rarely changes
    which mutants are chosen. The sample is in the order of the hashes, so the first part of it is a
    smaller sample.
    """
    by_file: dict[str, list[Mutant]] = {}
    for mutant in mutants:
        by_file.setdefault(mutant.path, []).append(mutant)
    share = min(1.0, size / len(mutants)) if mutants else 0.0
    quotas = {path: math.floor(share * len(held)) for path, held in by_file.items()}
    by_remainder = sorted(quotas, key=lambda path: quotas[path] - share * len(by_file[path]))
    for path in by_remainder[: min(size, len(mutants)) - sum(quotas.values())]:
        quotas[path] += 1

    def order(mutant: Mutant) -> str:
        return hashlib.sha256(f"{seed} {mutant.key}".encode()).hexdigest()

    chosen: list[Mutant] = []
    for path, held in by_file.items():
        chosen += sorted(held, key=order)[: quotas[path]]
    return sorted(chosen, key=order)


def _last_line(statement: ast.stmt) -> int:
    # Of a block, such as an `if`, show only the lines before its body.
    body = getattr(statement, "body", None)
    end = statement.end_lineno or statement.lineno
    return max(statement.lineno, body[0].lineno - 1) if isinstance(body, list) and body else end


def _faults(tree: ast.Module) -> Iterator[tuple[str, ast.stmt, ast.expr | ast.stmt, str]]:
    """Yield function, statement, mutated node and the text that replaces the node."""
    pending: list[tuple[str, ast.AST]] = [("", tree)]
    while pending:
        outer, node = pending.pop()
        for child in ast.iter_child_nodes(node):
            name = f"{outer}.{child.name}".lstrip(".") if isinstance(child, _NAMED) else outer
            if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef)):
                for default in (*child.args.defaults, *filter(None, child.args.kw_defaults)):
                    yield from ((name, child, *fault) for fault in _of_expression(default))
                yield from _of_body(name, child)
            else:
                pending.append((name, child))


_NAMED = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def _of_body(
    name: str, function: ast.AST
) -> Iterator[tuple[str, ast.stmt, ast.expr | ast.stmt, str]]:
    for statement in ast.walk(function):
        if not isinstance(statement, ast.stmt) or statement is function:
            continue
        replaced = _of_statement(statement)
        if replaced is not None:
            yield name, statement, statement, replaced
        for expression in _expressions(statement):
            yield from ((name, statement, *fault) for fault in _of_expression(expression))
        test = getattr(statement, "test", None)
        if isinstance(test, ast.expr):
            yield name, statement, test, f"not ({ast.unparse(test)})"


def _expressions(statement: ast.stmt) -> Iterator[ast.expr]:
    """Yield the expressions of a statement itself, without those of the statements inside it."""
    for field, value in ast.iter_fields(statement):
        if field in {"annotation", "decorator_list", "returns", "args"}:
            continue
        for each in value if isinstance(value, list) else [value]:
            if isinstance(each, ast.withitem):
                yield each.context_expr
            elif isinstance(each, ast.expr):
                yield each


def _of_statement(statement: ast.stmt) -> str | None:
    """Return a statement that may replace `statement`."""
    match statement:
        case ast.Expr(value=ast.Call()) | ast.Raise() | ast.Delete() | ast.AugAssign():
            return "pass"
        case ast.Assign(targets=[ast.Attribute() | ast.Subscript(), *_]):
            return "pass"
        case ast.AnnAssign(target=ast.Attribute(), value=ast.expr()):
            return "pass"
        case ast.Break():
            return "continue"
        case ast.Continue():
            return "break"
    return None


def _of_expression(expression: ast.expr) -> Iterator[tuple[ast.expr, str]]:
    """Yield mutated nodes within an expression, with the text that replaces each."""
    pending: list[ast.AST] = [expression]
    while pending:
        node = pending.pop()
        if isinstance(node, ast.JoinedStr):
            continue
        if isinstance(node, ast.expr):
            yield from ((node, f"({text})") for text in _replacements(node))
        pending.extend(ast.iter_child_nodes(node))


def _replacements(node: ast.expr) -> Iterable[str]:  # noqa: C901, PLR0911, PLR0912  (one case per kind of node)
    """Return the texts that may replace an expression."""
    match node:
        case ast.Compare(left=left, ops=[operator], comparators=[right]):
            return [f"{ast.unparse(left)} {_COMPARISONS[type(operator)]} {ast.unparse(right)}"]
        case ast.BoolOp(op=operator, values=values):
            other: ast.boolop = ast.Or() if isinstance(operator, ast.And) else ast.And()
            fewer = [values[:i] + values[i + 1 :] for i in range(len(values))]
            shorter = [ast.BoolOp(operator, kept) if len(kept) > 1 else kept[0] for kept in fewer]
            return map(ast.unparse, [ast.BoolOp(other, values), *shorter])
        case ast.UnaryOp(operand=operand):
            return [ast.unparse(operand)]
        case ast.BinOp(left=left, op=operator, right=right):
            texts = (ast.JoinedStr, ast.Constant)
            are_texts = any(isinstance(side, texts) and _is_text(side) for side in (left, right))
            other_operator = _ARITHMETIC.get(type(operator))
            if are_texts or other_operator is None:
                return []
            return [ast.unparse(ast.BinOp(left, other_operator, right))]
        case ast.Constant(value=bool(value)):
            return [repr(not value)]
        case ast.Constant(value=int(value)):
            return [repr(value + 1)]
        case ast.Constant(value=float(value)):
            return [repr(2 * value if value else 1.0)]
        case ast.IfExp(test=test, body=body, orelse=orelse):
            return [ast.unparse(ast.IfExp(test, orelse, body))]
        case ast.Call(func=ast.Name(id=name)) if name in _NAMES:
            return [ast.unparse(ast.Call(ast.Name(_NAMES[name]), node.args, node.keywords))]
        case ast.Call(func=ast.Attribute(attr="_replace"), keywords=keywords) if len(keywords) > 1:
            fewer_keywords = [keywords[:i] + keywords[i + 1 :] for i in range(len(keywords))]
            return [ast.unparse(ast.Call(node.func, node.args, kept)) for kept in fewer_keywords]
        case ast.ListComp(generators=[generator]) | ast.GeneratorExp(generators=[generator]):
            return _without_condition(node, generator)
        case ast.SetComp(generators=[generator]) | ast.DictComp(generators=[generator]):
            return _without_condition(node, generator)
    return []


def _is_text(node: ast.expr) -> bool:
    return isinstance(node, ast.JoinedStr) or (
        isinstance(node, ast.Constant) and isinstance(node.value, str)
    )


def _without_condition(node: ast.expr, generator: ast.comprehension) -> Iterable[str]:
    """Return the comprehension with its conditions removed."""
    if not generator.ifs:
        return []
    conditions, generator.ifs = generator.ifs, []
    text = ast.unparse(node)
    generator.ifs = conditions
    return [text.removeprefix("(").removesuffix(")") if text.startswith("(") else text]
