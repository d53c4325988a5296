"""Responses from endpoints: what is asked, what comes back, who is asked, and what is kept on the way."""
