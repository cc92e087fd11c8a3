"""Hooks of mkdocs: what is written for readers of the repository, fitted to the site.

index.md     is the README; its links into docs/ become links between pages
markers      of generated parts go: Markdown would take a table right behind one for HTML
source links lead out of the site, so only their text stays
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parent.parent
_MARKER = re.compile(r"^<!-- [\w-]+:(?:begin|end) -->$", re.MULTILINE)
_LINK = re.compile(r"(?<!!)\[([^\]]+)\]\((?!https?:|#|mailto:)([^)#\s]+)(#[^)\s]*)?\)")


def on_files(files: Files, config: Any) -> Files:
    """Add the README as the first page."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    files.append(File.generated(config, "index.md", content=text))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Adapt one page."""
    home = page.file.src_uri == "index.md"

    def adapted(match: re.Match[str]) -> str:
        text, target, anchor = match[1], match[2], match[3] or ""
        if home and target.startswith("docs/"):
            return f"[{text}]({target.removeprefix('docs/')}{anchor})"
        if home or target.startswith("../"):
            return text
        return match[0]

    return _LINK.sub(adapted, _MARKER.sub("", markdown))
