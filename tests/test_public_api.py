"""The public names and their signatures are those of ``public_api.txt``."""

import difflib
import importlib
import inspect
import pathlib

SNAPSHOT = pathlib.Path(__file__).with_name("public_api.txt")
RENEW = "python tests/test_public_api.py"
MODULES = (
    "vla_jax",
    "vla_jax.nnx",
    "vla_jax.linen",
    "vla_jax.presets",
    "vla_jax.packing",
    "vla_jax.sharding",
    "vla_jax.serialization",
    "vla_jax.generation",
    "vla_jax.baselines",
    "vla_jax.baseline_layers",
    "vla_jax.checks",
    "vla_jax.diagnostics",
    "vla_jax.selftest",
    "vla_jax.pallas",
)


def public(module):
    """``{name: object}``: ``__all__``, or what the module defines itself without an underscore."""
    names = getattr(module, "__all__", None)
    if names is None:
        names = [
            name
            for name, x in vars(module).items()
            if not name.startswith("_") and getattr(x, "__module__", None) == module.__name__
            if callable(x)
        ]
    return {name: getattr(module, name) for name in sorted(names)}


def default(x):
    """A default value without an address of memory or a path."""
    if callable(x):
        return getattr(x, "__qualname__", type(x).__name__).split(".")[0]
    if x is None or isinstance(x, (bool, int, float, str, tuple)):
        return repr(x)
    return type(x).__name__


def signature(x):
    """``(query, key, *, readout='ratio')``, without annotations; of a class that of its objects."""
    if inspect.isclass(x) and x.__init__ is not object.__init__:
        found = list(inspect.signature(x.__init__).parameters.items())[1:]
    else:
        found = inspect.signature(x).parameters.items()
    parameters = []
    star = False
    for name, p in found:
        if p.kind is p.KEYWORD_ONLY and not star:
            parameters.append("*")
        star = star or p.kind in (p.KEYWORD_ONLY, p.VAR_POSITIONAL)
        prefix = {p.VAR_POSITIONAL: "*", p.VAR_KEYWORD: "**"}.get(p.kind, "")
        value = "" if p.default is p.empty else f"={default(p.default)}"
        parameters.append(f"{prefix}{name}{value}")
    return f"({', '.join(parameters)})"


def describe(name, x):
    """The lines of a function or class, with methods and properties, inherited ones too."""
    if not callable(x):
        return [name]
    if not inspect.isclass(x):
        return [name + signature(x)]
    lines = [f"class {name}{signature(x)}"]
    members = {}
    for base in reversed(x.__mro__):
        if base.__module__.split(".")[0] != "vla_jax":
            continue
        for member, value in vars(base).items():
            if member.startswith("_") and member != "__call__":
                continue
            if isinstance(value, (classmethod, staticmethod)):
                value = value.__func__
            if isinstance(value, property):
                members[member] = f"  {member}"
            elif getattr(value, "__qualname__", "") == f"{base.__name__}.{member}":
                members[member] = f"  {member}{signature(value)}"
    return lines + [line for _, line in sorted(members.items())]


def api():
    """The text that ``public_api.txt`` holds."""
    lines = []
    for name in MODULES:
        lines += [f"# {name}", ""]
        for member, x in public(importlib.import_module(name)).items():
            lines += describe(member, x)
        lines.append("")
    return "\n".join(lines).rstrip() + "\n"


def test_the_public_api_is_the_one_on_record():
    recorded = SNAPSHOT.read_text("utf-8")
    changes = difflib.unified_diff(
        recorded.splitlines(), api().splitlines(), "on record", "now", lineterm="", n=0
    )
    text = "\n".join(changes)
    assert not text, f"the public API has changed; if it is meant to, `{RENEW}` records it\n{text}"


def test_every_public_name_is_documented():
    for module in MODULES:
        for name, x in public(importlib.import_module(module)).items():
            if callable(x):
                assert inspect.getdoc(x), f"{module}.{name} has no docstring"


if __name__ == "__main__":
    SNAPSHOT.write_text(api(), "utf-8")
