"""What every room uses.

console.py     tables or JSON on stdout, notes and progress on stderr
devices.py     torch devices, and the precision of products
errors.py      the tree of errors
files.py       files and folders written atomically; JSON, checked against types
home.py        the home folder: stores and runs by name
machine.py     memory, disk and network, and errors of their lack
options.py     options for Python, TOML and the command line
processes.py   torch.distributed, as far as needed; signals
words.py       numbers, choices and options in sentences
"""
