"""Builds the site from pages that read as well in a clone: what they link to outside of `docs/` is part of it.

The reference is made of what packages export and of the steps of `AbstractModel`. A link to a program,
`../examples/grow_model.py`, leads to a page that shows it; one to a Markdown file to that file as a page; one to a
picture to the picture.
"""

import importlib
import inspect
import re
from pathlib import Path

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parent.parent
OUTSIDE = re.compile(r"\]\((?:\.\./)+([\w./-]+?)(#[\w-]+)?\)")


def on_files(files: Files, config) -> Files:
    """Adds what pages link to outside of the folder."""
    linked = {match[1] for file in files.documentation_pages() for match in OUTSIDE.finditer(file.content_string)}
    for name in sorted(linked):
        path = ROOT / name
        if path.suffix == ".md":
            files.append(File.generated(config, f"more/{path.name}", content=_inner(path)))
        elif path.suffix == ".py":
            content = f"# {name}\n\n```python\n{path.read_text()}```\n"
            files.append(File.generated(config, f"more/{path.stem}.md", content=content))
        elif path.is_file():
            files.append(File.generated(config, f"more/{path.name}", abs_src_path=str(path)))
    for package in ("lazymodel", "lazymodel_keras"):
        files.append(File.generated(config, f"reference/{package}.md", content=_reference(package)))
    return files


def on_page_markdown(markdown: str, page, config, files) -> str:
    """Leads links there."""
    up = "../" * page.file.src_uri.count("/")

    def target(match: re.Match[str]) -> str:
        path = Path(match[1])
        name = f"{path.stem}.md" if path.suffix == ".py" else path.name
        return f"]({up}more/{name}{match[2] or ''})"

    return OUTSIDE.sub(target, markdown)


def _inner(path: Path) -> str:
    """A Markdown file without links of its own, which lead elsewhere from where it stands."""
    return re.sub(r"(?<!!)\[([^\]]*)\]\((?!https?:)[^)]*\)", r"\1", path.read_text())


def _reference(package: str) -> str:
    """A page of what a package exports."""
    module = importlib.import_module(package)
    lines = [f"# {package}", "", f"::: {package}", "    options: {members: false, show_root_heading: false}", ""]
    for name in sorted(module.__all__, key=str.lower):
        value = getattr(module, name)
        path = value.__name__ if inspect.ismodule(value) else f"{package}.{name}"
        lines += [f"::: {path}", "    options: {heading_level: 2}", ""]
        if name == "AbstractModel":  # its steps are functions of other modules
            for verb, function in vars(value).items():
                if inspect.isfunction(function) and verb[0] != "_" and function.__module__ != value.__module__:
                    lines += [f"::: {function.__module__}.{function.__name__}", "    options: {heading_level: 3}", ""]
    return "\n".join(lines)
