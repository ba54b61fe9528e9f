"""`fp8-harness exec`: runs a command on CPU ranks as if there were GPUs, and judges what it trained."""

import click


@click.command("exec", context_settings={"ignore_unknown_options": True})
@click.argument("command", nargs=-1, type=click.UNPROCESSED, required=True)
def exec_command(*, command: tuple[str, ...]) -> int:
    """Run a command on CPU ranks as if there were GPUs, and check what it trains."""
    raise NotImplementedError
