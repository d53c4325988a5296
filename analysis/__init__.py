import toolkit  # noqa: F401  checks the command line of `python -m analysis.COMMAND` before anything heavy is imported
