# SPDX-License-Identifier: AGPL-3.0-only
"""E2B's code interpreter package against the template of that name. Prints results as JSON."""

from __future__ import annotations

import json
import sys
import time
import traceback

from e2b import NotFoundException, TimeoutException
from e2b_code_interpreter import Sandbox

sandbox: Sandbox


def code_keeps_its_state() -> None:
    assert sandbox.run_code("x = 41").text is None
    execution = sandbox.run_code("x += 1\nx")
    assert execution.text == "42" and execution.execution_count == 2, execution


def output_comes_as_it_is_printed() -> None:
    seen = []
    execution = sandbox.run_code(
        "import sys, time\nprint('one'); time.sleep(1); print('two')\nsys.stderr.write('bad\\n')",
        on_stdout=lambda message: seen.append((message.line, time.monotonic())),
    )
    assert execution.logs.stderr == ["bad\n"]
    lines = "".join(line for line, _ in seen)
    assert lines == "one\ntwo\n" and seen[-1][1] - seen[0][1] > 0.5, seen


def errors_have_a_name_and_a_traceback() -> None:
    error = sandbox.run_code("1 / 0").error
    assert error is not None and error.name == "ZeroDivisionError", error
    assert "division by zero" in error.value and "1 / 0" in error.traceback, error
    assert "\x1b" not in error.traceback, "colours"


def results_have_formats() -> None:
    execution = sandbox.run_code(
        "from IPython.display import HTML, display\n"
        "class Shown:\n"
        "    def _repr_markdown_(self): return '*m*'\n"
        "display(HTML('<b>h</b>')); display(Shown()); {'a': [1, 2.5]}"
    )
    html, markdown, main = execution.results
    assert html.html == "<b>h</b>" and not html.is_main_result
    assert markdown.markdown == "*m*"
    assert main.is_main_result and main.json == {"a": [1, 2.5]}, main


def contexts_are_apart() -> None:
    other = sandbox.create_code_context(cwd="/tmp")
    assert sandbox.run_code("import os; y = 1; os.getcwd()", context=other).text == "/tmp"
    error = sandbox.run_code("y").error
    assert error is not None and error.name == "NameError"
    sandbox.restart_code_context(other)
    error = sandbox.run_code("y", context=other).error
    assert error is not None and error.name == "NameError"
    sandbox.remove_code_context(other)
    try:
        sandbox.run_code("1", context=other)
    except NotFoundException:
        return
    raise AssertionError("a context that was removed runs code")


def other_languages_run() -> None:
    assert sandbox.run_code("const a: number = 20; a * 2", language="ts").text == "40"
    assert sandbox.run_code("await Promise.resolve('x')", language="js").text == "x"
    assert sandbox.run_code("echo $((6 * 7))", language="bash").logs.stdout == ["42\n"]


def variables_reach_the_code() -> None:
    hard = 'it\'s "q" $HOME \\n \U0001f600'
    for language, code in (
        ("python", "import os; print(os.environ.get('HARD')); print(os.environ.get('OWN'))"),
        ("javascript", "console.log(process.env.HARD); console.log(process.env.OWN)"),
        ("bash", 'printf \'%s\\n\' "${HARD-undefined}" "$OWN"'),
    ):
        for envs, wanted in (({"HARD": hard}, hard), ({}, "")):
            printed = "".join(sandbox.run_code(code, language=language, envs=envs).logs.stdout)
            first, own = printed.removesuffix("\n").split("\n")
            assert own == "of the sandbox", (language, printed)
            assert first == (wanted or ("None" if language == "python" else "undefined")), printed


def a_client_that_leaves_interrupts_its_code() -> None:
    try:
        sandbox.run_code("import time\nwhile True: time.sleep(0.1)", timeout=2)
    except TimeoutException:
        pass
    else:
        raise AssertionError("it ended")
    assert sandbox.run_code("x").text == "42", "the state is lost"


def a_kernel_that_dies_is_an_error() -> None:
    error = sandbox.run_code("import os; os.kill(os.getpid(), 9)").error
    assert error is not None and error.name == "KernelDied", error
    assert sandbox.run_code("1 + 1").text == "2"


def code_runs_as_root() -> None:
    execution = sandbox.run_code("!id -un")
    assert "".join(execution.logs.stdout).strip() == "root", execution


TOUR = (
    code_keeps_its_state, output_comes_as_it_is_printed, errors_have_a_name_and_a_traceback,
    results_have_formats, contexts_are_apart, other_languages_run, variables_reach_the_code,
    a_client_that_leaves_interrupts_its_code, a_kernel_that_dies_is_an_error, code_runs_as_root,
)  # fmt: skip

passed, failed = [], {}
sandbox = Sandbox.create(timeout=300, envs={"OWN": "of the sandbox"})
try:
    for work in TOUR:
        try:
            work()
            passed.append(work.__name__)
        except Exception:
            failed[work.__name__] = traceback.format_exc()
finally:
    sandbox.kill()
print(json.dumps({"passed": passed, "failed": failed}))
sys.exit(1 if failed else 0)
