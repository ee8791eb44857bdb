"""Make the site's front page of the README, and copy linked files of the repository to the site.

A page links to a file outside ``docs`` as ``../examples/train_lm.py``, which works when the repository is read. The
site holds a copy of each such file under ``files/``: Markdown as a page, source as a page with its code, others
unchanged.
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
FRONT = "README.md"
SOURCE = {".py": "python", ".toml": "toml"}


def _on_site(path: str) -> str:
    """The path on the site of a file of the repository."""
    if path == FRONT:
        return "index.md"
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    return f"files/{path}.md" if Path(path).suffix in SOURCE else f"files/{path}"


def _repository(path: str, link: str) -> str:
    """The file of the repository to which ``link`` leads in the file ``path``."""
    return os.path.normpath(os.path.join(os.path.dirname(path), link))


def _linked(path: str, text: str) -> Iterator[str]:
    """Yield the files outside ``docs`` to which a page links; mkdocs complains about missing ones."""
    for link, _ in LINK.findall(text):
        found = _repository(path, link)
        if not found.startswith(("docs/", "..")) and (ROOT / found).is_file():
            yield found


def _rewritten(path: str, text: str) -> str:
    """``text`` of the file ``path``, with its links as the site has them."""
    here = os.path.dirname(_on_site(path))

    def link(found: re.Match[str]) -> str:
        target = _repository(path, found[1])
        known = not target.startswith("..") and (ROOT / target).is_file()
        return f"]({os.path.relpath(_on_site(target), here)}{found[2]})" if known else found[0]

    return LINK.sub(link, text)


def on_files(files: Files, config: Any) -> Files:
    """Add the front page, the files to which pages link, and the files to which those link."""
    front = (ROOT / FRONT).read_text()
    todo = [
        path for page in files.documentation_pages() for path in _linked(f"docs/{page.src_uri}", page.content_string)
    ]
    todo += _linked(FRONT, front)
    files.append(File.generated(config, "index.md", content=_rewritten(FRONT, front)))
    done = {FRONT}
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
    """Rewrite the links of a page of ``docs``; generated pages have theirs rewritten already."""
    uri = page.file.src_uri
    return markdown if uri == "index.md" or uri.startswith("files/") else _rewritten(f"docs/{uri}", markdown)
