"""The page as a single file."""

from __future__ import annotations

import re
from pathlib import Path

from tests.train.view.view_job import SCRIPT, nasty_job
from train.view import page
from train.view.api import View
from train.view.export import document, write_html


def test_the_file_contains_no_text_of_a_model_as_markup(tmp_path: Path) -> None:
    file = tmp_path / "view.html"
    list(write_html(View(nasty_job(tmp_path / "job")), file, most=4 << 20))
    text = file.read_text()
    assert SCRIPT not in text and "<img" not in text
    assert text.count("<script") == text.count("</script>") == 4
    assert not re.search(r"<[a-z]+[^>]*\b(?:src|href)=(?!\"data:,)", text)


def test_nothing_in_the_file_can_end_its_element() -> None:
    assert page.scripts(inline=True).count("<") == 4 and "</style" not in page.style()
    assert "sha256-" in document({"name": "j"}, {}, {}, [])
