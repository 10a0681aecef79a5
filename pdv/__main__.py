"""`python -m pdv` is `pdv`."""

from pdv.cli.app import main

main()
