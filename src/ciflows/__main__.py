"""`python -m ciflows` is the same as the command `ciflows`."""

from ciflows.cli import main

main()
