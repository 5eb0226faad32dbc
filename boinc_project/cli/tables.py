"""Tables for a terminal of 80 columns: headings wrap at spaces, cells wrap or fold, and nothing is cut."""

from __future__ import annotations

from rich.table import Column, Table


def table(*headings: str, title: str | None = None) -> Table:
    """An empty table with these headings, whose words stay whole as long as all of them have room."""
    columns = (
        Column(heading, overflow="fold", min_width=max(len(word) for word in heading.split())) for heading in headings
    )
    return Table(*columns, title=title)
