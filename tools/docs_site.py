"""Hooks of MkDocs for `make docs-site`: the site holds all that its pages link to.

The README is the first page. Links from docs/ to other files of the repository (examples, results)
lead to generated pages, which show the file or list the folder.
"""

from __future__ import annotations

import re
from pathlib import Path, PurePosixPath
from posixpath import normpath, relpath
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]
LINK = re.compile(r"(?<=\]\()(?!\w+:|#)([^)#\s]+)")
LANGUAGES = {".py": "python", ".yaml": "yaml", ".yml": "yaml", ".sh": "sh", ".toml": "toml"}

_pages: dict[str, str] = {"README.md": "index.md"}  # file of the repository: page of the site


def _page_of(path: str) -> str:
    """Return the page of the site, or its asset, for a file or folder of the repository."""
    if path.startswith("docs/"):
        return path.removeprefix("docs/") + ("/index.md" if (ROOT / path).is_dir() else "")
    if path in _pages:
        return _pages[path]
    if Path(path).suffix == ".png":
        return f"files/{path}"
    if (ROOT / path).is_dir():
        return f"files/{path}/index.md"
    return f"files/{path}" if path.endswith(".md") else f"files/{path}.md"


def _targets(text: str, folder: str) -> list[str]:
    """Return the files that a page in `folder` links to, as paths in the repository."""
    return [normpath(f"{folder}/{link}") for link in LINK.findall(text)]


def _linked(text: str, folder: str, page: str) -> str:
    """Let the links of a page that was written in `folder` lead to pages of the site."""

    def change(match: re.Match[str]) -> str:
        target = _page_of(normpath(f"{folder}/{match[1]}"))
        return relpath(target, PurePosixPath(page).parent)

    return LINK.sub(change, text)


def _title(file: Path) -> str:
    """Return the heading of a page, or the name of another file."""
    if file.suffix == ".md":
        return file.read_text("utf-8").partition("\n")[0].removeprefix("# ")
    return file.name


def _shown(path: str) -> str:
    """Return the text of the page for a file or folder."""
    source = ROOT / path
    if source.is_dir():
        files = sorted(each for each in source.iterdir() if each.is_file())
        return f"# {path}\n\n" + "".join(f"* [{_title(each)}]({each.name})\n" for each in files)
    if source.suffix == ".md":
        return source.read_text("utf-8")
    text = source.read_text("utf-8")
    if source.suffix == ".ipynb" or text.count("\n") > 2000:
        return f"# {path}\n\nThis file is in the repository.\n"
    return f"# {path}\n\n````{LANGUAGES.get(source.suffix, 'text')}\n{text}````\n"


def on_files(files: Files, *, config: Any) -> Files:
    """Add the README, and what pages link to outside docs/."""
    waiting = ["README.md"]
    for file in files:
        if file.src_uri.endswith(".md"):
            folder = normpath(f"docs/{PurePosixPath(file.src_uri).parent}")
            waiting += _targets((ROOT / "docs" / file.src_uri).read_text("utf-8"), folder)
    added: set[str] = set()
    while waiting:
        path = waiting.pop()
        source = ROOT / path
        if path in added or not source.exists():
            continue
        if path.startswith("docs/") and not source.is_dir():
            continue
        added.add(path)
        page = _page_of(path)
        if path.endswith(".png"):
            content: str | bytes = source.read_bytes()
        else:
            text = _shown(path)
            folder = path if source.is_dir() else str(PurePosixPath(path).parent)
            waiting += _targets(text, folder) if path.endswith(".md") or folder == path else []
            content = _linked(text, folder, page)
        files.append(File.generated(config, page, content=content))
    return files


def on_page_markdown(markdown: str, *, page: Any, config: Any, files: Files) -> str:
    """Let links of docs/ that lead outside lead to the generated pages."""
    if page.file.generated_by:
        return markdown
    folder = normpath(f"docs/{PurePosixPath(page.file.src_uri).parent}")
    return _linked(markdown, folder, page.file.src_uri)
