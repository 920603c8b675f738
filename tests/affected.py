"""Import graph of the repository, and the tests that a change can affect."""

from __future__ import annotations

import ast
import subprocess
from collections import defaultdict, deque
from collections.abc import Iterable, Mapping
from pathlib import Path

PACKAGE = "horovod_spark_runner"
# A change of these can affect every test.
EVERYTHING = ("scripts/locks/", "scripts/environment.py", "setup.cfg", ".ci/")
# What no module uses, and the tests that look at it.
OUTSIDE = {
    "examples/": "tests/docs/test_examples.py",
    "docs/migration/": "tests/docs/test_migration.py",
    **dict.fromkeys(
        ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "LICENSE", "docs/", "benchmarks/",
         ".github/", ".gitignore", ".pre-commit-config.yaml", "ruff.toml"),
        "tests/docs/test_readme.py",
    ),
}  # fmt: skip
CHOOSERS = ("tests/affected.py", "tests/tiers.py", "tests/unit/test_tiers.py")


def import_graph(root: Path) -> dict[str, set[str]]:
    """Return, for each tracked file, the files that it uses.

    A module uses what it imports, also inside functions; the ``__init__`` of the packages around
    that; modules and files that a string names, as engines, commands and scripts are run by name;
    and a test the ``conftest`` files of its folders. Names that the package imports lazily count
    for those who use them.
    """
    listed = subprocess.run(
        ["git", "-C", str(root), "ls-files"], check=True, capture_output=True, text=True
    ).stdout.splitlines()
    files = [name for name in listed if (root / name).exists()]
    modules = {
        name.removesuffix(".py").removesuffix("/__init__").replace("/", "."): name
        for name in files
        if name.endswith(".py")
    }
    by_name: defaultdict[str, list[str]] = defaultdict(list)
    for name in files:
        by_name[Path(name).name].append(name)
    lazy = lazy_names(root / PACKAGE / "__init__.py")
    graph: dict[str, set[str]] = {name: set() for name in files}
    for module, name in modules.items():
        if module == PACKAGE:  # its list of lazy names is none of its imports
            continue
        package = module if name.endswith("/__init__.py") else module.rpartition(".")[0]
        names, strings = used_names(ast.parse((root / name).read_text()), package)
        for used in names:
            graph[name] |= files_of(lazy.get(used, used), modules)
        # The tiers name files in order to choose tests, not to use them.
        for string in strings if name not in CHOOSERS else ():
            candidates = by_name.get(Path(string).name, [])
            beside = str(Path(name).parent / Path(string).name)
            if beside in candidates:
                graph[name].add(beside)
            elif len(candidates) == 1:
                graph[name] |= set(candidates)
        if name.startswith("tests/"):
            conftests = (str(folder / "conftest.py") for folder in Path(name).parents)
            graph[name] |= {conftest for conftest in conftests if conftest in graph}
        graph[name].discard(name)
    return graph


def files_of(name: str, modules: Mapping[str, str]) -> set[str]:
    """Return the file of a dotted name, and of the packages around it but the outermost."""
    while name and name not in modules:
        name = name.rpartition(".")[0]
    found = set()
    while name and name != PACKAGE:
        if name in modules:
            found.add(modules[name])
        name = name.rpartition(".")[0]
    return found


def lazy_names(path: Path) -> dict[str, str]:
    """Return the modules of the names that the package imports when they are used."""
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "_LAZY":
            lazy = ast.literal_eval(node.value)
            return {f"{PACKAGE}.{name}": f"{PACKAGE}{module}" for name, module in lazy.items()}
    raise AssertionError(f"{path} has no _LAZY")


def used_names(tree: ast.AST, package: str) -> tuple[set[str], set[str]]:
    """Return the dotted names that a module uses, and its strings, which may name files."""
    names: set[str] = set()
    strings: set[str] = set()
    parts = package.split(".")
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = parts[: len(parts) - node.level + 1] if node.level else []
            module = ".".join([*base, *filter(None, [node.module])])
            names.update(f"{module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            # ``import horovod_spark_runner as h; h.run_training``
            names.add(f"{PACKAGE}.{node.attr}")
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            name = node.value.partition(":")[0]  # such as ".doctor:command"
            level = len(name) - len(name.lstrip("."))
            base = parts[: len(parts) - level + 1] if level else []
            names.add(".".join([*base, name.lstrip(".")]))
            if "\n" not in name and len(name) < 100:
                strings.add(name)
    return {name for name in names if name.startswith((PACKAGE, "tests"))}, strings


def affected_tests(changed: Iterable[str], graph: Mapping[str, set[str]]) -> dict[str, int]:
    """Return the files of tests that a change of files can affect, and how near they are to it.

    A file that reaches no test can affect all of them: how it is used is not known.

    Args:
        changed: paths, relative to the root.
        graph: that of `import_graph`.

    Returns:
        The number of uses between the file of tests and the nearest changed file.
    """
    tests = {path for path in graph if Path(path).name.startswith("test_")}
    users: dict[str, set[str]] = {}
    for path, used in graph.items():
        for target in used:
            users.setdefault(target, set()).add(path)
    nearest: dict[str, int] = {}
    for path in changed:
        found = {} if path.startswith(EVERYTHING) else reached(path, users)
        reaches = {test: steps for test, steps in found.items() if test in tests}
        for start, test in OUTSIDE.items():
            if path.startswith(start):
                reaches.setdefault(test, 1)
        for test, steps in (reaches or dict.fromkeys(tests, 0)).items():
            nearest[test] = min(steps, nearest.get(test, steps))
    return nearest


def reached(path: str, users: Mapping[str, set[str]]) -> dict[str, int]:
    """Return all that uses a file, directly or not, and over how many steps."""
    steps = {path: 0}
    waiting = deque([path])
    while waiting:
        each = waiting.popleft()
        for user in users.get(each, ()):
            if user not in steps:
                steps[user] = steps[each] + 1
                waiting.append(user)
    return steps
