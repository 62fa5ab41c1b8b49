"""The console's pages, drawn from what actions.py and library.py answer."""
