"""`fp8-harness dev`: what maintainers of the harness need. Plug-ins add its commands."""

import click

from harness.cli.groups import LazyGroup

_EPILOG = "\b\nExamples:\n  fp8-harness dev tier pr\n  fp8-harness dev mutate --list"


@click.group(cls=LazyGroup, sections={"Commands": {}}, path="dev", epilog=_EPILOG)
def dev() -> None:
    """Mutation testing, conformance, evidence, choice of tiers."""
