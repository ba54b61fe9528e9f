import click


@click.command("extra")
def extra() -> None:
    """Say that the plug-in is here."""
    click.echo("extra is here")
