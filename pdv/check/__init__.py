"""An independent check of emitted programs: their text is run on simulated ranks and compared with the source."""

from pdv.check.checked import Checked, check_text

__all__ = ["Checked", "check_text"]
