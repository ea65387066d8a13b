"""The house's habits, as far as a machine can see them. Each failure names the file, the line and the habit."""

import ast
import re
import sys

from tests.house import PRODUCT, ROOT, Source, kept_files, sources

FUNCTION_LINES_MAX = 70
FILE_LINES_MAX = 600
LONG_FILES = {
    "tests/contract/test_bus.py": "one suite of behaviour, run on both adapters of the bus",
    "shared/messages.py": "every message on the bus in one place",
}

# A module is pure when its docstring says "Pure", or when it stands here: what the layout calls so, and what they need.
PURE_BY_NAME = frozenset(
    {
        *(f"shared.{name}" for name in ("ids", "tiers", "catalog", "limits", "messages", "subjects", "outcomes")),
        *(f"shared.{name}" for name in ("errors", "blocks", "bus", "token_log", "log_merge", "topology")),
        *(f"services.gateway.{name}" for name in ("openai_api", "openai_objects", "events", "http")),
        *(f"services.conversation.{name}" for name in ("assembly", "replies")),
        *(
            f"services.router.{name}"
            for name in ("fleet_view", "placement", "admission", "eta", "leases", "lease_events")
        ),
        *(f"services.replica.core.{name}" for name in ("sequence", "block_pool", "scheduler", "plan", "detokenize")),
        "services.replica.engine_messages",
        *(f"services.relay.{name}" for name in ("merge", "streams")),
        *(f"services.safety.{name}" for name in ("windows", "verdicts", "rules")),
        "services.usage.ledger",
    }
)
# Clocks, randomness, the environment and every kind of I/O.
IMPURE = frozenset(
    {
        *("asyncio", "contextvars", "concurrent", "ctypes", "glob", "http", "io", "logging", "mmap", "multiprocessing"),
        *("os", "pathlib", "queue", "random", "sched", "secrets", "select", "selectors", "shutil", "signal", "socket"),
        *("ssl", "subprocess", "tempfile", "threading", "time", "urllib", "uuid"),
    }
)
CLOCK_CALLS = frozenset({"now", "utcnow", "today"})


def nothing(found: list[str]) -> None:
    """Fails with every finding on its own line."""
    assert not found, "\n" + "\n".join(found)


def pure_modules(files: list[Source]) -> dict[str, Source]:
    return {
        one.module: one
        for one in files
        if one.module in PURE_BY_NAME or re.search(r"\bPure\b", one.docstring) is not None
    }


def impurities(source: Source, pure: dict[str, Source]) -> list[str]:
    """What a pure module imports or calls that it may not: only the standard library, msgspec and other pure ones."""
    found = []
    for line, name in source.imports():
        top = name.partition(".")[0]
        ours = top in PRODUCT
        if ours and name not in pure and (module := name.rpartition(".")[0]) not in pure:
            found.append(f"{source.name}:{line}: imports from {module}, which is not pure")
        elif not ours and (top in IMPURE or not (top == "msgspec" or top in sys.stdlib_module_names)):
            found.append(f"{source.name}:{line}: imports {name}")
    for node in ast.walk(source.tree):
        if not isinstance(node, ast.Call):
            continue
        if isinstance(node.func, ast.Name) and node.func.id in ("open", "print", "input"):
            found.append(f"{source.name}:{node.lineno}: calls {node.func.id}()")
        if isinstance(node.func, ast.Attribute) and node.func.attr in CLOCK_CALLS and not node.args:
            found.append(f"{source.name}:{node.lineno}: calls .{node.func.attr}(), a clock")
    return list(dict.fromkeys(found))


def test_pure_modules_are_pure():
    """No clock, no randomness, no environment, no I/O and no torch in what decides."""
    pure = pure_modules(sources("shared", "services", "sim"))
    nothing([wrong for source in pure.values() for wrong in impurities(source, pure)])


def test_the_table_of_pure_modules_is_no_wish():
    """Each module named as pure exists, in every service that is there."""
    there = {one.module for one in sources("shared", "services")}
    nothing(sorted(PURE_BY_NAME - there))


def test_functions_are_short():
    """No function is longer than a screen."""
    nothing(
        [
            f"{source.name}:{node.lineno}: {node.name} has {length} lines"
            for source in sources(*PRODUCT, "tests")
            for node in source.functions()
            if (length := (node.end_lineno or node.lineno) - node.lineno + 1) > FUNCTION_LINES_MAX
        ]
    )


def test_files_are_short():
    """A file that grows past the bound becomes two, or has a reason here."""
    lengths = {source.name: source.text.count("\n") for source in sources(*PRODUCT, "tests")}
    long = {name for name, lines in lengths.items() if lines > FILE_LINES_MAX}
    nothing([f"{name}: {lengths[name]} lines" for name in sorted(long - set(LONG_FILES))])
    nothing([f"{name} is no longer long: remove it" for name in LONG_FILES if name in lengths and name not in long])


def test_every_test_says_what_it_holds():
    """The docstring of a test is one sentence: the behaviour."""
    nothing(
        [
            f"{source.name}:{node.lineno}: {node.name}"
            for source in sources("tests")
            for node in source.functions()
            if node.name.startswith("test_") and not ast.get_docstring(node)
        ]
    )


def test_every_module_and_message_has_a_docstring():
    """A module says what it is for; a message what it means and who says it."""
    files = sources("shared", "services", "ops")
    silent = [one.name for one in files if one.text.strip() and not one.docstring]
    messages = next(one for one in files if one.module == "shared.messages")
    silent += [
        f"shared.messages.{node.name}"
        for node in messages.tree.body
        if isinstance(node, ast.ClassDef) and not ast.get_docstring(node)
    ]
    nothing(silent)


def test_no_naked_tasks():
    """Tasks belong to a TaskGroup; the two of the service's own life are awaited where they are made."""
    allowed = {"shared/service.py"}
    nothing(
        [
            f"{source.name}:{node.lineno}"
            for source in sources("shared", "services")
            if source.name not in allowed
            for node in ast.walk(source.tree)
            if isinstance(node, ast.Attribute)
            and node.attr in ("create_task", "ensure_future")
            and isinstance(node.value, ast.Name)
            and node.value.id in ("asyncio", "loop")
        ]
    )


def test_one_file_reads_a_clock():
    """Times and randomness come from shared.clock, so that tests and the simulator can be handed their own."""
    allowed = {"shared/clock.py"}
    nothing(
        [
            f"{source.name}:{line}: {name}"
            for source in sources("shared", "services")
            if source.name not in allowed
            for line, name in source.imports()
            if name.partition(".")[0] in ("time", "random", "secrets", "uuid")
        ]
    )


def test_nothing_of_this_machine_is_in_the_repository():
    """No package registry, no path of a machine: what is kept is true everywhere."""
    hosts = ["py" + "pi.org", "python" + "hosted.org", "npm" + "js.org", "registry." + "npm", "hugging" + "face.co"]
    machine = re.compile(r"(?<![\w.)\]}/-])/(?:work|opt|root|home)/\w")
    found = []
    for path in kept_files():
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue  # a picture
        for number, line in enumerate(text.splitlines(), start=1):
            if any(host in line for host in hosts) or machine.search(line):
                found.append(f"{path.relative_to(ROOT)}:{number}: {line.strip()[:100]}")
    nothing(found)
