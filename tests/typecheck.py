"""The run-time type checker of the tests: beartype, with int accepted where float is asked for, as Python means it."""

from beartype import BeartypeConf, beartype

typechecker = beartype(conf=BeartypeConf(is_pep484_tower=True))
