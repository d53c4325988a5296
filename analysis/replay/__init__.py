"""Every policy from one recording: replay, upper bounds, what heads predict."""
