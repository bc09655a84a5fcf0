"""Warnings to callers from Python."""

import pytest

from saecli.base.console import Silent


@pytest.mark.parametrize("name", ["__main__", "saecli_runs", "saecli_runs.sweep", "thesis"])
def test_a_warning_names_the_line_of_the_caller_whatever_its_module_is_called(name: str):
    script = {"__name__": name}
    exec(compile("def call(warn):\n    warn('few rows')", "caller.py", "exec"), script)
    inside = {"__name__": "saecli.train.fit", "silent": Silent()}
    exec(compile("def warn(text): silent.warn(text)", "inside.py", "exec"), inside)
    with pytest.warns(UserWarning, match="few rows") as caught:
        script["call"](inside["warn"])
    assert (caught[0].filename, caught[0].lineno) == ("caller.py", 2)
