"""The page: its modules joined into one script, and the HTML around it. Nothing of it comes from a network.

The front end is plain ES modules with Preact and htm (vendored, pinned, 17 kB): no build step, so what is read here is
what runs. Joined into one script, the same page works from a server and from a file, where browsers refuse modules.
"""

from __future__ import annotations

import base64
import hashlib
import re
from functools import cache
from pathlib import Path
from typing import Final

STATIC: Final = Path(__file__).parent / "static"
#: In the order in which they need each other.
MODULES: Final = (
    "vendor/preact.mjs", "vendor/hooks.mjs", "vendor/htm.mjs", "base.js", "source.js", "format.js", "layout.js",
    "strip.js", "band.js", "pane.js", "tokens.js", "breaks.js", "charts.js", "filter.js", "jobs.js", "calls.js",
    "rollout.js", "compare.js", "app.js",
)  # fmt: skip
_IMPORT = re.compile(r'^import\s*(?:(\w+)|\{([^}]*)\})\s*from\s*"([^"]+)";?', re.M)
_RENAMED = re.compile(r"([\w$]+) as ([\w$]+)")
_EXPORT_LIST = re.compile(r"export\s*\{([^}]*)\};?")
_EXPORT = re.compile(r"^export (?=(?:async )?function\*?\s+(\w+)|(?:const|let|class)\s+(\w+))", re.M)


@cache
def script() -> str:
    """All modules as one: each a function of its own, its imports and exports through one object."""
    parts = ['"use strict";', "const modules = {};"]
    for name in MODULES:
        parts.append(_block(name, (STATIC / name).read_text(encoding="utf-8")))
    return "\n".join(parts) + "\n"


@cache
def style() -> str:
    return (STATIC / "style.css").read_text(encoding="utf-8")


def _block(name: str, text: str) -> str:
    exported: list[str] = []

    def imports(found: re.Match[str]) -> str:
        whole, names, source = found.groups()
        key = f'modules["{_key(source)}"]'
        if whole:
            return f"const {whole} = {key}.default;"
        taken = _RENAMED.sub(r"\1: \2", names)
        return f"const {{ {taken} }} = {key};"

    def export_list(found: re.Match[str]) -> str:
        exported.extend(_RENAMED.sub(r"\2: \1", one.strip()) for one in found[1].split(",") if one.strip())
        return ""

    def export(found: re.Match[str]) -> str:
        exported.append(found[1] or found[2])
        return ""

    text = re.sub(r"^//# sourceMappingURL=.*$", "", text, flags=re.M)
    text = _IMPORT.sub(imports, text)
    text = _EXPORT_LIST.sub(export_list, text)
    text = _EXPORT.sub(export, text)
    text, defaults = re.subn(r"export default (?=function)", "const _default = ", text)
    if defaults:
        exported.append("default: _default")
    return f'// {name}\n(() => {{\n{text}\nmodules["{_key(name)}"] = {{ {", ".join(exported)} }};\n}})();'


def _key(name: str) -> str:
    """`vendor/preact.mjs`, `./vendor/preact.mjs` and `preact` are one module."""
    return {"preact": "preact"}.get(name, Path(name).stem)


def html(*, style_tag: str, data_tags: str, script_tag: str, csp: str = "", title: str = "bench view") -> str:
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
{data_tags}{script_tag}
</body>
</html>
"""


def hash_of(text: str) -> str:
    """As a content security policy names an inline script or style."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _escape(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;").replace('"', "&quot;")
