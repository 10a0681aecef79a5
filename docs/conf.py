"""How Sphinx builds the site, of pages that `tools/site.py` puts together; `make docs`."""

project = "pipeDejavu"
html_title = "pipeDejavu"
extensions = ["myst_parser", "sphinxcontrib.mermaid"]
myst_heading_anchors = 3  # anchors as the repository has them
myst_fence_as_directive = ["mermaid"]
html_theme = "furo"
html_show_sourcelink = False
html_copy_source = False
highlight_language = "none"  # an indented block is a shell's, a file's or Python's
linkcheck_timeout = 20
