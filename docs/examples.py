"""Prepares the reference: `Example:` in a docstring is a section of code; bases that users cannot import are hidden."""

import importlib
import re

import griffe

PUBLIC = {name for package in ("lazymodel", "lazymodel_keras") for name in importlib.import_module(package).__all__}


class Examples(griffe.Extension):
    """Renames the section before docstrings are parsed; leaves out private bases and the underscores of types."""

    def on_object(self, *, obj: griffe.Object, **_: object) -> None:
        if obj.docstring is not None:
            obj.docstring.value = re.sub(r"^( *)Example:$", r"\1Examples:", obj.docstring.value, flags=re.MULTILINE)

    def on_class(self, *, cls: griffe.Class, **_: object) -> None:
        cls.bases = [base for base in cls.bases if _is_shown(str(getattr(base, "canonical_path", base)))]

    def on_function(self, *, func: griffe.Function, **_: object) -> None:
        for each in func.parameters:
            if isinstance(constant := func.module.members.get(str(each.default)), griffe.Attribute):
                each.default = constant.value
        for annotation in (func.returns, *(each.annotation for each in func.parameters)):
            for name in annotation.iterate(flat=True) if isinstance(annotation, griffe.Expr) else ():
                if isinstance(name, griffe.ExprName):
                    name.name = name.name.lstrip("_") or name.name


def _is_shown(base: str) -> bool:
    """Returns True if a base is exported, or of another package; type parameters are left out."""
    name = base.partition("[")[0].rpartition(".")[2]
    return name in PUBLIC or not (base.startswith("lazymodel") or name.startswith("_") or name == "Generic")
