"""Names of other libraries that are private, or that differ between their versions.

Only this package uses such names. Each of its modules serves one library or one part of torch, and
lists what it uses as `ForeignName`, with the versions that have the name. All other modules call
the functions here, which say what a name is for and what mfwrap does without it.

A name without ``since`` and ``before`` exists in all versions that mfwrap supports. The tests in
tests/unit/compatibility compare the lists with the installed versions, so they show what a new
release of a library has changed.

The package imports no other package of mfwrap, and neither transformers nor accelerate.
"""
