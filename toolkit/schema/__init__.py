"""What every key of every command means: its type, its range, one sentence. Nothing here imports torch.

    commands   the keys of each command's own, declared
    others     keys of classes that are not ours, or that their own file says too little about
    sources    the keys of any other class that a config names: read from its source file, which is not imported
    ranges     how a range is written beside a type
    arguments  arguments of Python calls against their annotations
    check      a composed config against all of this
    help       `--help`, printed from it

A key of a class (a policy, a rule, a proposer, ...) is declared by the class alone. Its type is the annotation of the
constructor or of the dataclass field, `Annotated[float, Between(0, 1)]` where the type is not enough. Its meaning is the
line "name  meaning" of the docstring.
"""
