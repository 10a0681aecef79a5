"""Laws found by enumeration: small terms, paired by their values over Z_p, proven, and kept where nothing implies them.

``worlds`` says over which operands and operators; ``space`` holds the terms; ``enumerate`` finds the laws; ``reach``
says what follows from laws already found; ``generalize`` frees leading dims and attributes; ``fuse`` makes laws of two
results; ``names`` names; ``library`` puts it together and writes the file.
"""
