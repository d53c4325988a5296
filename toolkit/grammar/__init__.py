"""Grammars: which tokens may come next in a text, by llguidance (the extra `grammar`)."""

from toolkit.grammar.text import TextGrammar, grammar_of, grammars_of
from toolkit.grammar.walk import Walk, masked

__all__ = ["TextGrammar", "Walk", "grammar_of", "grammars_of", "masked"]
