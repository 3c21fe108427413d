"""`python -m ciflows` runs the command `ciflows`."""

from ciflows.cli import main

main()
