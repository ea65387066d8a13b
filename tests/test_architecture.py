"""The drawings and tables of the house are equal to the code they speak of."""

import ast
import importlib
import re

import pytest

from shared import errors, limits
from shared.settings import CommonSettings
from tests.house import ROOT, SERVICES, Source, sources

MAIN_LINES_MAX = 40
DOORS = {"start", "run", "drain", "ready"}


def test_the_exception_tree_is_the_one_drawn():
    """Each name in the drawing is a class, with the base it is drawn under, and each class is drawn."""
    drawn: dict[str, str] = {}
    above: list[tuple[int, str]] = []
    for line in (errors.__doc__ or "").splitlines():
        found = re.match(r"^([│├└─ ]*)(\w+Error)\b", line)
        if found is None:
            continue
        depth, name = len(found.group(1)), found.group(2)
        while above and above[-1][0] >= depth:
            above.pop()
        drawn[name] = above[-1][1] if above else "Exception"
        above.append((depth, name))
    written = {
        name: kind.__bases__[0].__name__
        for name, kind in vars(errors).items()
        if isinstance(kind, type) and issubclass(kind, Exception)
    }
    assert drawn == written


def relations() -> list[ast.Assert]:
    tree = ast.parse((ROOT / "shared" / "limits.py").read_text(encoding="utf-8"))
    return [node for node in tree.body if isinstance(node, ast.Assert)]


@pytest.mark.parametrize("relation", relations(), ids=lambda node: ast.unparse(node.test)[:60])
def test_relations_between_limits_can_break(relation):
    """Each asserted relation is about limits, and breaks for some other value of one: it says something."""
    names = [node.id for node in ast.walk(relation.test) if isinstance(node, ast.Name)]
    assert names, "a relation between constants only"
    code = compile(ast.Expression(relation.test), "limits", "eval")
    assert eval(code, vars(limits)) is True
    broken = [
        (name, factor)
        for name in names
        for factor in (0, 1_000_000)
        if not eval(code, {**vars(limits), name: factor * (getattr(limits, name) or 1)})
    ]
    assert broken, "true whatever the limits are"


def test_limits_have_units_or_are_counts():
    """A limit is a positive number, named with its unit last or as a count."""
    named = {name: value for name, value in vars(limits).items() if name.isupper()}
    assert len(named) > 50
    assert [name for name, value in named.items() if not isinstance(value, int | float) or value <= 0] == []


@pytest.mark.parametrize("service", SERVICES)
def test_every_service_has_the_same_doors(service):
    """Whoever knows one service knows all: a composition root, settings, and a service with four doors."""
    folder = ROOT / "services" / service
    main = (folder / "__main__.py").read_text(encoding="utf-8")
    assert main.count("\n") <= MAIN_LINES_MAX
    settings = importlib.import_module(f"services.{service}.settings")
    assert any(
        isinstance(kind, type) and issubclass(kind, CommonSettings) and kind is not CommonSettings
        for kind in vars(settings).values()
    )
    module = importlib.import_module(f"services.{service}.service")
    of_module = [
        kind for kind in vars(module).values() if isinstance(kind, type) and kind.__module__ == module.__name__
    ]
    assert [kind for kind in of_module if set(dir(kind)) >= DOORS], f"no class with the doors {sorted(DOORS)}"


def test_every_service_folder_is_known():
    """A service that is added is added to the checks."""
    folders = {path.name for path in (ROOT / "services").iterdir() if (path / "__main__.py").is_file()}
    assert folders == set(SERVICES)


def metric_names(source: Source) -> list[tuple[int, str]]:
    """(line, name as exposed) of every metric a file makes; a name that is no literal is its own finding."""
    made = []
    for node in ast.walk(source.tree):
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
            continue
        if node.func.attr not in ("counter", "gauge", "histogram") or not node.args:
            continue
        name = node.args[0]
        literal = isinstance(name, ast.Constant) and isinstance(name.value, str)
        made.append((node.lineno, f"chorus_{name.value}" if literal else f"(not a literal: {ast.unparse(name)})"))
    return made


def documented_metrics() -> set[str]:
    """The names in the tables of docs/metrics.md."""
    text = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")
    return set(re.findall(r"^\| `(chorus_[a-z0-9_]+)`", text, flags=re.MULTILINE))


def test_every_metric_is_defined_and_every_definition_is_a_metric():
    """What a service exposes stands in docs/metrics.md with its meaning, and nothing stands there that nobody exposes."""
    files = [one for one in sources("shared", "services", "ops") if one.module != "shared.telemetry"]
    files.append(next(one for one in sources("shared") if one.module == "shared.telemetry"))
    exposed = {
        name: f"{source.name}:{line}"
        for source in files
        for line, name in metric_names(source)
        if not (source.module == "shared.telemetry" and name.startswith("("))
    }
    documented = documented_metrics()
    assert {name: place for name, place in exposed.items() if name not in documented} == {}
    assert sorted(documented - set(exposed)) == []
