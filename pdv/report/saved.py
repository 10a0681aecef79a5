"""What a saved plan tells: why it is as it is, and what its step runs. ``pdv.verification`` says whether it is right.

A plan is replayed for this, so that operators, cuts and prices are what its derivation gives, and not what plan.json
says of them; the bound of its search and its proof are quoted from there.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from pdv.cluster import Cluster
from pdv.guard import door
from pdv.plan.package import read_document
from pdv.plan.seal import damage_error
from pdv.prices import cost_model, priced_by
from pdv.report.explain import explain_document, explain_operators
from pdv.report.loaded import Loaded, load_plan
from pdv.report.reasons import operators_called, reasons

if TYPE_CHECKING:
    from pdv.problem.workload import Workload


@door("pdv.explain")
def explain(
    directory: str | os.PathLike[str], operator: str | None = None, cost: str | os.PathLike[str] | None = None
) -> str:
    """What the plan of a package does and costs, and why, as text.

    Args:
        directory: a package.
        operator: a kind, name or number of operators, to tell about these alone, in detail.
        cost: the weight file or profile folder that priced the plan, where that was none of the shipped ones.

    Raises:
        UsageError: if the directory is no package, no operator is called so, or the plan was priced by other weights or
            profiles than there are.
        VerificationError: if plan.json is not as it was written, misses a field, or does not replay.
    """
    told = explanation(directory, operator, cost)
    if operator is not None:
        return explain_operators(told["operators"])
    try:
        return explain_document(read_document(directory), told)
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise damage_error(error) from error


@door("pdv.explain")
def explanation(
    directory: str | os.PathLike[str], operator: str | None = None, cost: str | os.PathLike[str] | None = None
) -> dict[str, Any]:
    """The same as data: operators, and rewrites where no operator is given (docs/plan-format.md).

    Raises:
        UsageError: as ``explain``.
        VerificationError: if the plan does not replay.
    """
    try:
        plan = load_plan(directory, priced_by(read_document(directory), cost))
        return reasons(plan) if operator is None else {"operators": operators_called(plan, operator)}
    except (KeyError, TypeError) as error:
        raise damage_error(error) from error


@door("pdv export")
def saved_plan(directory: str | os.PathLike[str], cost: str | os.PathLike[str] | None = None) -> Loaded:
    """The plan of a package, replayed and priced as it was.

    Raises:
        UsageError: as ``explain``.
        VerificationError: if the plan does not replay.
    """
    try:
        return load_plan(directory, priced_by(read_document(directory), cost))
    except (KeyError, TypeError) as error:
        raise damage_error(error) from error


@door("pdv simulate")
def saved_workload(
    directory: str | os.PathLike[str], cluster: Cluster | None = None, cost: str | os.PathLike[str] | None = None
) -> Workload:
    """What the plan of a package runs, for `pdv simulate`: on its own cluster, or on another of as many devices.

    Raises:
        UsageError: as ``explain``, or if the other cluster has more or fewer devices.
        VerificationError: if the plan does not replay.
    """
    from pdv.report.loaded import check_size, workload_of_plan

    plan = saved_plan(directory, cost)
    try:
        check_size(plan, cluster)
        return workload_of_plan(plan, cluster, None if cluster is None else lambda device: cost_model(cost, [device]))
    except (KeyError, TypeError) as error:
        raise damage_error(error) from error
