"""Search spaces that ship with hilnas, and their loader."""

from nas.search.spaces.identity import space_difference, space_json, space_key, space_yaml
from nas.search.spaces.loader import base_of, list_spaces, load_space, parse_space, space_text

__all__ = [
    "base_of",
    "list_spaces",
    "load_space",
    "parse_space",
    "space_difference",
    "space_json",
    "space_key",
    "space_text",
    "space_yaml",
]
