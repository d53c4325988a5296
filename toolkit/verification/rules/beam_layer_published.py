"""The layer rule of DSBD's published code: the rule for i.i.d. candidates, on candidates drawn without replacement.

Paper: Dynamic-Width Speculative Beam Decoding (arXiv:2409.16560), Algorithm 1; the paper's theorem is about i.i.d. draws, its
published code drafts without replacement. Not exact: after a rejection the next candidate is tested against q, though
it was drawn from q without the earlier ones. For comparisons with published figures; `beam_layer` is the exact rule.
"""

from __future__ import annotations

from toolkit.verification.rules.beam_layer import BeamLayer


class PublishedBeamLayer(BeamLayer):
    """The rule `beam_layer` for candidates that differ. Lossy."""

    name = "beam_layer_published"
    lossless = False
    schemes = ("without_replacement",)
