"""The fingerprint of this machine and its packages, for results that are compared with those of other runs."""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Iterable
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path

from harness.engine.hardware import arithmetic_limits
from harness.environment import Environment
from harness.evidence.tree import tree_commit, tree_difference
from harness.request import default_arithmetic
from harness.running.plan import Plan
from harness.running.target_source import own_source_digest
from harness.sources import PACKAGES, installed_source


def environment(plan: Plan, root: Path, targets: Iterable[str] = ()) -> Environment:
    """The environment of a run by this plan in the project at `root` that trains these targets.

    Reads the sources of editable installs and of targets of the user's own.
    """
    first = plan.capacity.nodes[0]
    found = {name: each for name in PACKAGES if (each := _installed(name)) is not None}
    digests = {name: _digest(name) for name, each in found.items() if _is_editable(each)}
    return Environment(
        packages={**{name: each.version for name, each in found.items()}, "python": platform.python_version()},
        contents={name: digest for name, digest in digests.items() if digest},
        targets={name: digest for name in sorted(set(targets)) if (digest := own_source_digest(name, root))},
        injected=tuple(Path(each.content).name for each in plan.injections),
        device=first.device_name,
        architecture=first.architecture,
        driver=first.driver,
        cpu=first.cpu,
        threads=first.threads,
        limits=arithmetic_limits(),
        platform=f"{platform.system()} {platform.machine()}",
        engine=plan.engine,
        fabric=plan.fabric,
        arithmetic="" if plan.arithmetic == default_arithmetic(plan.device) else plan.arithmetic,
        program=plan.program,
        commit=tree_commit(root),
        changes=hashlib.sha256(difference.encode()).hexdigest()[:16] if (difference := tree_difference(root)) else "",
    )


def _installed(name: str) -> Distribution | None:
    try:
        return distribution(name)
    except PackageNotFoundError:
        return None


def _is_editable(found: Distribution) -> bool:
    """True when pip installed it from a folder whose files may change under the same version."""
    direct = found.read_text("direct_url.json")
    try:
        return direct is not None and bool(json.loads(direct).get("dir_info", {}).get("editable"))
    except (ValueError, AttributeError):
        return False


def _digest(name: str) -> str:
    source = installed_source(PACKAGES[name])
    return "" if source is None else source.digest[:16]
