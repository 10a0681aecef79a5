"""The page itself: markup, style and scripts, which ``pdv.page.page`` puts into one file."""
