"""Small pieces of HTML. Whatever comes from the journal is escaped here, and nowhere else by hand."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence

from egeria.report.svg import Picture


def text(value: object) -> str:
    """Escape a value for the inside of an element or of a quoted attribute."""
    return html.escape(str(value), quote=True)


def section(name: str, heading: str, *parts: str) -> str:
    """Return a section with a heading."""
    return f'<section aria-labelledby="{name}"><h2 id="{name}">{text(heading)}</h2>{"".join(parts)}</section>'


def paragraph(sentence: str, style: str = "") -> str:
    """Return a paragraph of plain text."""
    return f'<p class="{style}">{text(sentence)}</p>' if style else f"<p>{text(sentence)}</p>"


def table(label: str, columns: Sequence[tuple[str, str]], lines: Iterable[Sequence[str]]) -> str:
    """Return a table of plain text.

    Args:
        label: what the table shows, for those who cannot see it.
        columns: heading and style ('', 'number', 'what' or 'reason') of each column.
        lines: the cells of each line, as plain text; the first names the line.
    """
    head = "".join(f'<th scope="col"{_style(style)}>{text(heading)}</th>' for heading, style in columns)
    body = "".join(f"<tr>{_line(columns, cells)}</tr>" for cells in lines)
    return (
        f'<div class="card scroll" tabindex="0" role="region" aria-label="{text(label)}"><table>'
        f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"
    )


def figure(picture: Picture) -> str:
    """Return a picture with its title, caption and legend."""
    legend = "".join(
        f'<li><i aria-hidden="true" style="background:{text(colour)}"></i>{text(label)}</li>'
        for colour, label in picture.legend
    )
    return (
        f'<figure class="card"><h3>{text(picture.title)}</h3><figcaption>{text(picture.caption)}</figcaption>'
        f'<div class="scroll" tabindex="0" role="group" aria-label="{text(picture.title)}">{picture.svg}</div>'
        f'<ul class="legend">{legend}</ul></figure>'
    )


def _line(columns: Sequence[tuple[str, str]], cells: Sequence[str]) -> str:
    return "".join(
        f'<th scope="row"{_style(style)}>{text(cell)}</th>' if place == 0 else f"<td{_style(style)}>{text(cell)}</td>"
        for place, ((_, style), cell) in enumerate(zip(columns, cells, strict=True))
    )


def _style(name: str) -> str:
    return f' class="{name}"' if name else ""
