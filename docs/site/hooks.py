"""What the site needs beyond Markdown: links to files of the repository that are not pages of ``docs``.

On a page such a link is ``../examples/train_lm.py``, which works where the repository is read. The site has a copy of
each file that is linked, under ``files/``: Markdown as a page, source as a page with its code, all else as it is.
"""

from __future__ import annotations

import os.path
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[2]
LINK = re.compile(r"\]\(([\w./-]+)((?:#[\w-]+)?)\)")
NAMED = re.compile(r"\[(\w+\.md)\]\((?=\1)")  # a link that is called like its file
SOURCE = {".py": "python", ".toml": "toml"}


def _on_site(path: str) -> str:
    """Where the site has a file of the repository."""
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    return f"files/{path}.md" if Path(path).suffix in SOURCE else f"files/{path}"


def _repository(path: str, link: str) -> str:
    """The file of the repository that a link in the file ``path`` of it leads to."""
    return os.path.normpath(os.path.join(os.path.dirname(path), link))


def _linked(path: str, text: str) -> Iterator[str]:
    """The files outside of ``docs`` that a page links to. What is not there is left, for mkdocs to complain of."""
    for link, _ in LINK.findall(text):
        found = _repository(path, link)
        if not found.startswith(("docs/", "..")) and (ROOT / found).is_file():
            yield found


def _rewritten(path: str, text: str) -> str:
    here = os.path.dirname(_on_site(path))

    def link(found: re.Match[str]) -> str:
        target = _repository(path, found[1])
        known = not target.startswith("..") and (ROOT / target).is_file()
        return f"]({os.path.relpath(_on_site(target), here)}{found[2]})" if known else found[0]

    return LINK.sub(link, text)


def on_files(files: Files, config: Any) -> Files:
    """Adds the files that pages link to, and those that these link to."""
    todo = [
        path for page in files.documentation_pages() for path in _linked(f"docs/{page.src_uri}", page.content_string)
    ]
    done = set[str]()
    while todo:
        path = todo.pop()
        if path in done:
            continue
        done.add(path)
        text, suffix = (ROOT / path).read_text(), Path(path).suffix
        if suffix in SOURCE:
            text = f"---\nsearch: {{exclude: true}}\n---\n# {path}\n\n````{SOURCE[suffix]}\n{text}````\n"
        elif suffix == ".md":
            todo += _linked(path, text)
            text = _rewritten(path, text)
        files.append(File.generated(config, _on_site(path), content=text))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Links to those files as the site has them, and links to pages by their titles."""

    def titled(link: re.Match[str]) -> str:
        page = ROOT / "docs" / link[1]
        title = page.read_text().partition("\n")[0].removeprefix("# ") if page.is_file() else link[1]
        return f"[{title}]("

    markdown = NAMED.sub(titled, markdown)
    return markdown if page.file.src_uri.startswith("files/") else _rewritten(f"docs/{page.file.src_uri}", markdown)
