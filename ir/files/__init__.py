"""The doors through which files of a user are read (`reading`) and written (`writing`), and how large they may be."""
