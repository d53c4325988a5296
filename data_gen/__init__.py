import toolkit  # noqa: F401  checks the command line of `python -m data_gen.COMMAND` before anything heavy is imported
