"""Names of other libraries that are private, or that differ between their versions.

Only this package uses such names. Each of its modules serves one library or one part of torch, and
lists what it uses as `ForeignName`: what the name is for, in which versions it exists, and what
mfwrap does in the others. All other modules call the functions here.

A name without ``since`` and ``before`` exists in all versions that mfwrap supports. The tests in
tests/unit/compatibility compare the lists with the installed versions, so they show what a new
release of a library has changed.

The package imports no other package of mfwrap, and neither transformers nor accelerate.
"""
