"""The parts of a report: folders, tables, charts, texts token by token, and the page."""
