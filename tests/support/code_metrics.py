"""Print how easy the code is to find one's way in: `python -m tests.support.code_metrics`.

The limits are checked by tests/unit/project/test_structure.py. The columns beside ours are of an
older commit and of four projects that are known for readable code, measured in the same way.
"""

from __future__ import annotations

import ast
import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from statistics import median, quantiles
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
FOLDERS = ("smdist", "workers", "coordination")
# What ours were at commit db2be5e, when they were first measured; then torchsnapshot, zarr-python 3,
# httpx, pyiceberg.
OTHERS = {
    "modules": (203, 42, 67, 23, 82),
    "lines": (32126, 7635, 18654, 8827, 39175),
    "most modules in a folder": (80, 28, 19, 17, 14),
    "lines of a module, 90 %": (324, 463, 715, 641, 1162),
    "lines of a function, median": (6, 10, 10, 9, 3),
    "lines of a function, 90 %": (17, 41, 30, 34, 21),
    "lines of the longest class": (449, 893, 1354, 713, 1107),
    "most attributes of a class": (37,),
    "class names with two meanings": (15,),
    "import cycles": (5,),
    "docstrings that begin with a verb, %": (19, 57, 75, 70, 75),
}
# Rooms that answer questions. They came after the limit on lines, which is for capture, storage,
# coordination and trials.
ANSWERS = ("smdist.rules", "smdist.tables", "smdist.cli.check", "smdist.trials.statistics_rows")
# Base forms; a docstring may use the third person too. A list, as no rule tells nouns from verbs.
_VERBS = frozenset(
    """
    abort accept acknowledge add adjust advance allocate allow announce answer append apply arrange
    ask assemble assign attach await begin bind block bound break build bypass cache call cancel
    capture check choose claim clean clear close collect combine come commit compare compose compute
    confirm connect consider construct continue convert copy count cover create cut decide declare
    decode decorate delete deliver derive describe detach detect determine diagnose disable discard
    do drain draw drop dump empty enable encode end ensure enter erase escape estimate evaluate
    examine exclude execute exit expand expect explain export extend extract fail feed fetch fill
    filter find finish fit flatten flush fold follow forget format forward free gather generate get
    give go grant group grow guard guess hand handle have hold identify ignore import include
    increase infer initialize insert inspect install interpret interrupt intersect invoke is iterate
    join judge keep kill know label launch lay lead learn leave let limit link list listen load
    locate lock log look make map mark match measure merge mirror move name need normalize note
    notice notify number observe obtain offer open order pack pad parse pass patch pause perform pick
    pin place plan poll pop populate prefer prepare preserve prevent print probe process produce
    promise provide prune publish pull push put queue raise reach read rebuild receive reclaim
    recognize recompute record recover redact reduce refer refresh refuse register reject release
    remember remove rename render repair repeat replace reply report request require reread reserve
    reset resolve respond restart restore resume retry return reuse revert rewrite ring roll rotate
    round run sample save say scan schedule seal search seed select send separate serialize serve set
    shift show shut signal simulate skip sleep snapshot sort split stack stamp start state step stop
    store strip submit subtract sum summarize supply suspend swap sweep switch synchronize take tell
    test tie track train translate traverse treat trim truncate try turn undo unify unregister
    unwrap update upload use validate verify visit wait wake walk warm warn watch weigh widen wrap
    write yield
    """.split()  # noqa: SIM905 (as people read it)
)
_FIRST = re.compile(r"[A-Z][a-z]+\b")


class Class(NamedTuple):
    name: str
    module: str
    lines: int
    attributes: int
    methods: int


class Module:
    """One source file, parsed."""

    def __init__(self, path: Path) -> None:
        self.path = path.relative_to(ROOT)
        self.text = path.read_text()
        self.tree = ast.parse(self.text)

    @property
    def name(self) -> str:
        """Return its dotted name, as it is imported."""
        parts = [*self.path.with_suffix("").parts]
        if parts[0] != "smdist":
            parts.insert(0, "smdist")
        return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)

    @property
    def lines(self) -> int:
        return self.text.count("\n")

    @cached_property
    def functions(self) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
        found = ast.walk(self.tree)
        return [n for n in found if isinstance(n, (ast.FunctionDef, ast.AsyncFunctionDef))]

    @cached_property
    def classes(self) -> list[Class]:
        found = [node for node in ast.walk(self.tree) if isinstance(node, ast.ClassDef)]
        return [self._measure(node) for node in found]

    def _measure(self, node: ast.ClassDef) -> Class:
        methods = [n for n in node.body if isinstance(n, (ast.FunctionDef, ast.AsyncFunctionDef))]
        attributes = {
            target.attr
            for method in methods
            for target in ast.walk(method)
            if isinstance(target, ast.Attribute)
            and isinstance(target.ctx, ast.Store)
            and isinstance(target.value, ast.Name)
            and target.value.id == "self"
        }
        fields = {
            n.target.id
            for n in node.body
            if isinstance(n, ast.AnnAssign) and isinstance(n.target, ast.Name)
        }
        return Class(node.name, self.name, _length(node), len(attributes | fields), len(methods))

    def imports(self, known: frozenset[str]) -> Iterator[str]:
        """Yield the modules of ours that this one imports, for types and in functions too."""
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Import):
                yield from (alias.name for alias in node.names if alias.name in known)
            elif isinstance(node, ast.ImportFrom) and node.module in known:
                for alias in node.names:
                    inner = f"{node.module}.{alias.name}"
                    yield inner if inner in known else str(node.module)


def modules() -> list[Module]:
    """Return every module of the product, once."""
    return [
        Module(path)
        for folder in FOLDERS
        for path in sorted((ROOT / folder).rglob("*.py"))
        if not any(part.is_symlink() for part in path.parents)
    ]


def _length(node: ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    return (node.end_lineno or node.lineno) - node.lineno + 1


def begins_with_verb(docstring: str) -> bool:
    """Tell whether a docstring opens with an imperative or a third-person verb."""
    found = _FIRST.match(docstring.strip())
    if found is None:
        return False
    word = found[0].lower()
    return bool({word, word.removesuffix("s"), word.removesuffix("es"), word[:-3] + "y"} & _VERBS)


def function_docstrings(found: list[Module]) -> list[str]:
    texts = (ast.get_docstring(node) for module in found for node in module.functions)
    return [text for text in texts if text]


def folder_sizes(found: list[Module]) -> Counter[Path]:
    """Count the modules of each folder, leaving out `__init__.py`."""
    return Counter(m.path.parent for m in found if m.path.name != "__init__.py")


def repeated_classes(found: list[Module]) -> dict[str, list[str]]:
    """Return the class names that are defined in more than one place."""
    homes = defaultdict(list)
    for module in found:
        for each in module.classes:
            homes[each.name].append(module.name)
    return {name: places for name, places in homes.items() if len(places) > 1}


def import_cycles(found: list[Module]) -> list[list[str]]:
    """Return the groups of modules that import each other, directly or not."""
    known = frozenset(module.name for module in found)
    graph = {m.name: sorted(set(m.imports(known)) - {m.name}) for m in found}
    return [group for group in _components(graph) if len(group) > 1]


def _components(graph: dict[str, list[str]]) -> list[list[str]]:
    """Return the strongly connected components (Kosaraju's algorithm, without recursion)."""
    order, seen = list[str](), set[str]()
    for start in graph:
        _visit(graph, start, seen, order)
    back = defaultdict(list)
    for name, targets in graph.items():
        for target in targets:
            back[target].append(name)
    seen, groups = set(), []
    for name in reversed(order):
        group = list[str]()
        _visit(back, name, seen, group)
        if group:
            groups.append(sorted(group))
    return groups


def _visit(
    graph: dict[str, list[str]] | defaultdict[str, list[str]],
    start: str,
    seen: set[str],
    order: list[str],
) -> None:
    """Append what is reachable from `start` and not seen yet, children first."""
    if start in seen:
        return
    seen.add(start)
    pending = [(start, iter(graph.get(start, ())))]
    while pending:
        name, rest = pending[-1]
        target = next((t for t in rest if t not in seen), None)
        if target is None:
            order.append(name)
            pending.pop()
        else:
            seen.add(target)
            pending.append((target, iter(graph.get(target, ()))))


def numbers(found: list[Module]) -> dict[str, float]:
    """Return every number that is printed."""
    sizes = [_length(node) for module in found for node in module.functions]
    texts = function_docstrings(found)
    classes = [each for module in found for each in module.classes]
    verbs = sum(begins_with_verb(text) for text in texts)
    return {
        "modules": len(found),
        "lines": sum(module.lines for module in found),
        "lines without rules and tables": sum(
            module.lines for module in found if not module.name.startswith(ANSWERS)
        ),
        "most modules in a folder": max(folder_sizes(found).values()),
        "lines of a module, 90 %": quantiles([m.lines for m in found], n=10)[-1],
        "lines of a function, median": median(sizes),
        "lines of a function, 90 %": quantiles(sizes, n=10)[-1],
        "lines of the longest class": max(each.lines for each in classes),
        "most attributes of a class": max(each.attributes for each in classes),
        "class names with two meanings": len(repeated_classes(found)),
        "import cycles": len(import_cycles(found)),
        "docstrings that begin with a verb, %": 100 * verbs / len(texts),
    }


def main() -> None:
    heads = ("smdist", "at db2be5e", "torchsnapshot", "zarr", "httpx", "pyiceberg")
    print(f"{'':38}" + "".join(f"{head:>14}" for head in heads))  # noqa: T201
    for name, ours in numbers(modules()).items():
        row = f"{name:38}{ours:14.0f}" + "".join(f"{n:14}" for n in OTHERS.get(name, ()))
        print(row)  # noqa: T201


if __name__ == "__main__":
    main()
