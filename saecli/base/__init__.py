"""What every room uses.

console.py     tables or JSON on stdout, notes and progress on stderr
devices.py     torch devices, and the precision of products
documents.py   JSON documents, checked against types
errors.py      the tree of errors, and words for sentences
files.py       files and folders written atomically
home.py        the home folder: stores and runs by name
machine.py     memory, the hub's reachability, rank and world size
options.py     options for Python, TOML and the command line
processes.py   torch.distributed, as far as needed
"""
