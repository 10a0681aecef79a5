"""Programs at other sizes: which sizes change together, and small ones at which a proof costs seconds."""
