# SPDX-License-Identifier: MIT
"""The lecturers' tool: what students get, how they are graded, and that the notebook runs."""

import ast
import json
import os
import re

import homework
import pytest


def test_the_tests_of_all_exercises_pass_where_nothing_is_blank():
    files = homework.read_files(homework.GRADED)
    assert homework.run_tests(files, timeout=300) == ("pass", "")


@pytest.mark.parametrize("name", homework.GRADED)
def test_the_tests_of_an_exercise_fail_where_it_is_blank(name):
    result, message = homework.run_tests(homework.blank_files([name]), timeout=300)
    assert result == "blank" and "your turn" in message, message


def test_a_students_copy_differs_in_the_chosen_functions_only(tmp_path):
    folder = tmp_path / "copy"
    homework.main(["student", str(folder), "gae", "attention", "curve"])
    for path in ("trmrl.py", "plots.py"):
        ours, copy = (homework.ROOT / path).read_text(), (folder / path).read_text()
        for name in ("gae", "Layer.forward", "attention_weights"):
            if homework.find_function(ours, name):
                body = homework.find_function(copy, name).body
                assert isinstance(body[-1], ast.Raise) and len(body) == 2, "docstring, then raise"
                copy = homework.graft(copy, name, ours)
        assert copy == ours

    copied = {str(path.relative_to(folder)): path for path in folder.rglob("*.*")}
    assert {"requirements.txt", "results/halfcheetah_vel/trmrl-seed1/eval.csv"} < copied.keys()
    assert not any("baselines" in path for path in copied), "RL^2 was not asked for"
    assert sum(path.stat().st_size for path in copied.values()) < 1e6, "the copy is not small"
    tests = re.findall("^def test_(.*)\\(", (folder / "test_trmrl.py").read_text(), re.M)
    assert len(tests) == 3, "there are tests of other exercises, which may give answers away"
    readme = (folder / "README.md").read_text()
    assert all(f"(`{name}`)" in readme for name in ("gae", "attention", "curve"))


def test_a_lecturers_mistake_is_answered_with_what_can_be_typed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for typed in ("", "grade", "student new", "student . gae", "student new gea", "grade nowhere"):
        with pytest.raises(SystemExit, match="student NEW_FOLDER EXERCISE") as error:
            homework.main(typed.split())
        assert "exercises: reward, window" in str(error.value) and not os.listdir()


def test_each_submission_gets_its_own_row_whatever_it_does(tmp_path, capsys):
    ours = (homework.ROOT / "trmrl.py").read_text()
    blanked, todo = homework.blank(ours, "gae"), 'raise NotImplementedError("gae: your turn")'
    submissions = {
        "ada": (ours, "pass"),
        "bob": (ours.replace("* ~ends[:, t] *", "*"), "fail"),
        "cyd": (blanked.replace(todo, "while 1: pass"), "timeout"),
        "dan": (blanked.replace(todo, "os._exit(0)"), "crash"),
        "eve": (blanked.replace(todo, "raise ("), "fail"),
        "fay": (blanked, "blank"),
        "gil": (ours.replace("def gae(", "def mine("), "missing"),
    }
    for name, (text, _) in submissions.items():
        homework.write_files(tmp_path / name / "homework", {"trmrl.py": text})
    (tmp_path / "hal").mkdir()

    homework.grade(tmp_path, ["gae"], timeout=5)
    table, problems = capsys.readouterr().out.split("\n\n")
    results = {name: result for name, (_, result) in submissions.items()} | {"hal": "missing"}
    expected = [[name, result, "10" if name == "ada" else "0"] for name, result in results.items()]
    assert [line.split() for line in table.splitlines()[1:]] == expected
    assert "bob, gae: AssertionError: not GAE" in problems
    assert "eve, gae: trmrl.py is not Python" in problems


def test_the_documents_and_the_tool_agree_on_the_exercises():
    names = list(homework.EXERCISES)
    readme, assignments, answers = (
        (homework.ROOT / path).read_text()
        for path in ("README.md", "docs/assignments.md", "docs/answers.md")
    )
    typed = re.findall(r"homework.py (?:student|grade) \S+ ([\w ]+)", readme + assignments)
    assert typed and set(" ".join(typed).split()) <= set(names)
    for text in (assignments, answers):
        assert re.findall(r"^## .*\(`(\w+)`\)$", text, re.M) == names

    for name, exercise in homework.EXERCISES.items():
        section, answer = homework.exercise_text(name), homework.exercise_text(name, "answers.md")
        assert all(f"`{function}`" in section for function in exercise.functions.split())
        assert f"{exercise.points} points" in section
        assert not exercise.tests or f'`pytest -k "{exercise.tests}"`' in section
        assert all(f"**{word}.**" in section for word in ("Goal", "Write", "Graded by", "Think"))
        questions = re.findall(r"^\((\w)\) ", section, re.M)
        assert questions and questions == re.findall(r"^\((\w)\) ", answer, re.M)


def test_the_tour_runs_and_its_pictures_are_saved(tmp_path, monkeypatch):
    cells = homework.code_cells(json.loads((homework.ROOT / "docs" / "tour.ipynb").read_text()))
    saved = [output["output_type"] for cell in cells for output in cell["outputs"]]
    monkeypatch.chdir(tmp_path)
    (tmp_path / "results").symlink_to(homework.ROOT / "results")
    sources = ["".join(cell["source"]) for cell in cells]
    small = [source.replace("SMALL = False", "SMALL = True") for source in sources]
    assert small != sources
    outputs = homework.run_cells(small)
    assert [output["output_type"] for cell in outputs for output in cell] == saved
    assert saved.count("display_data") >= 6
