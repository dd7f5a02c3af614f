"""All small programs: every step from every state, breadth first, states merged.

What draws need luck for is met here: at a size of three or four pages and two tokens every order of
steps is tried, up to names. The first program that fails is the shortest that there is, whatever
the seed. See :mod:`refcache.oracle.explore.search` for how, :mod:`.fingerprint` for what makes two
states one, and :mod:`.scopes` for what is explored.
"""

from refcache.oracle.explore.fingerprint import Fingerprint, Names, Vocabulary, fingerprint
from refcache.oracle.explore.journal import Journal
from refcache.oracle.explore.scopes import SCOPES, select
from refcache.oracle.explore.search import Limits, Scope, Search, Searcher, broken, explored
from refcache.oracle.explore.snapshot import CannotCopy, Frozen, freeze

__all__ = [
    "SCOPES",
    "CannotCopy",
    "Fingerprint",
    "Frozen",
    "Journal",
    "Limits",
    "Names",
    "Scope",
    "Search",
    "Searcher",
    "Vocabulary",
    "broken",
    "explored",
    "fingerprint",
    "freeze",
    "select",
]
