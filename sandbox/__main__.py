"""`python -m sandbox`: the same commands as `bench`."""

from sandbox.cli import main

main()
