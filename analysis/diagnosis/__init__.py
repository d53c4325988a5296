"""Why an engine accepts less than it should: its answers, a replay of the draft along them, causes, the sentence."""
