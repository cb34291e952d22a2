# SPDX-License-Identifier: MIT
"""For lecturers: copies of the project with functions left blank, grades, and the notebook.

    python docs/homework.py student NEW_FOLDER EXERCISE ...    make a student's copy
    python docs/homework.py grade FOLDER [EXERCISE ...]        grade FOLDER/STUDENT/...
    python docs/homework.py tour                               run docs/tour.ipynb, save its output

docs/assignments.md has the exercises. A student's copy has only the tests that grade its exercises.
To grade an exercise, we take its functions from the submission and put them into our own files. So
nothing else that a student did or forgot changes the result.
"""

import ast
import base64
import contextlib
import io
import json
import multiprocessing
import os
import re
import resource
import signal
import sys
import tempfile
import textwrap
from pathlib import Path
from typing import NamedTuple

import matplotlib.pyplot as plt
import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # the notebook imports trmrl.py


class Exercise(NamedTuple):
    functions: str  # what to write, by name; or a new file
    tests: str  # the tests that grade it, as for pytest -k; none: the lecturer grades it
    points: int


EXERCISES = {
    "reward": Exercise("HalfCheetahVel.reward", "minus_150", 5),
    "window": Exercise("window", "queue_of_algorithm_1 or pad_is_zero", 15),
    "attention": Exercise("Layer.forward", "future_memories or encoder_of_pytorch", 15),
    "tfixup": Exercise("Transformer.__init__", "section_3_3 or twelve_layers", 10),
    "gae": Exercise("gae", "gae_is_the_weighted_mean", 10),
    "ends": Exercise("advantages_and_targets", "time_limit_bootstraps or rewards_of_any_unit", 15),
    "ppo": Exercise("ppo_loss", "clipped_objective", 10),
    "collect": Exercise(
        "Player.observe collect", "queue_of_algorithm_1 or time_limit_bootstraps", 25
    ),
    "rl2": Exercise(
        "RL2.recall", "memory_is_a_gru or belief_knows_the_past or made_of_segments", 20
    ),
    "theorem": Exercise("", "", 15),
    "curve": Exercise("", "", 10),
    "sceptic": Exercise("", "", 15),
    "family": Exercise("family.py", "family_hides_its_tasks", 20),
}
GRADED = [name for name, exercise in EXERCISES.items() if exercise.tests]
TWINS = {"attention": "attention_weights"}  # left blank, too: it would give the answer away

FAMILY = """import trmrl


class Family(trmrl.TaskFamily):
    def __init__(self, num_tasks, seed=0, split="train"):
        raise NotImplementedError("family.py: your turn")
"""
README = """# Homework: {names}

    python3 -m venv venv && . venv/bin/activate && pip install -r requirements.txt
    pytest             # grades your work; a failing test says what is wrong
    python plots.py    # draws the runs in results/ and your own runs into figures/

Write the functions that raise `NotImplementedError`. Only these functions are graded: keep helpers
and imports inside them. Hand in the files that you changed.

{exercises}"""


# ---- Functions of a source text ------------------------------------------------------------------


def find_function(source, name):
    """The syntax tree of a function or of Class.method, or None."""
    node = ast.parse(source)
    for part in name.split("."):
        kinds = (ast.FunctionDef, ast.ClassDef)
        found = [x for x in getattr(node, "body", []) if isinstance(x, kinds) and x.name == part]
        if not found:
            return None
        node = found[-1]
    return node if isinstance(node, ast.FunctionDef) else None


def lines_of(node):
    """The lines of a statement, as a slice, with its decorators."""
    decorators = getattr(node, "decorator_list", [])
    return slice(min(x.lineno for x in [node, *decorators]) - 1, node.end_lineno)


def blank(source, name):
    """The source without the body of a function. Its signature and docstring stay."""
    function = find_function(source, name)
    body = function.body[bool(ast.get_docstring(function)) :]
    lines = source.splitlines(keepends=True)
    begin = body[0].lineno - 1
    while not lines[begin - 1].split("#")[0].strip():
        begin -= 1  # a comment above the first statement belongs to the body
    todo = f'{" " * body[0].col_offset}raise NotImplementedError("{name}: your turn")\n'
    return "".join([*lines[:begin], todo, *lines[body[-1].end_lineno :]])


def graft(source, name, submission):
    """The source with one function taken from a submission."""
    ours, theirs = find_function(source, name), find_function(submission, name)
    taken = "\n".join(submission.splitlines()[lines_of(theirs)])
    lines = source.splitlines()
    lines[lines_of(ours)] = [textwrap.indent(textwrap.dedent(taken), " " * ours.col_offset)]
    return "\n".join(lines) + "\n"


def select_tests(source, names):
    """A test file with the tests of these exercises only; they are in its first two sections."""
    words = [word for name in names for word in EXERCISES[name].tests.split(" or ") if word]
    source = source.split("# ---- 3. ")[0]
    docstring, *nodes = ast.parse(source).body
    others = [docstring]  # it is about all tests
    for node in nodes:
        name = getattr(node, "name", "")
        if name.startswith("test_") and not any(word in name for word in words):
            others.append(node)
    lines = source.splitlines()
    for node in reversed(others):
        del lines[lines_of(node)]
    return re.sub("\n{4,}", "\n\n\n", "\n".join(lines)) + "\n"


# ---- A student's copy ----------------------------------------------------------------------------


def read_files(names):
    """Our files for these exercises, by path."""
    patterns = ["trmrl.py", "plots.py", "test_trmrl.py"] + ["baselines/*.py"] * ("rl2" in names)
    files = {}
    for path in [path for pattern in patterns for path in sorted(ROOT.glob(pattern))]:
        text = path.read_text()
        is_test = path.name.startswith("test_")
        files[str(path.relative_to(ROOT))] = select_tests(text, names) if is_test else text
    return files


def path_of(function, files):
    """The file that defines a function. A new file of an exercise is named in its place."""
    if function.endswith(".py"):
        return function
    return next(path for path in files if find_function(files[path], function))


def blank_files(names):
    """Our files for these exercises, with their functions left blank."""
    files = read_files(names)
    for name in names:
        for function in f"{EXERCISES[name].functions} {TWINS.get(name, '')}".split():
            path = path_of(function, files)
            files[path] = FAMILY if path == function else blank(files[path], function)
    return files


def exercise_text(name, document="assignments.md"):
    """A section of a document; its title ends with the name of the exercise."""
    text = (ROOT / "docs" / document).read_text()
    (section,) = re.findall(rf"^## [^\n]*\(`{name}`\)\n.*?(?=^## |\Z)", text, re.S | re.M)
    return section.strip() + "\n"


def write_files(folder, files):
    for path, text in files.items():
        (Path(folder) / path).parent.mkdir(parents=True, exist_ok=True)
        (Path(folder) / path).write_text(text)


def student(folder, names):
    """Make a student's copy."""
    files = blank_files(names)
    texts = "\n".join(map(exercise_text, names))
    files["README.md"] = README.format(names=", ".join(names), exercises=texts)
    runs = [f"results/halfcheetah_vel/{agent}-seed*/*.*[vn]" for agent in ("trmrl", "rl2")]
    for pattern in ("requirements.txt", "LICENSE", *runs):  # *.csv and *.json, to plot
        for path in ROOT.glob(pattern):
            files[path.relative_to(ROOT)] = path.read_text()
    write_files(folder, files)
    print(f"{folder}: {', '.join(names)}")


# ---- Grading -------------------------------------------------------------------------------------


def pytest_in_folder(folder, timeout):
    """Run the tests in a folder and write report.txt; in a process of its own."""
    resource.setrlimit(resource.RLIMIT_CPU, (timeout, timeout + 1))
    os.chdir(folder)
    sys.path.insert(0, folder)
    ours = ("trmrl", "plots", "baselines", "test_")
    for name in [name for name in sys.modules if name.startswith(ours)]:
        del sys.modules[name]  # the folder has its own
    torch.set_num_threads(1)
    with open("report.txt", "w") as report, contextlib.redirect_stdout(report):
        pytest.main(["-x", "-q", "--tb=short", "-p", "no:cacheprovider", "."])


def run_tests(files, timeout):
    """Run the tests in these files, for `timeout` seconds of CPU time.

    Returns pass, fail, blank, timeout or crash, and a message.
    """
    with tempfile.TemporaryDirectory() as folder:
        write_files(folder, files)
        context = multiprocessing.get_context("fork")  # it has PyTorch loaded already
        process = context.Process(target=pytest_in_folder, args=(folder, timeout), daemon=True)
        process.start()
        process.join(10 * timeout)  # the machine may be busy, or the process may sleep
        too_long = process.is_alive() or process.exitcode == -signal.SIGXCPU
        process.kill()
        process.join()
        report = (Path(folder) / "report.txt").read_text()

    if too_long:
        return "timeout", f"still running after {timeout} s"
    errors = re.findall("^E +(.*)", report, re.M)
    if errors:
        return "blank" if any("your turn" in error for error in errors) else "fail", errors[0]
    if "no tests ran" in report:
        return "fail", "no tests ran"
    if not re.search(r"\d passed.* in ", report):
        return "crash", f"Python ended with status {process.exitcode}"
    return "pass", ""


def grade_exercise(submission, name, timeout):
    """The result of one exercise of one submission, and a message."""
    files = read_files([name])
    for function in EXERCISES[name].functions.split():
        path = path_of(function, files)
        found = sorted(submission.rglob(Path(path).name))
        if not found:
            return "missing", f"there is no {path}"
        try:
            theirs = found[0].read_text()
            if path != function and not find_function(theirs, function):
                return "missing", f"{path} has no function {function}"
        except (SyntaxError, UnicodeDecodeError) as error:
            return "fail", f"{path} is not Python: {error}"
        files[path] = theirs if path == function else graft(files[path], function, theirs)
    return run_tests(files, timeout)


def grade(folder, names, timeout=60):
    """Print a table of students and exercises, and under it what went wrong."""
    names = names or GRADED
    submissions = sorted(path for path in Path(folder).iterdir() if path.is_dir())
    width = max([len("student"), *(len(path.name) for path in submissions)])
    print(f"{'student':{width}}", *(f"{name:>11}" for name in [*names, "points"]))
    problems = []
    for submission in submissions:
        cells, points = [], 0
        for name in names:
            result, message = grade_exercise(submission, name, timeout)
            cells.append(result)
            points += EXERCISES[name].points * (result == "pass")
            if message:
                problems.append(f"{submission.name}, {name}: {message}")
        row = [f"{cell:>11}" for cell in [*cells, points]]
        print(f"{submission.name:{width}}", *row, flush=True)
    print("\n" + "\n".join(problems))


# ---- The notebook --------------------------------------------------------------------------------


def run_cells(cells):
    """Run the code cells as plain Python; returns the outputs of each, as a notebook saves them."""
    plt.switch_backend("Agg")
    namespace, outputs = {}, []
    for source in cells:
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile(source, "<cell>", "exec"), namespace)
        cell = []
        if printed.getvalue():
            text = printed.getvalue().splitlines(keepends=True)
            if len(text) > 24:
                text = [*text[:5], "...\n", *text[-16:]]
            cell.append({"output_type": "stream", "name": "stdout", "text": text})
        for number in plt.get_fignums():
            picture = io.BytesIO()
            plt.figure(number).savefig(picture, dpi=90, bbox_inches="tight")
            data = {"image/png": base64.b64encode(picture.getvalue()).decode()}
            cell.append({"output_type": "display_data", "data": data, "metadata": {}})
        plt.close("all")
        outputs.append(cell)
    return outputs


def code_cells(notebook):
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]


def tour(path=ROOT / "docs" / "tour.ipynb"):
    """Run the notebook and save its outputs in it."""
    notebook = json.loads(Path(path).read_text())
    cells = code_cells(notebook)
    outputs = run_cells(["".join(cell["source"]) for cell in cells])
    for number, (cell, output) in enumerate(zip(cells, outputs), start=1):
        cell |= {"outputs": output, "execution_count": number}
    Path(path).write_text(json.dumps(notebook, indent=1) + "\n")


# ---- The command line ----------------------------------------------------------------------------


def main(argv):
    """student, grade or tour; anything else is answered with what can be typed."""
    command, folder, *names = [*argv, "", ""][: max(2, len(argv))]
    known = set(names) <= EXERCISES.keys()
    if command == "student" and names and known and folder and not Path(folder).exists():
        student(folder, names)
    elif command == "grade" and known and folder and Path(folder).is_dir():
        grade(folder, names)
    elif argv == ["tour"]:
        tour()
    else:
        commands = __doc__.split("\n\n")[1]
        sys.exit(f"{textwrap.dedent(commands)}\nexercises: {', '.join(EXERCISES)}")


if __name__ == "__main__":
    main(sys.argv[1:])
