"""Histories of equal tokens whose keys differ, because rotary frequencies depend on the length of the sequence.

The prefix cache finds blocks by the tokens before them. The first token of a history whose keys have the frequencies
of long sequences is therefore written into the books as its complement, a negative number: such histories share blocks
with each other and with no others.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence


def marked(token_ids: Sequence[int]) -> array[int]:
    """The history as the books hold it; applied again, the history as it is."""
    found = array("i", token_ids)
    found[0] = ~found[0]
    return found
