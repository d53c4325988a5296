"""The toolkit's parts inside other libraries, one per file."""
