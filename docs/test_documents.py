# SPDX-License-Identifier: MIT
"""README.md and docs/: their commands, names, links, tables and examples."""

import importlib
import inspect
import re
import shlex
import shutil
from pathlib import Path

import numpy as np
import pytest
from homework import ROOT  # makes trmrl.py importable

# isort: split
import plots
import trmrl

README = (ROOT / "README.md").read_text()
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
every_document = pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)

TORCHRUN_FLAGS = {"--nnodes", "--node-rank", "--master-addr"}
YOUR_FILES = {"points.py", "family.py"}  # that the documents ask the reader to write


def code_spans(text):
    """Everything in `backquotes`, outside of code blocks."""
    return re.findall(r"`([^`\n]+)`", re.sub(r"```.*?```", "", text, flags=re.DOTALL))


def commands(text):
    """The words of every python, torchrun or uv command, in spans and in code blocks."""
    pieces = [line.strip().removeprefix("$ ") for line in text.splitlines()] + code_spans(text)
    for piece in (part.strip() for line in pieces for part in line.split("&&")):
        piece = piece.removeprefix("venv/bin/").replace("$seed", "1")
        if re.match(r"(python3?|torchrun|uv) ", piece) and "-m venv" not in piece:
            yield shlex.split(piece, comments=True)


def check_command(argv, agent_class):
    typed = trmrl.parse([word for word in argv if word != "--help"], agent_class)
    if not {"eval", "resume"} & typed.keys():
        config = agent_class.Config(**typed)
        trmrl.check_config(config)
        assert config.env in trmrl.ENVS or config.env.startswith("ml1_"), config.env


def exists_in_code(name):
    """Of `Layer.forward`: the class has it, or sets it as an attribute of self."""
    first, *rest = name.removeprefix("trmrl.").split(".")
    owner = getattr(trmrl, first, None)
    source = inspect.getsource(owner) if inspect.isclass(owner) else ""
    return owner is not None and all(hasattr(owner, x) or f"self.{x} = " in source for x in rest)


def section(title):
    return re.search(rf"^## {title}\n(.*?)^## ", README, re.DOTALL | re.MULTILINE)[1]


@every_document
def test_commands_in_the_documents_are_understood(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for argv in commands(path.read_text()):
        if argv[1] == "-m":
            importlib.import_module(argv[2])
            baselines = {x.command.split()[-1]: x for x in trmrl.Agent.__subclasses__()}
            check_command(argv[3:], baselines[argv[2]])
        elif "trmrl.py" in argv:
            check_command(argv[argv.index("trmrl.py") + 1 :], trmrl.TrMRL)
        elif argv[1] == "plots.py":
            Path(dict(zip(argv, argv[1:])).get("--runs", "runs")).mkdir(exist_ok=True)
            plots.parse(argv[2:])
        else:
            assert (ROOT / argv[1]).is_file() or argv[1] in YOUR_FILES, argv


@every_document
def test_flags_functions_and_files_named_in_the_documents_exist(path):
    text = path.read_text()
    flags = {*trmrl.make_parser(trmrl.TrMRL, "ant_dir")._option_string_actions, *TORCHRUN_FLAGS}
    for span in code_spans(text):
        if span.startswith("--"):
            assert set(re.findall(r"(?<!\S)--[a-z-]+(?!\S)", span)) <= flags, span
        if re.fullmatch(r"[\w.]+", span) and hasattr(trmrl, span.split(".")[0]):
            assert exists_in_code(span), span
        if re.fullmatch(r"[\w./-]+\.(py|md|txt|ipynb|sh)", span) and span not in YOUR_FILES:
            assert (ROOT / span).exists() or (path.parent / span).exists(), span
    for file in re.findall(r"(?<![\w/.])(?:results|docs|baselines)/[\w./-]*\w", text):
        assert (ROOT / file).exists(), file


def test_every_name_beside_the_paper_exists():
    rows = [line for line in section("From paper to code").splitlines() if "| `" in line]
    for names in map(code_spans, rows):
        for name in set(names) - {"plots.py"}:
            assert name in plots.FIGURES if "plots.py" in names else exists_in_code(name), name


@every_document
def test_links_lead_somewhere(path):
    for link in re.findall(r"\]\((?!https://)([^)\s]+)\)", path.read_text()):
        file, _, anchor = link.partition("#")
        target = path.parent / file if file else path
        assert target.exists(), link
        titles = re.findall(r"^#+ (.*)$", target.read_text(), re.MULTILINE) if anchor else [""]
        slugs = [re.sub(r"[^a-z0-9_ -]", "", title.lower()).replace(" ", "-") for title in titles]
        assert anchor in slugs, link


@every_document
def test_tables_have_short_cells_and_the_readme_is_short(path):
    lines = path.read_text().splitlines()
    cells = [cell.strip() for line in lines if line.startswith("|") for cell in line.split("|")]
    assert max(map(len, cells), default=0) <= 200, max(cells, key=len)
    assert path.name != "README.md" or (len(lines) <= 300 and len(README) <= 20_000)


def run_example(word, old="", new=""):
    """Run the Python example of the README that contains `word`, with a text replaced."""
    examples = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    code = next(code for code in examples if word in code)
    assert old in code
    exec(compile(code.replace(old, new), "README.md", "exec"), {"__name__": "__main__"})


def test_tables_are_up_to_date_with_the_csv_files(tmp_path, monkeypatch):
    """As `python plots.py tables` would write them now."""
    (tmp_path / "docs").mkdir()
    for path in plots.DOCUMENTS:
        shutil.copy(ROOT / path, tmp_path / path)
    (tmp_path / "results").symlink_to(ROOT / "results")
    monkeypatch.chdir(tmp_path)
    assert plots.main(["tables"]) == 0
    for path in plots.DOCUMENTS:
        same = (tmp_path / path).read_text() == (ROOT / path).read_text()
        assert same, f"{path} is out of date: python plots.py tables"


def test_the_task_family_of_the_readme_learns_and_the_columns_are_explained(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run_example("class PointMass", "total_steps=80_000", "total_steps=32_000")
    run = Path("runs/points/trmrl-seed1")
    returns = np.loadtxt(run / "eval.csv", delimiter=",", skiprows=1, usecols=4)
    assert returns[-120:].mean() > -17  # 20 tasks, 6 episodes; standing still scores -20

    header = (run / "progress.csv").read_text().split("\n")[0]
    rows = section("The columns of progress.csv").splitlines()
    cells = [line.split("|")[1] for line in rows if line.startswith("| `")]
    assert sorted(code_spans("\n".join(cells))) == sorted(header.split(","))


def test_the_four_calls_of_the_readme_find_the_target_velocities(capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    run_example("Player")
    differences = np.array(capsys.readouterr().out.strip("[] \n").split(), dtype=float)
    assert len(differences) == 20 and np.median(abs(differences)) < 0.2, "m/s off the targets"
