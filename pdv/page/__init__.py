"""`report.html` as a file: markup, style, scripts and facts put together; what the facts are is `pdv.report.html`."""

from pdv.page.page import REPORT, write_page

__all__ = ["REPORT", "write_page"]
