"""Builds the site from pages that can also be read in a clone: linked files outside of `docs/` become part of the site.

The reference lists the exports of the packages and the steps of `AbstractModel`. A link to a program,
`../examples/grow_model.py`, becomes a link to a page that shows it. Linked Markdown files and notebooks become pages,
and pictures are copied.
"""

import importlib
import inspect
import json
import re
from pathlib import Path

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parent.parent
OUTSIDE = re.compile(r"\]\((?:\.\./)+([\w./-]+?)(#[\w-]+)?\)")


def on_files(files: Files, config) -> Files:
    """Adds files outside of the folder to which pages link."""
    linked = {match[1] for file in files.documentation_pages() for match in OUTSIDE.finditer(file.content_string)}
    for name in sorted(linked):
        path = ROOT / name
        if path.suffix == ".md":
            files.append(File.generated(config, f"more/{path.name}", content=_inner(path)))
        elif path.suffix == ".py":
            content = f"# {name}\n\n```python\n{path.read_text()}```\n"
            files.append(File.generated(config, f"more/{path.stem}.md", content=content))
        elif path.suffix == ".ipynb":
            files.append(File.generated(config, f"more/{path.stem}_notebook.md", content=_notebook(path)))
        elif path.is_file():
            files.append(File.generated(config, f"more/{path.name}", abs_src_path=str(path)))
    for package in ("lazymodel", "lazymodel_keras", "lazymodel_flax"):
        files.append(File.generated(config, f"reference/{package}.md", content=_reference(package)))
    return files


def on_page_markdown(markdown: str, page, config, files) -> str:
    """Changes links to these files."""
    up = "../" * page.file.src_uri.count("/")

    def target(match: re.Match[str]) -> str:
        path = Path(match[1])
        name = {".py": f"{path.stem}.md", ".ipynb": f"{path.stem}_notebook.md"}.get(path.suffix, path.name)
        return f"]({up}more/{name}{match[2] or ''})"

    return OUTSIDE.sub(target, markdown)


def _notebook(path: Path) -> str:
    """A notebook's cells and their output."""
    lines: list[str] = []
    for cell in json.loads(path.read_text())["cells"]:
        source = "".join(cell["source"])
        lines += [source if cell["cell_type"] == "markdown" else f"```python\n{source}\n```", ""]
        for output in cell.get("outputs", []):
            data = output.get("data", {"text/plain": output.get("text", "")})
            if "image/png" in data:
                lines.append(f'<img alt="figure" src="data:image/png;base64,{"".join(data["image/png"]).strip()}">')
            elif "text/html" in data:
                lines.append(f'<div style="overflow-x:auto">{"".join(data["text/html"])}</div>')
            else:
                lines.append(f"```text\n{''.join(data['text/plain']).rstrip()}\n```")
            lines.append("")
    return "\n".join(lines)


def _inner(path: Path) -> str:
    """A Markdown file without its own links, which would be wrong on the new page."""
    return re.sub(r"(?<!!)\[([^\]]*)\]\((?!https?:)[^)]*\)", r"\1", path.read_text())


def _reference(package: str) -> str:
    """A page with the exports of a package."""
    module = importlib.import_module(package)
    lines = [f"# {package}", "", f"::: {package}", "    options: {members: false, show_root_heading: false}", ""]
    for name in sorted(set(module.__all__) - {"adapter"}, key=str.lower):  # build_abstract finds the adapter by itself
        value = getattr(module, name)
        path = value.__name__ if inspect.ismodule(value) else f"{package}.{name}"
        again = ", members: false" if hasattr(value, "__path__") else ""  # it exports names of this page again
        lines += [f"::: {path}", f"    options: {{heading_level: 2{again}}}", ""]
        if name == "AbstractModel":  # its steps are functions of other modules
            for method in list(vars(value)):
                function = getattr(value, method)
                if inspect.isfunction(function) and method[0] != "_" and function.__module__ != value.__module__:
                    lines += [f"::: {function.__module__}.{function.__name__}", "    options: {heading_level: 3}", ""]
    return "\n".join(lines)
