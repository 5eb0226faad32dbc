"""Inserting elements into an admin's XML file without touching any other byte of it.

What it is: a reader that knows where elements begin and end in the text, and insertions computed from that.
What it is not: an XML library. Files are never serialised anew, so comments, odd indentation, CRLF and the
admin's order stay; BOINC's own parser is lenient, so files with broken tags are read as far as they go.

    read(bytes) -> text           lossless; written back by `as_bytes`
    parse(text) -> Element        the elements and their places
    insert_child(...) -> pieces   the text to add as the last child of an element
    undo(text, piece) -> text     the text without it
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from xml.sax.saxutils import escape, unescape

_TOKEN = re.compile(
    r"<!--.*?-->|<!\[CDATA\[.*?\]\]>|<\?.*?\?>|<![^>]*>|"
    r"<(?P<close>/?)\s*(?P<name>[A-Za-z_][\w.:-]*)(?P<rest>[^<>]*?)(?P<empty>/?)>",
    re.DOTALL,
)
_INDENT = "    "


@dataclass(frozen=True, kw_only=True)
class Piece:
    """One change of a text: `old` (mostly '') was replaced by `new`, which occurs once in the changed text.

    `wraps`: it only holds other elements, and stays where others have been put into it since.
    """

    old: str
    new: str
    wraps: bool = False


@dataclass(kw_only=True)
class Element:
    """An element and its place: text[start:end] is all of it, text[inside:close] what is between its tags."""

    name: str
    start: int
    inside: int
    close: int = -1  # -1 while it is open
    end: int = -1
    children: list[Element] = field(default_factory=list)

    @property
    def is_empty_tag(self) -> bool:
        """Whether it is written `<name/>`."""
        return self.inside == self.close == self.end

    def find(self, *names: str) -> Element | None:
        """The first descendant along this path of names."""
        if not names:
            return self
        for child in self.children:
            if child.name == names[0]:
                found = child.find(*names[1:])
                if found is not None:
                    return found
        return None

    def all(self, name: str) -> Iterator[Element]:
        """Children of this name."""
        return (child for child in self.children if child.name == name)


def read(data: bytes) -> str:
    """The file's text; bytes that are not UTF-8 survive a round trip through `as_bytes`."""
    return data.decode("utf-8", "surrogateescape")


def as_bytes(text: str) -> bytes:
    """What `read` was given."""
    return text.encode("utf-8", "surrogateescape")


def quoted(text: str) -> str:
    """Text for an element, in ASCII, so that it is right in whatever encoding the file has."""
    return escape(text).encode("ascii", "xmlcharrefreplace").decode()


def parse(text: str) -> Element:
    """The text's elements below a nameless root; tags that fit nothing are skipped, open ones end with their parent."""
    root = Element(name="", start=0, inside=0)
    stack = [root]
    for token in _TOKEN.finditer(text):
        name = token["name"]
        if not name:
            continue
        if token["close"]:
            if any(open_one.name == name for open_one in stack[1:]):
                while stack[-1].name != name:
                    _end(stack.pop(), token.start(), token.start())
                _end(stack.pop(), token.start(), token.end())
            continue
        element = Element(name=name, start=token.start(), inside=token.end())
        stack[-1].children.append(element)
        if token["empty"]:
            _end(element, token.end(), token.end())
        else:
            stack.append(element)
    for element in stack:
        _end(element, len(text), len(text))
    return root


def _end(element: Element, close: int, end: int) -> None:
    element.close, element.end = close, end


def text_of(text: str, element: Element | None) -> str:
    """The stripped text of an element without comments; '' for none."""
    if element is None:
        return ""
    inside = re.sub(r"<!--.*?-->", "", text[element.inside : element.close], flags=re.DOTALL)
    return unescape(inside.strip(), {"&quot;": '"', "&apos;": "'"})


def insert_child(text: str, parent: Element, lines: list[str]) -> tuple[str, list[Piece]]:
    """Add `lines` (an element, indented from 0) as the last child of `parent`; returns the text and what was changed.

    Line ends and indentation follow what is there. `parent` must have been parsed from `text`.
    """
    newline = "\r\n" if "\r\n" in text else "\n"
    outer = _indent_of(text, parent.start)
    if parent.is_empty_tag:
        opening = re.sub(r"\s*/>$", ">", text[parent.start : parent.end])
        opened = Piece(
            old=text[parent.start : parent.end], new=f"{opening}{newline}{outer}</{parent.name}>", wraps=True
        )
        place, close = parent.start + len(opening), parent.start + len(opened.new) - len(parent.name) - 3
        text = text[: parent.start] + opened.new + text[parent.end :]
        parent = Element(name=parent.name, start=parent.start, inside=place, close=close, end=close)
        added, pieces = insert_child(text, parent, lines)
        return added, [opened, *pieces]
    if parent.children:
        last = parent.children[-1]
        place, added = last.end, _block(lines, _indent_of(text, last.start, outer + _INDENT), newline)
    else:
        place, added = parent.inside, _block(lines, outer + _INDENT, newline)
    # What follows on the same line, a comment of the admin's say, stays with what it stands behind.
    rest = re.match(r"(?:[ \t]*<!--[^\n]*?-->)?[ \t]*(?=\r?\n)", text[place : parent.close])
    place += rest.end() if rest is not None else 0
    if "\n" not in text[place : parent.close]:
        added += newline + outer
    return text[:place] + added + text[place:], [Piece(old="", new=added)]


def _block(lines: list[str], indent: str, newline: str) -> str:
    return "".join(f"{newline}{indent}{line}" for line in lines)


def _indent_of(text: str, place: int, otherwise: str = "") -> str:
    """The white space before `place` on its line; `otherwise` if something else stands before it."""
    before = text[text.rfind("\n", 0, place) + 1 : place]
    return before if not before.strip() else otherwise


def undo(text: str, piece: Piece) -> str | None:
    """The text without the piece; None if it is not there (any more) exactly once.

    Where somebody has written the whole file anew in the meantime, as BOINC's own tools do, the piece's elements
    are recognised by their contents.
    """
    if text.count(piece.new) == 1:
        return text.replace(piece.new, piece.old)
    if piece.old or piece.wraps:
        return None
    wanted = [_contents(piece.new, element) for element in parse(piece.new).children]
    for content in wanted:
        found = [element for element in _descendants(parse(text)) if _contents(text, element) == content]
        if len(found) != 1:
            return None
        text = without(text, found[0])
    return text if wanted else None


def without(text: str, element: Element) -> str:
    """The text without an element and the white space before it."""
    return text[: len(text[: element.start].rstrip())] + text[element.end :]


def _descendants(element: Element) -> Iterator[Element]:
    for child in element.children:
        yield child
        yield from _descendants(child)


def named(text: str, name: str) -> list[Element]:
    """Every element of this name, wherever it is."""
    return [element for element in _descendants(parse(text)) if element.name == name]


def _contents(text: str, element: Element) -> tuple[object, ...]:
    """Name, text and children without the white space and comments between them."""
    if element.children:
        return (element.name, *(_contents(text, child) for child in element.children))
    return (element.name, text_of(text, element))
