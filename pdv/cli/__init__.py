"""The command line: one file per command, argument parsing and printing only. Entry point: `pdv.cli.app.main`."""
