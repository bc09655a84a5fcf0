"""`sae` and its commands.

    main.py         the group of commands, help, errors as sentences, exit statuses
    options.py      options as Typer parameters, those common to commands, a command's start
    config_file.py  `--config`: options from a TOML file
    commands/       one file a command, imported when named; each imports torch only when it runs
"""
