"""The names of `toolkit.models.pair`, where the code is."""

from toolkit.models.pair import ModelPair, Tokenizer, check_same_tokenizer, load_draft, load_tokenizer, resolve

__all__ = ["ModelPair", "Tokenizer", "check_same_tokenizer", "load_draft", "load_tokenizer", "resolve"]
