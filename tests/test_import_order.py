"""Imports inside vla_jax point one way: from a room to the rooms before it, and nowhere in a ring.

Implementations are above what dispatches to them: a table of their names has them imported when
they are asked for, so a statement that imports one from below is a mistake wherever it stands.
"""

import ast
import graphlib
import pathlib
import subprocess
import sys

import pytest

PACKAGE = pathlib.Path(__file__).parent.parent / "vla_jax"

# From the bottom to the top. A room is a module or a folder of vla_jax; those of one line do not
# import one another. Inside a folder any order without a ring will do.
ROOMS = (
    "types files functions",
    "numerics",
    "bundles chunks validation",
    "implementations checks decay meshes packing partitioning presets",
    "plan",
    "reference chunkwise",
    "associative pallas",
    "triton",
    "primitives",
    "ops",
    "sharding",
    "convolution",
    "layer_config baselines diagnostics selftest",
    "layer",
    "self_attention",
    "nnx linen generation serialization",
    "baseline_layers",
    "__init__",
)
# Packages that only these rooms may import.
KEPT = {
    "jax.experimental.pallas": "pallas",
    "jax._src.pallas": "pallas",
    "jax_triton": "triton",
    "triton": "triton",
    "flax": "nnx linen baseline_layers serialization",
    "torch": "",
}
LEVEL = {room: level for level, line in enumerate(ROOMS) for room in line.split()}


def sources():
    """``{"vla_jax.pallas.attention": its text}``; the ``__init__`` of a folder has its name."""
    found = {}
    for path in PACKAGE.rglob("*.py"):
        name = ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts)
        found[name.removesuffix(".__init__")] = path.read_text("utf-8")
    return found


def room(module):
    """The room of a module of vla_jax."""
    return module.split(".")[1] if "." in module else "__init__"


def imported(text, modules):
    """``(line, module)`` of every import in a text, also in functions; names of modules whole."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: a relative import"
            for alias in node.names:
                whole = f"{node.module}.{alias.name}"
                ours = node.module.split(".")[0] == "vla_jax"
                yield node.lineno, node.module if ours and whole not in modules else whole
        elif (
            isinstance(node, ast.Call)
            and ast.unparse(node.func).endswith("import_module")
            and isinstance(node.args[0], ast.Constant)  # from a table of names anything may come
        ):
            yield node.lineno, node.args[0].value


def violations(modules):
    """What is wrong with the imports of these modules, a line each."""
    wrong, inside = [], {}
    for module, text in modules.items():
        here = room(module)
        if here not in LEVEL:
            wrong.append(f"{module}: {here} has no place in ROOMS")
            continue
        for line, name in imported(text, modules):
            place = f"{module}:{line} imports {name}"
            for package, rooms in KEPT.items():
                if f"{name}.".startswith(f"{package}.") and here not in rooms.split():
                    wrong.append(f"{place}, which is for {rooms or 'no room'}")
            if name.split(".")[0] != "vla_jax" or room(name) not in LEVEL:
                continue
            if room(name) == here:
                inside.setdefault(module, set()).add(name)
            elif LEVEL[room(name)] >= LEVEL[here]:
                wrong.append(f"{place}, which is not below it in ROOMS")
    try:
        graphlib.TopologicalSorter(inside).prepare()
    except graphlib.CycleError as error:
        wrong.append(f"in a ring: {' <- '.join(error.args[1])}")
    return wrong


def test_imports_point_one_way():
    modules = sources()
    assert len(modules) > 20
    assert not violations(modules)


@pytest.mark.parametrize(
    ("module", "text", "message"),
    [
        ("vla_jax.numerics", "from vla_jax import ops", "vla_jax.numerics:1 imports vla_jax.ops,"),
        ("vla_jax.types", "def f():\n  from vla_jax.ops import vla_step", "types:2 imports"),
        ("vla_jax.linen", "import vla_jax.nnx", "not below it"),
        ("vla_jax.ops", "import vla_jax", "not below it"),
        ("vla_jax.ops", "from vla_jax import vla_step", "not below it"),
        ("vla_jax.ops", "importlib.import_module('vla_jax.layer')", "not below it"),
        ("vla_jax.pallas.a", "from vla_jax.pallas import b", "in a ring"),
        ("vla_jax.ops", "from jax.experimental import pallas as pl", "which is for pallas"),
        ("vla_jax.ops", "import jax.experimental.pallas.triton", "which is for pallas"),
        ("vla_jax.layer", "from flax import nnx", "which is for nnx linen"),
        ("vla_jax.other", "", "other has no place in ROOMS"),
    ],
)
def test_a_wrong_import_is_found(module, text, message):
    names = ("numerics", "types", "ops", "layer", "nnx", "linen")
    modules = dict.fromkeys(["vla_jax", *(f"vla_jax.{name}" for name in names)], "")
    modules["vla_jax.pallas.b"] = "from vla_jax.pallas import a"
    modules["vla_jax.pallas.a"] = (
        "from vla_jax import numerics\nfrom jax.experimental import pallas"
    )
    assert not violations(modules)
    (found,) = violations(modules | {module: text})
    assert message in found


def test_importing_the_package_imports_no_optional_package():
    script = "import sys, vla_jax; print(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=PACKAGE.parent, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    loaded = done.stdout.split()
    assert "vla_jax.ops" in loaded
    assert not [name for name in KEPT if name in loaded]
