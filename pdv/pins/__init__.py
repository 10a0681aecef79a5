"""What a user fixes or forbids, from a file or a mapping to the predicates that every search obeys (docs/pins.md).

Entry points: ``load_pins`` reads, ``PinSet.on`` binds to a graph and a mesh, ``contradiction`` (``conflict``, which
searches) names the pins that no plan can keep together.
"""

from pdv.pins.pinset import PinSet, load_pins
from pdv.pins.roles import ROLES, Role, RoleOf
from pdv.pins.techniques import TECHNIQUES

__all__ = ["ROLES", "TECHNIQUES", "PinSet", "Role", "RoleOf", "load_pins"]
