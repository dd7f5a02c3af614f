"""One HTML file for a failure: no network, no dependency, light and dark, by mouse and keyboard."""

import html
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import Any

from refcache.errors import InvalidArgument
from refcache.picture.frames import Frame


@dataclass(frozen=True)
class Picture:
    """What a page shows.

    Attributes:
        title: of the window; ``subtitle``: suite and target, say.
        rule, sentence, evidence: what is broken; an empty rule: nothing is.
        program: to copy: what runs as it stands.
        frames: one a step, oldest first; a page without frames shows the text alone.
        timeline: of a simulated machine (:func:`refcache.picture.timeline.timeline`), or None.
        notes: more lines about it: versions, the argument.
        page_size: slots a page, for the slots that the evidence names.
    """

    title: str
    subtitle: str
    rule: str
    sentence: str
    evidence: str
    program: Sequence[str]
    frames: Sequence[Frame] = ()
    timeline: dict[str, Any] | None = None
    notes: Sequence[str] = field(default=())
    page_size: int = 1

    def html(self) -> str:
        """The page."""
        parts = files("refcache.picture")
        read = {n: parts.joinpath(f"page.{n}").read_text(encoding="utf-8") for n in _PARTS}
        shown = {
            "rule": self.rule, "sentence": self.sentence, "evidence": self.evidence,
            "program": list(self.program), "frames": list(self.frames),
            "timeline": self.timeline, "notes": list(self.notes), "subtitle": self.subtitle,
            "page_size": self.page_size,
        }  # fmt: skip
        data = json.dumps(shown).replace("<", "\\u003c")  # nothing in it ends the script
        page = read["html"].replace("/*CSS*/", read["css"]).replace("/*JS*/", read["js"])
        return page.replace("<!--TITLE-->", html.escape(self.title)).replace("/*DATA*/", data)


_PARTS = ("html", "css", "js")


def write_page(picture: Picture, path: str | Path) -> None:
    """Write the page.

    Raises:
        InvalidArgument: the file cannot be written.
    """
    try:
        Path(path).write_text(picture.html(), encoding="utf-8")
    except OSError as error:
        raise InvalidArgument(f"{path}: cannot be written: {error.strerror}") from None
