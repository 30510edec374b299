"""The page: its ES modules, the import map that says where they are, and the HTML around them. It needs no network.

The front end is plain modules with Preact and htm (vendored, pinned, 17 kB), without a build step. They import one
another by names (`preact`, `view/base.js`), which the map leads to the server's own paths or, in a single file, where
browsers refuse to load modules from disk, to `data:` URLs.
"""

from __future__ import annotations

import base64
import hashlib
from functools import cache
from pathlib import Path
from typing import Final

import orjson

STATIC: Final = Path(__file__).parent / "static"
VENDORED: Final = {
    "preact": "vendor/preact.mjs",
    "preact/hooks": "vendor/hooks.mjs",
    "htm": "vendor/htm.mjs",
}
#: Each module's name in imports, and its file below `static`.
MODULES: Final = VENDORED | {f"view/{path.name}": path.name for path in sorted(STATIC.glob("*.js"))}
#: Adds a script element: `strict-dynamic` trusts what a trusted script adds and imports, nothing else.
_START: Final = (
    'const app = document.createElement("script"); app.type = "module"; '
    'app.src = import.meta.resolve("view/app.js"); document.head.append(app);'
)


@cache
def module(name: str) -> str:
    """The text of a module."""
    return (STATIC / MODULES[name]).read_text(encoding="utf-8")


@cache
def style() -> str:
    return (STATIC / "style.css").read_text(encoding="utf-8")


@cache
def scripts(*, inline: bool) -> str:
    """The import map, with the modules in it where the page is one file, and the script that starts the page."""
    return f'<script type="importmap">{_import_map(inline)}</script>\n<script type="module">{_START}</script>'


@cache
def script_policy(*, inline: bool) -> str:
    """The sources of scripts for a content security policy: these two scripts and what they load, and no other."""
    loaded = "'strict-dynamic'" if inline else "'self'"
    return f"{hash_of(_import_map(inline))} {hash_of(_START)} {loaded}"


@cache
def _import_map(inline: bool) -> str:
    def place(name: str) -> str:
        if not inline:
            return f"./static/{MODULES[name]}"
        return f"data:text/javascript;base64,{base64.b64encode(module(name).encode()).decode()}"

    return orjson.dumps({"imports": {name: place(name) for name in MODULES}}).decode()


def html(*, style_tag: str, scripts: str, data_tags: str = "", csp: str = "", title: str = "bench view") -> str:
    """The document; `csp` where no server can send it as a header."""
    policy = f'<meta http-equiv="Content-Security-Policy" content="{csp}">\n' if csp else ""
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
{policy}<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{_escape(title)}</title>
<link rel="icon" href="data:,">
{style_tag}
</head>
<body>
<div id="app"><p class="loading">Loading…</p></div>
<noscript>This page needs JavaScript. bench view PATH --text prints the same story in the terminal.</noscript>
{data_tags}{scripts}
</body>
</html>
"""


def hash_of(text: str) -> str:
    """As a content security policy names an inline script or style."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _escape(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;").replace('"', "&quot;")
