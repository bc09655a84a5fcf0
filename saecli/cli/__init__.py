"""`sae` and its commands: options, help, exit codes."""
