"""Drafts that are causal language models of their own: a pair's, fresh ones, or some of the target's layers."""
