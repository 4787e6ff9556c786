"""Hooks of MkDocs for `make docs-site`: the site holds all that its pages link to.

The README is the first page; its table "I have" becomes cards, with the scripts that rows name.
Links from docs/ to other files of the repository (examples, results) lead to generated pages, which
show the file or list the folder. The search finds pages for users: decisions, sources and internals
are not in its index. API pages show names by task. Beside each page lies its Markdown, and llms.txt
lists all pages.
"""

from __future__ import annotations

import html
import importlib
import re
from pathlib import Path, PurePosixPath
from posixpath import normpath, relpath
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]
LINK = re.compile(r"(?<=\]\()(?!\w+:|#)([^)#\s]+)")
LINKED = re.compile(r"\[([^]]*)\]\(([^)]*)\)")
LANGUAGES = {".py": "python", ".yaml": "yaml", ".yml": "yaml", ".sh": "sh", ".toml": "toml"}

# Fences and code spans, in which nothing is a link.
CODE = re.compile(r"^ *(`{3,}|~{3,}).*?^ *\1`*$|`[^`\n]+`", re.DOTALL | re.MULTILINE)
INTERNALS = re.compile(r"adr/|files/|(?:architecture|algorithms|threading|benchmarks)\.md")

CARDS = re.compile(r"^\| I have \|.*\n\|[-|]+\n((?:\|.*\n)+)", re.MULTILINE)

# Names of a framework's module by task, in this order; patterns of whole names.
GROUPS = {
    "Training": (
        r"Distributed\w+",
        r"Partial\w+",
        r"broadcast_(parameters|optimizer_state|\w*variables)",
        r"\w*Hook",
        r"SyncBatch\w+",
        "Compression",
        "load_model",
        r"[Gg]uard",
    ),
    "Collectives": (
        r"allreduce\w*",
        r"grouped_allreduce\w*",
        r"sparse_allreduce\w*",
        r"allgather\w*",
        r"broadcast\w*",
        r"\w*reducescatter\w*",
        r"alltoall\w*",
        r"\w*allgather\w*",
        "join",
        "barrier",
        "synchronize",
        "poll",
    ),
    "The job and its ranks": ("init", "shutdown", r"(local_|cross_)?(rank|size)(_op)?", r"is_\w+"),
    "Process sets": ("ProcessSet", r"\w*process_set\w*"),
    "Timeline and statistics": (r"\w*timeline", "statistics"),
    "Which libraries there are": (r"\w+_(built|enabled|supported)",),
    "More": (r"(?!.*Error$|.*Exception$)\w+",),  # api/errors.md has the errors
}
# A framework's own module on its page.
BLOCK = re.compile(r"^::: (hororing\.\w+)\n    options: (?!.*heading_level).*$", re.MULTILINE)
CONSTANTS = {"Adasum", "Average", "Max", "Min", "Product", "Sum"}

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

    changed, end = [], 0
    for code in CODE.finditer(text):
        changed += [LINK.sub(change, text[end : code.start()]), code[0]]
        end = code.end()
    return "".join([*changed, LINK.sub(change, text[end:])])


def _by_task(match: re.Match[str]) -> str:
    """Return the blocks of a module's names, by task."""
    module = importlib.import_module(match[1])
    names = [
        name
        for name in module.__all__
        if name not in CONSTANTS and not hasattr(getattr(module, name), "__path__")
    ]
    options = "    options: {heading_level: 3, show_root_full_path: false}"
    blocks, shown = list[str](), set[str]()
    for heading, patterns in GROUPS.items():
        found = [
            name
            for pattern in patterns
            for name in sorted(names)
            if re.fullmatch(pattern, name) and name not in shown and not shown.add(name)
        ]
        if found:
            blocks.append(f"## {heading}\n")
            blocks += [f"::: {match[1]}.{name}\n{options}\n" for name in found]
    return "\n".join(blocks)


def _cards(match: re.Match[str]) -> str:
    """Return a table of what readers have, what to type and what to read as cards."""
    cards = []
    for row in match[1].splitlines():
        have, command, read = re.split(r" *\| *", row)[1:-1]
        title = LINKED.sub(r"\1", have)
        lines = [f"**I have {title}**", "", "---", ""]
        lines += ["```", command.strip("`"), "```", ""] if command[:1] == "`" else [command, ""]
        if script := LINKED.search(have):
            text = (ROOT / script[2]).read_text("utf-8").strip().splitlines()
            code = [f"```{LANGUAGES[Path(script[2]).suffix]}", *text, "```"]
            lines += [f'??? example "Complete, in {sum(map(bool, text))} lines"', ""]
            lines += [*(f"    {each}" for each in code), ""]
        cards.append("-   " + "\n    ".join([*lines, read]))
    return '<div class="grid cards" markdown>\n\n' + "\n\n".join(cards) + "\n\n</div>\n"


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
            text = CARDS.sub(_cards, _shown(path))
            folder = path if source.is_dir() else str(PurePosixPath(path).parent)
            waiting += _targets(text, folder) if path.endswith(".md") or folder == path else []
            content = _linked(text, folder, page)
        files.append(File.generated(config, page, content=content))
    return files


def on_page_markdown(markdown: str, *, page: Any, config: Any, files: Files) -> str:
    """Let links of docs/ that lead outside lead to the generated pages; group the API."""
    if INTERNALS.match(page.file.src_uri):
        page.meta["search"] = {"exclude": True}
    elif page.file.src_uri.startswith("api/"):
        page.meta["search"] = {"boost": 0.5}  # who asks how reads a page first
    if page.file.generated_by:
        return markdown
    folder = normpath(f"docs/{PurePosixPath(page.file.src_uri).parent}")
    text = _linked(markdown, folder, page.file.src_uri)
    if page.file.src_uri.startswith("api/") and page.file.src_uri != "api/errors.md":
        text = BLOCK.sub(_by_task, text)
    return text


def on_page_content(content: str, *, page: Any, config: Any, files: Files) -> str:
    """Let the button of a block with prompts copy the commands only."""

    def change(match: re.Match[str]) -> str:
        text = html.unescape(re.sub(r"<[^>]+>", "", match[2]))
        typed = re.findall(r"^\$ (.*)$", text, re.MULTILINE)
        if not typed:
            return match[0]
        return f'{match[1]} data-copy="{html.escape(chr(10).join(typed))}">{match[2]}</pre>'

    return re.sub(r"(<pre)>(.*?)</pre>", change, content, flags=re.DOTALL)


def on_post_build(*, config: Any) -> None:
    """Write the Markdown of the pages beside them, and llms.txt, which lists them."""
    site = Path(config["site_dir"])
    lines = ["# hororing", "", f"> {config['site_description']}", ""]
    for section in config["nav"]:
        for heading, pages in section.items():
            lines += [f"## {heading}", ""]
            for page in pages:
                source = ROOT / "README.md" if page == "index.md" else ROOT / "docs" / page
                (site / page).write_text(source.read_text("utf-8"))
                lines.append(f"- [{_title(source)}]({page})")
            lines.append("")
    (site / "llms.txt").write_text("\n".join(lines))
