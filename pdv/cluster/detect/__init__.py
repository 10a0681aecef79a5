"""What other tools wrote about a machine or a cluster, read as parts of a cluster file.

Entry points: `read_facts` (one input), `combine_facts` (a cluster file's content), `write_cluster`.
"""

from __future__ import annotations

from pdv.cluster.detect.combine import combine_facts
from pdv.cluster.detect.recognise import facts_of, read_facts
from pdv.cluster.detect.write import write_cluster

__all__ = ["combine_facts", "facts_of", "read_facts", "write_cluster"]
