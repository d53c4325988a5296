"""Settings, the rows that they produce, and the tables made of them."""
