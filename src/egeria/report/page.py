"""The page: one HTML file that needs nothing but itself."""

from __future__ import annotations

from egeria.report.cache import cache_section
from egeria.report.history import History
from egeria.report.markup import figure, paragraph, section, text
from egeria.report.pictures import draw_pictures
from egeria.report.reference import reference_section
from egeria.report.sections import (
    events_section,
    glossary_section,
    headline,
    metrics_section,
    modules_section,
    settings_section,
    time_section,
)
from egeria.report.style import STYLE
from egeria.report.summary import Summary
from egeria.report.words import cautions, progress, verdict

# The page may load nothing and run nothing, whatever a name in the journal says.
POLICY = "default-src 'none'; style-src 'unsafe-inline'"


def render_page(history: History, summary: Summary) -> str:
    """Return the HTML of the report."""
    figures = "".join(map(figure, draw_pictures(history, summary)))
    pictures = figures or paragraph("There is nothing to draw yet: no interval was completed and no metric logged.")
    notes = "".join(f"<li>{text(caution)}</li>" for caution in cautions(summary))
    body = (
        f'<header><h1>{text(summary.name)}</h1><p class="soft">egeria report, {text(progress(summary))}</p></header>'
        f'<main><p class="verdict">{text(verdict(summary))}</p>{headline(summary)}'
        + (f'<ul class="notes" aria-label="What to know">{notes}</ul>' if notes else "")
        + section("pictures", "Pictures", pictures)
        + time_section(summary)
        + events_section(history)
        + modules_section(summary)
        + reference_section(history)
        + cache_section(history)
        + metrics_section(summary)
        + settings_section(summary)
        + glossary_section()
        + "</main><footer>Made by egeria from the journal of the run, and from nothing else.</footer>"
    )
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{text(summary.name)}: egeria report</title><style>{STYLE}</style></head><body>{body}</body></html>\n"
    )
