"""The README is true: its code runs, its outputs are real, its commands and files exist, and `.ci/run` runs its test command."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tests.launch import ROOT, launch, torchrun

README = (ROOT / "README.md").read_text(encoding="utf-8")
LIMIT_S = 80.0
NO_TORCH = "import sys; sys.modules['torch'] = None\n"


def blocks(heading: str, language: str) -> list[str]:
    """Return the fenced blocks of a language in the section under a heading."""
    section = re.split(r"^## ", README, flags=re.MULTILINE)
    text = next(part for part in section if part.startswith(heading + "\n"))
    found = re.findall(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    assert found, f"{heading}: expected a block of {language}, got none"
    return found


def matches(shown: str, real: str) -> bool:
    """Return whether the lines shown are all of the real ones, but for those that a line `...` stands for."""
    pattern = "".join(r"(?:.*\n)*?" if line == "..." else re.escape(line) + r"\n" for line in shown.splitlines())
    return re.fullmatch(pattern, real) is not None


@pytest.mark.parametrize(
    ("shown", "is_true"),
    [
        ("a\nb\n", False),
        ("a\n...\n", True),
        ("...\nc\n", True),
        ("a\n...\nc\n", True),
        ("a\nb\nc\n", True),
        ("b\n...\n", False),
    ],
)
def test_matches_finds_a_line_that_is_not_there(shown: str, is_true: bool) -> None:
    assert matches(shown, "a\nb\nc\n") is is_true


def test_the_first_paragraph_says_input_output_and_the_property() -> None:
    paragraph = " ".join(README.split("\n\n")[1].split())
    for words in (
        "in go a state and what just happened",
        "out come the next state",
        "The same state and input give the same output.",
    ):
        assert words in paragraph


def test_the_pure_example_prints_what_is_shown() -> None:
    (code,), (output,) = blocks("The pure core", "python"), blocks("The pure core", "text")
    ended = launch([sys.executable, "-c", NO_TORCH + code], limit_s=LIMIT_S)
    assert (ended.status, ended.output) == (0, output)


def test_console_output_is_real() -> None:
    (console,) = blocks("The pure core", "console")
    command, shown = console.removeprefix("$ python ").split("\n", 1)
    ended = launch([sys.executable, *command.split()], limit_s=LIMIT_S)
    assert ended.status == 0, ended.output
    assert matches(shown, ended.output)


def test_the_tests_shown_pass_without_torch() -> None:
    (code,) = blocks("Test a transition without a GPU", "python")
    names = re.findall(r"^def (test_\w+)\(\)", code, re.MULTILINE)
    assert len(names) >= 2
    calls = "".join(f"{name}()\n" for name in names)
    ended = launch([sys.executable, "-c", f"{NO_TORCH}{code}\n{calls}print('passed')"], limit_s=LIMIT_S)
    assert (ended.status, ended.output) == (0, "passed\n")


def test_the_training_loop_trains(tmp_path: Path) -> None:
    loop, by_hand = blocks("Train", "python")
    assert len([line for line in loop.splitlines() if line]) == 15
    script = tmp_path / "train.py"
    # After the loop as it is shown, the step by hand goes on from its state.
    script.write_text(
        f"{loop}{by_hand}state, loss = step(state, torch.randn(16, 64))\nprint(f'by hand: {{loss.item():.3f}}')\n"
    )
    ended = launch(torchrun(2, str(script)), limit_s=LIMIT_S)
    assert ended.status == 0, ended.output
    losses = [float(loss) for loss in re.findall(r"(?:loss|by hand:?) (\d\.\d+)", ended.output)]
    assert len(losses) == 4, ended.output
    # Untrained it is above 1, the mean square of the batch.
    assert max(losses) < 0.9, ended.output


def test_the_strategies_shown_train(tmp_path: Path) -> None:
    (code,) = blocks("Strategies, precision, optimizers, checkpoints", "python")
    script = tmp_path / "train.py"
    script.write_text(code.replace('"checkpoint"', repr(str(tmp_path / "checkpoint"))))
    ended = launch(torchrun(4, str(script)), limit_s=LIMIT_S)
    assert ended.status == 0, ended.output
    found = re.findall(r"step 50, loss (\d\.\d+), norm (\d\.\d+)", ended.output)
    assert len(found) == 4, ended.output
    assert max(float(loss) for loss, _ in found) < 0.9
    assert len({norm for _, norm in found}) == 1


def test_the_code_shown_is_all_run() -> None:
    run = {"Train": 2, "Strategies, precision, optimizers, checkpoints": 1, "The pure core": 1, "Test a transition without a GPU": 1}
    assert sum(run.values()) == README.count("\n```python\n")


def commands_of(text: str) -> list[str]:
    """Return the commands in code spans and blocks that run a file or module of the examples."""
    spans = re.findall(r"`([^`\n]+)`", text) + re.findall(r"^(?:\$ )?(.+)$", text, re.MULTILINE)
    return [span for span in spans if re.match(r"([A-Z_]+=\w+ )*(python|torchrun) .*examples[./]", span)]


def check_command(command: str) -> None:
    """Check that what a command runs is there, and knows the options given to it."""
    found = re.search(r"-m (examples[\w.]+)|(examples/[\w/]+\.py)", command)
    assert found is not None, command
    path = ROOT / (found[2] or found[1].replace(".", "/") + ".py")
    assert path.is_file(), f"{command}: no file {path}"
    source = path.read_text(encoding="utf-8")
    for option in re.findall(r"--[\w-]+", command[found.end() :]):
        assert f'"{option}"' in source, f"{command}: {path.name} has no option {option}"


def test_commands_name_what_exists() -> None:
    commands = commands_of(README)
    assert len(commands) >= 5
    for command in commands:
        check_command(command)


def test_every_figure_has_a_command() -> None:
    table = re.findall(r"^\|(.+)\|$", README.split("## Measured\n")[1].split("\n## ")[0], re.MULTILINE)
    head, _, *rows = [row.split("|") for row in table]
    assert [cell.strip() for cell in head] == ["what", "figure", "command"]
    assert len(rows) >= 3 and rows[0][2].strip() != "the same"
    for what, _, command in rows:
        if command.strip() != "the same":
            (named,) = commands_of(command)
            check_command(named)


@pytest.mark.parametrize(
    "command", ["python examples/gone.py", "python -m examples.gone", "torchrun examples/train_lm.py --no-such-option"]
)
def test_a_command_that_is_wrong_is_found(command: str) -> None:
    with pytest.raises(AssertionError):
        check_command(command)


def test_files_named_exist() -> None:
    for name in re.findall(r"`((?:\.ci|examples|tests|functional_fsdp)/[\w./]+)`", README):
        assert (ROOT / name).exists(), name


def test_modules_named_exist() -> None:
    for name in re.findall(r"`(functional_fsdp(?:\.\w+)+)`", README):
        path = ROOT / name.replace(".", "/")
        assert path.is_dir() or path.with_suffix(".py").is_file(), name


def test_ci_runs_the_test_command() -> None:
    train, test = (block.strip() for block in blocks("Run it", "console"))
    script = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    assignment = next(line for line in script.splitlines() if line.startswith("test_command="))
    found = subprocess.run(
        ["bash", "-euc", f'{assignment}\necho "$test_command"'], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert found.stdout.strip() == test
    assert train.split(" && ")[1] in script


def test_both_set_ups_install_the_same_torch_and_what_they_import() -> None:
    train, test = blocks("Run it", "console")
    assert re.findall(r'"(torch==[^"]+)"', train) == re.findall(r'"(torch==[^"]+)"', test) == ["torch==2.13.*"]
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    assert '".[examples]"' in train and '".[test]"' in test
    assert "functional-fsdp[examples]" in extras["test"]
