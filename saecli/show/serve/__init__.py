"""Pages that answer while one types: SAEs of one language model behind a small web server.

requests.py   what pages may ask for
workbench.py  the answers: codes of texts, latents, steered continuations, labels, runs
guard.py      who may ask: this machine, or who has the token
app.py        routes, one forward pass at a time, and the server
"""
