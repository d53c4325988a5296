"""Kinds of drafts: what a kind is (`kinds`), which one a folder holds (`folders`), and a folder of code per kind.

Whoever needs to know what sets one kind apart asks its `DraftKind`.
"""

from toolkit.drafts.kinds import SEPARATE, DraftKind, gives_blocks, kind_by_target, kind_of, reads_states, register

__all__ = ["SEPARATE", "DraftKind", "gives_blocks", "kind_by_target", "kind_of", "reads_states", "register"]
