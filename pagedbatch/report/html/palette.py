"""The colours of the page by name, light and dark.

Figures are drawn in placeholder colours, one for each name. On the page, CSS variables replace them, so that it follows
the reader's theme; in a picture outside a page, the light colours do.
"""

from __future__ import annotations

import re
from typing import NamedTuple


class Shades(NamedTuple):
    light: str
    dark: str


COLOURS: dict[str, Shades] = {
    "paper": Shades("#ffffff", "#14171c"),
    "card": Shades("#f6f7f9", "#1c2027"),
    "ink": Shades("#1c2128", "#e6e9ee"),
    "muted": Shades("#5c6675", "#9da7b5"),
    "grid": Shades("#dfe3e8", "#303742"),
    # blocks by state
    "private": Shades("#4a7bc8", "#6d9bea"),
    "shared": Shades("#b0489b", "#d06fbd"),
    "cached": Shades("#62b9c6", "#3f8f9c"),
    "free": Shades("#eceff2", "#232932"),
    # shares of memory, and what is drawn over them
    "used": Shades("#3d9568", "#4fa87b"),
    "reserved": Shades("#86a9dd", "#5b7fb8"),
    "internal": Shades("#e6ae4a", "#c08a2e"),
    "external": Shades("#c3c9d1", "#4b5461"),
    "on_used": Shades("#ffffff", "#0d1a13"),
    # shared blocks of the map by owners
    "few": Shades("#dda0cf", "#8a4a7d"),
    "several": Shades("#c46fb2", "#b45ca2"),
    "many": Shades("#8f2f7d", "#e39ad4"),
}

_PLACEHOLDERS = {name: f"#01fe{number:02x}" for number, name in enumerate(COLOURS)}
_NAMES = {placeholder: name for name, placeholder in _PLACEHOLDERS.items()}
_PLACEHOLDER = re.compile("#01fe[0-9a-f]{2}")


def colour(name: str) -> str:
    """The placeholder of the named colour, to draw with."""
    return _PLACEHOLDERS[name]


def with_variables(svg: str) -> str:
    """Replaces placeholders by `var(--name)`."""
    return _PLACEHOLDER.sub(lambda found: f"var(--{_NAMES[found[0]]})", svg)


def with_light_colours(svg: str) -> str:
    return _PLACEHOLDER.sub(lambda found: COLOURS[_NAMES[found[0]]].light, svg)


def css_variables() -> str:
    """The rules that define the variables, light and dark."""
    light = "".join(f"--{name}:{shades.light};" for name, shades in COLOURS.items())
    dark = "".join(f"--{name}:{shades.dark};" for name, shades in COLOURS.items())
    return f":root{{color-scheme:light dark;{light}}}\n@media (prefers-color-scheme:dark){{:root{{{dark}}}}}\n"
