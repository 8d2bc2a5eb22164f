"""`python -m flow_factory`: the command line."""

from flow_factory.cli.app import main

main()
