"""`sae` and its commands.

main.py     the group of commands, help, errors as sentences, exit statuses
options.py  options as Typer parameters, `--config`, a command's start
*.py        one file a command, imported when named; each imports torch only when it runs
"""
