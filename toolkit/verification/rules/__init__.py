"""The rules, one per file. A rule is found by the `name` that its class declares (`toolkit.verification.get`)."""
