"""Unedited jobs are recorded and compared."""

import contextlib
import json
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import pytest

from gradparity.conformance.__main__ import main
from gradparity.conformance.record.merge import read_merged
from gradparity.conformance.record.orders import VERSION

Once = Callable[[str, Callable[[Path], object]], Path]
JOBS = str(Path(__file__).with_name("jobs.py"))
TORCHRUN = (
    "-m",
    "torch.distributed.run",
    "--rdzv-backend",
    "c10d",
    "--rdzv-endpoint",
    "127.0.0.1:0",
)


class Command(Protocol):
    """Function that returns the command line of a job."""

    def __call__(self, job: str, fault: str = "", ranks: int = 1) -> list[str]:
        """Return the command line for one process, or for ranks under torchrun."""


@pytest.fixture(scope="session")
def command(warm_python: list[str]) -> Command:
    """Return the command of a job: in a warm Python, or under torchrun in a new one."""

    def words(job: str, fault: str = "", ranks: int = 1) -> list[str]:
        end = [JOBS, job, *([fault] if fault else [])]
        if ranks == 1:
            return [*warm_python, *end]
        per_node = f"--nproc-per-node={ranks}"
        return [*warm_python, *TORCHRUN, per_node, "--no-python", *warm_python, *end]

    return words


def record(out: Path, *options: str, of: list[str]) -> subprocess.CompletedProcess[str]:
    """Record a job in a new process, because the job writes to stdout."""
    program = [sys.executable, "-m", "gradparity.conformance", "record", str(out)]
    return subprocess.run(
        [*program, *options, "--", *of], capture_output=True, text=True
    )


@pytest.fixture(scope="session")
def one(once: Once, command: Command) -> Path:
    """Recording of the reference side: a job in one process, with noise runs."""

    def make(folder: Path) -> None:
        done = record(folder / "one", "--modules", of=command("plain"))
        assert done.returncode == 0, done.stderr
        assert "the command runs 4 times" in done.stderr
        assert "next, the other side: gradparity record OTHER --noise 0" in done.stderr

    return once("recording", make) / "one"


def compared(
    capsys: pytest.CaptureFixture[str], one: Path, other: Path, *options: str
) -> tuple[int, str]:
    code = main(["compare", str(one), str(other), *options])
    return code, capsys.readouterr().out


class Against(Protocol):
    """Function that records a job once, and compares it with the reference side."""

    def __call__(
        self,
        job: str,
        fault: str = "",
        ranks: int = 1,
        *options: str,
        modules: bool = False,
    ) -> tuple[int, str, str]:
        """Return exit code and output of the comparison, and the output of the job."""


@pytest.fixture
def against(
    one: Path, command: Command, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> Against:
    def recorded_and_compared(
        job: str,
        fault: str = "",
        ranks: int = 1,
        *options: str,
        modules: bool = False,
    ) -> tuple[int, str, str]:
        of, also = command(job, fault, ranks), ["--modules"] * modules
        done = record(tmp_path / "b", "--noise", "0", *also, of=of)
        assert done.returncode == 0, done.stderr
        code, told = compared(capsys, one, tmp_path / "b", *options)
        return code, told.replace(str(one), "one"), done.stdout

    return recorded_and_compared


@pytest.mark.parametrize(
    ("job", "ranks"),
    [
        ("fsdp-tp", 4),
        *(
            pytest.param(job, ranks, marks=pytest.mark.slow)
            for job, ranks in (
                *(("ddp", 2), ("fsdp", 2), ("fsdp1", 2), ("tp", 2)),
                ("hsdp", 4),
            )
        ),
    ],
)
def test_a_right_layout_is_the_same(against: Against, job: str, ranks: int) -> None:
    code, told, _ = against(job, "", ranks, modules=True)
    assert code == 0, told
    assert "start: 21 of 21 tensors have equal bits" in told
    assert "rows: equal at 3 of 3 steps" in told


@pytest.mark.parametrize(
    ("job", "ranks", "place"),
    [
        ("fsdp", 2, "rows 33 to 65 of 66, held by rank 1"),
        *(
            pytest.param(job, ranks, place, marks=pytest.mark.slow)
            for job, ranks, place in (
                ("fsdp-tp", 4, "rows 50 to 65 of 66, held by rank 3"),
                ("tp", 2, "rows 33 to 65 of 66, held by rank 1"),
            )
        ),
    ],
)
def test_a_wrong_shard_is_named_by_rows_and_ranks(
    against: Against, job: str, ranks: int, place: str
) -> None:
    code, told, _ = against(job, "shard", ranks)
    assert code == 1
    assert f"where in blocks.1.up.weight: {place}\n" in told


@pytest.mark.slow
def test_a_shard_without_a_gradient_counts_as_zeros(against: Against) -> None:
    """No later step shows that it was not stepped."""
    code, told, _ = against("fsdp", "none", 2)
    assert code == 1
    assert "where in blocks.1.up.weight: rows 33 to 65 of 66, held by rank 1" in told


@pytest.mark.extras("megatron_fsdp")
@pytest.mark.parametrize(
    ("fault", "code", "says"),
    [
        ("", 0, "start: 21 of 21 tensors have equal bits"),
        ("half", 1, "is 0.500 x that of one"),
        # NVIDIA/Megatron-LM#5974: Adam's first step is corrected as the second one
        ("counted", 1, "is 0.744 x that of one"),
    ],
)
def test_uneven_shards_that_say_where_they_lie_are_compared(
    against: Against, fault: str, code: int, says: str
) -> None:
    found, told, _ = against("megatron-fsdp", fault, 2)
    assert found == code, told
    assert says in told


@pytest.mark.parametrize(
    ("job", "ranks"),
    [("plain", 1), pytest.param("fsdp-tp", 4, marks=pytest.mark.slow)],
)
def test_recording_changes_no_bit_of_the_training(
    against: Against, command: Command, job: str, ranks: int
) -> None:
    *_, output = against(job, "", ranks, modules=True)
    of = command(job, ranks=ranks)
    alone = subprocess.run(of, capture_output=True, text=True, check=True)
    assert trained(alone.stdout) == trained(output)


def trained(output: str) -> set[str]:
    found = {line for line in output.splitlines() if line.startswith("trained")}
    assert found
    return found


@pytest.mark.parametrize(
    ("fault", "code", "words"),
    [
        ("one", 1, "the gradient of blocks.1.mix.weight is 1.500 x that of one"),
        ("rate", 2, "settings differ at step 0: lr of words.weight is 0.001 in "),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                ("half", 1, "is 0.500 x that of one"),
                (
                    "zero",
                    1,
                    "the gradient of blocks.1.mix.weight is zero: it differs by 1 of",
                ),
                (
                    "rows",
                    2,
                    "rows differ at step 0: the model was given 8 rows in ",
                ),
                ("seed", 2, "starts differ: "),
                ("drop", 4, "random numbers were drawn in forward at step 0 of "),
            )
        ),
    ],
)
def test_a_fault_is_named_and_what_cannot_be_compared_is_no_fault(
    against: Against, tmp_path: Path, fault: str, code: int, words: str
) -> None:
    json_file = ("--json", str(tmp_path / "x"))
    found, told, _ = against("plain", fault, 1, *json_file)
    assert found == code, told
    assert words in told.splitlines()[0], told
    assert json.loads((tmp_path / "x").read_text())["code"] == code


@pytest.mark.parametrize(
    ("job", "fault", "words"),
    [
        (
            "plain",
            "backward",
            "In backward through blocks.1: the gradient of the output"
            " of blocks.0 is the first that differs",
        ),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                (
                    "fsdp-tp",
                    "forward",
                    "in forward. blocks.1 is the first block whose output differs, "
                    "after blocks.0, by 0.01 of its size",
                ),
                ("ddp", "backward", "In backward through blocks.1"),
                ("fsdp", "loss", "In backward, in the loss or after head"),
                ("fsdp", "one", "So are the gradients of outputs"),
                ("tp", "one", "outputs of blocks are the same (4 of 4 compared)"),
                ("fsdp1", "loss", "outputs of blocks are the same (4 of 4 compared)"),
            )
        ),
    ],
)
def test_outputs_of_blocks_tell_where_a_difference_begins(
    against: Against, tmp_path: Path, job: str, fault: str, words: str
) -> None:
    ranks = {"plain": 1, "fsdp-tp": 4}.get(job, 2)
    html = ("--html", str(tmp_path / "page"))
    code, told, _ = against(job, fault, ranks, *html, modules=True)
    assert code == 1 and told.splitlines()[1].startswith("where: step 0: "), told
    assert words in told, told
    page = (tmp_path / "page" / "index.html").read_text()
    assert page.count('<th scope="row">head</th>') == 1 + ("in forward" not in words)


@pytest.mark.slow
def test_a_fault_on_ranks_is_named(against: Against) -> None:
    code, told, _ = against("fsdp", "one", 2)
    assert code == 1 and "blocks.1.mix.weight" in told.splitlines()[0], told


def test_a_run_is_itself_bit_for_bit(
    one: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, told = compared(capsys, one, one, "--exact")
    assert (code, told) == (0, "same, bit for bit: 360 tensors of 3 steps\n")
    nudged = tmp_path / "nudged"
    nudged.mkdir()
    (nudged / "plain").symlink_to(one / "nudged-1")
    (nudged / "run.json").write_text((one / "run.json").read_text())
    code, told = compared(capsys, one, nudged, "--exact")
    assert code == 2  # a link is not followed


@pytest.mark.slow
def test_a_step_that_raised_is_recorded_when_it_is_tried_again(
    against: Against,
) -> None:
    code, told, _ = against("plain", "raises", 1, "--exact")
    assert (code, told) == (0, "same, bit for bit: 336 tensors of 3 steps\n")


@pytest.mark.slow
def test_a_step_that_only_makes_states_is_no_step_of_training(
    against: Against,
) -> None:
    _, told, _ = against("plain", "prepares")
    assert "start: 21 of 21 tensors have equal bits" in told
    assert "rows: equal at 3 of 3 steps" in told


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "code", "words"),
    [
        ("", 0, "start: 21 of 21 tensors have equal bits"),
        ("scale", 1, "is 4.000 x that of one"),
        (
            "names",
            1,
            "If these are different tensors, declare them: gradparity.record(",
        ),
        ("names-declared", 0, "start: 21 of 21 tensors have equal bits"),
    ],
)
def test_stages_of_a_pipeline_are_one_model(
    against: Against, fault: str, code: int, words: str
) -> None:
    found, told, _ = against("pipeline", fault, 2)
    assert found == code and words in told, told


@pytest.mark.slow
def test_a_resumed_job_is_compared_bit_for_bit(
    command: Command,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("CHECKPOINT", str(tmp_path / "checkpoint.pt"))
    goes_on = ("--noise", "0", "--steps", "3:6")
    of = [sys.executable, JOBS, "plain", "continued"]  # a Python as users start it
    assert record(tmp_path / "a", *goes_on, of=of).returncode == 0
    for fault, code, words in (
        ("resumed", 0, "same, bit for bit: 399 tensors of 3 steps"),
        ("forgets", 1, "step 3: forgets lacks the optimizer's step of words.weight"),
    ):
        monkeypatch.chdir(tmp_path)
        of = command("plain", fault)
        done = record(tmp_path / fault, *goes_on, "--first", "3", of=of)
        assert done.returncode == 0, done.stderr
        found, told = compared(capsys, Path("a"), Path(fault), "--exact")
        first, *others = told.splitlines()
        assert (found, first) == (code, words)
        assert bool(others) == bool(code)
        for line, words in zip(
            others,
            ("more differences in that step", "optimizer's exp_avg of", "exp_avg_sq"),
            strict=bool(code),
        ):
            assert words in line, others
    done = record(tmp_path / "c", "--noise", "0", of=command("plain", "resumed"))
    assert done.returncode == 0
    found, told = compared(capsys, tmp_path / "a", tmp_path / "c", "--exact")
    assert found == 1 or "--first N for a job that goes on" in told


@pytest.mark.slow
@pytest.mark.parametrize("job", ["plain", "fsdp"])
def test_a_job_begins_from_the_weights_of_another(
    one: Path,
    command: Command,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    job: str,
) -> None:
    """The weights may come from one process or from ranks."""
    first = command(job, ranks=1 if job == "plain" else 2)
    a, b, c = (tmp_path / name for name in "abc")
    assert record(a, "--keep-start", "--noise", "0", of=first).returncode == 0
    of = command("plain", "seed")
    assert record(b, "--noise", "0", of=of).returncode == 0
    assert compared(capsys, one, b)[0] == 2
    done = record(c, "--noise", "0", "--start", str(a), of=of)
    assert done.returncode == 0, done.stderr
    code, told = compared(capsys, one, c)
    assert code == 0 and "start: 21 of 21 tensors have equal bits" in told, told
    done = record(tmp_path / "d", "--start", str(b), of=of)
    assert done.returncode == 2
    assert "that run has no weights: record it again with --keep-start" in done.stderr


def test_a_page_shows_each_tensor_at_each_step(
    one: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, told = compared(capsys, one, one, "--html", str(tmp_path / "page"))
    assert code == 0 and told.endswith("index.html\n")
    text = (tmp_path / "page" / "index.html").read_text()
    # and the words that are not in the batch
    assert text.count("<td") == (2 * 21 + 1) * 3
    assert '<strong class="same">same</strong>' in text


@pytest.mark.slow
def test_files_of_several_hosts_are_compared_together(
    one: Path, command: Command, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    of = command("ddp", ranks=2)
    assert record(tmp_path / "h0", "--noise", "0", of=of).returncode == 0
    other = tmp_path / "h1"
    (other / "plain").mkdir(parents=True)
    (other / "run.json").write_text((tmp_path / "h0" / "run.json").read_text())
    file = "plain/rank-1.safetensors"
    (tmp_path / "h0" / file).rename(other / file)
    assert main(["compare", str(one), str(other)]) == 2
    assert "these of 2 ranks wrote nothing: 0" in capsys.readouterr().err
    both = Path(f"{tmp_path / 'h0'},{other}")
    assert compared(capsys, one, both)[0] == 0
    again = Path(f"{other},{other}")
    assert main(["compare", str(one), str(again)]) == 2
    assert "another folder also has this rank" in capsys.readouterr().err


def test_an_optimizer_that_is_not_torchs_is_recorded_by_two_lines(
    command: Command, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    done = record(tmp_path / "own", "--noise", "0", of=command("own"))
    assert done.returncode == 0, done.stderr
    code, told = compared(capsys, tmp_path / "own", tmp_path / "own", "--exact")
    assert (code, told) == (0, "same, bit for bit: 147 tensors of 3 steps\n")


# - What goes wrong


def test_a_job_without_an_optimizer_ends_with_the_lines_to_add(
    tmp_path: Path, warm_python: list[str]
) -> None:
    done = record(tmp_path / "r", of=[*warm_python, "-c", "import torch"])
    assert done.returncode == 2
    assert "with gradparity.record(model, optimizer): ..." in done.stderr


@pytest.mark.slow
def test_a_job_that_looks_for_torch_before_it_imports_it_is_recorded(
    tmp_path: Path,
) -> None:
    # as the package datasets does
    job = """\
import importlib.util
assert importlib.util.find_spec("torch") and importlib.util.find_spec("torch")
import torch
model = torch.nn.Linear(2, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(3):
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
raise SystemExit(5)
"""
    done = record(tmp_path / "r", "--noise", "0", of=[sys.executable, "-c", job])
    assert done.returncode == 5, done.stderr
    assert f"recorded plain in {tmp_path / 'r'}; the command then" in done.stderr


def test_the_exit_code_is_that_of_the_command(command: Command, tmp_path: Path) -> None:
    done = record(tmp_path / "r", of=command("plain", "dies"))
    assert done.returncode == 7
    assert "the command ended with 7 before an optimizer's step was" in done.stderr
    assert not (tmp_path / "r").exists()  # the name can be used again


def test_the_last_run_leaves_files_of_the_job_as_it_is(
    command: Command, tmp_path: Path
) -> None:
    """A checkpoint of a nudged run began a resumed job, which was said to differ."""
    notes = f'echo "$GRADPARITY_RECORD" >> {tmp_path}/notes; exec "$@"'
    of = ["sh", "-c", notes, "sh", *command("plain")]
    assert record(tmp_path / "r", "--noise", "3", of=of).returncode == 0
    orders = [
        json.loads(line) for line in (tmp_path / "notes").read_text().splitlines()
    ]
    assert [each["nudge"] for each in orders] == [0, 1, 2, 3, 0]
    manifest = json.loads((tmp_path / "r" / "run.json").read_text())
    assert manifest["runs"] == ["plain", "again", "nudged-1", "nudged-2", "nudged-3"]


SLOW_JOB = """\
import signal, sys, time
def saves(number, _):
    time.sleep(1)
    print("saved", flush=True)
    sys.exit(0)
signal.signal(signal.{0}, saves)
print("ready", flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM"])
def test_a_job_that_is_asked_to_end_may_save_its_checkpoint(
    tmp_path: Path, name: str
) -> None:
    """Ctrl-C reaches the job from the terminal, SIGTERM by the command above it."""
    words = [sys.executable, "-c", SLOW_JOB.format(name)]
    program = [sys.executable, "-m", "gradparity.conformance", "record"]
    started = subprocess.Popen(
        [*program, str(tmp_path / "r"), "--", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert started.stdout is not None
    while "ready" not in started.stdout.readline():
        assert started.poll() is None
    if name == "SIGINT":
        os.killpg(started.pid, signal.SIGINT)
    else:
        started.send_signal(signal.SIGTERM)
    told, error = started.communicate()
    assert told == "saved\n" and "no optimizer of torch was called" in error
    assert started.returncode == 2  # of the recording: the job ended with 0


OWN_SESSION = """\
import os, signal, time
os.setsid()
signal.signal(signal.SIGINT, lambda *_: print("asked", flush=True))
print("ready", flush=True)
time.sleep(1)
print("ended", flush=True)
"""


def test_ctrl_c_in_a_terminal_is_not_sent_to_the_job_again(tmp_path: Path) -> None:
    """A job in a session of its own gets none."""
    terminal, inside = os.openpty()
    enters = "import os, sys; os.login_tty(int(sys.argv[1])); os.execv(sys.executable, "
    program = ["-m", "gradparity.conformance", "record", str(tmp_path / "r")]
    started = subprocess.Popen(
        [
            *(sys.executable, "-c", f"{enters}[sys.executable, *sys.argv[2:]])"),
            *(str(inside), *program, "--", sys.executable, "-c", OWN_SESSION),
        ],
        pass_fds=[inside],
    )
    os.close(inside)
    told = b""
    while b"ready" not in told:
        told += os.read(terminal, 1024)
    os.write(terminal, b"\x03")
    with contextlib.suppress(OSError):  # Linux: EIO when the last process has ended
        while read := os.read(terminal, 1024):
            told += read
    os.close(terminal)
    assert started.wait() == 2
    assert b"ended" in told and b"asked" not in told


def test_names_that_are_no_text_are_refused_or_replaced(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    odd = os.fsdecode(b"a\xff")
    assert main(["record", str(tmp_path / odd), "--", "true"]) == 2
    assert "cannot be printed: choose another one" in capsys.readouterr().err
    out = tmp_path / "run"
    job = f"mkdir -p {out}/plain; touch {out}/plain/rank-0.safetensors"
    words = ["sh", "-c", job, odd]
    assert main(["record", str(out), "--noise", "0", "--", *words]) == 0
    assert json.loads((out / "run.json").read_text())["command"][-1] == "a?"


def test_a_command_that_does_not_exist_leaves_no_folder(tmp_path: Path) -> None:
    assert record(tmp_path / "r", of=["nosuchcommand"]).returncode == 2
    assert not (tmp_path / "r").exists()


def test_steps_that_never_come_are_reported(command: Command, tmp_path: Path) -> None:
    options = ("--noise", "0", "--steps", "100:102")
    done = record(tmp_path / "r", *options, of=command("plain"))
    assert done.returncode == 2
    told = "was called 3 times, as steps 0 to 2, and steps 100:102 were asked for."
    assert told in done.stderr and "needs --first 100" in done.stderr
    assert not (tmp_path / "r").exists()


@pytest.mark.slow
def test_a_job_that_is_killed_leaves_a_recording_that_says_so(
    one: Path, command: Command, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """If the second run is killed, the recording of the first one can be used."""
    out = tmp_path / "r"
    program = shlex.join(command("plain"))
    killed = f"test -e {shlex.quote(str(out / 'again.log'))} && kill -9 $$; {program}"
    done = record(out, of=["bash", "-c", killed])
    assert done.returncode == 0
    assert "again: the command ended with 137 before an optimizer's" in done.stderr
    code, told = compared(capsys, one, out)
    assert code == 0 and f"{out}: ended early, with the runs plain\n" in told


@pytest.mark.slow
def test_a_disk_that_is_full_ends_no_job(tmp_path: Path) -> None:
    program = shlex.join([sys.executable, JOBS, "plain", "full"])
    # no file of this process may be larger than 1 KB
    of = ["bash", "-c", f"ulimit -f 1; trap '' XFSZ; {program}"]
    done = record(tmp_path / "r", "--noise", "0", of=of)
    assert done.returncode == 2
    assert trained(done.stdout), done.stderr
    assert "nothing was recorded: writing: " in done.stderr
    assert not [*(tmp_path / "r").rglob("*.draft")]


@pytest.mark.slow
def test_a_second_process_of_a_rank_overwrites_nothing(
    command: Command, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    program = shlex.join(command("plain"))
    of = ["bash", "-c", f"{program}; {program} rate"]
    done = record(tmp_path / "r", "--noise", "0", of=of)
    assert done.returncode == 0
    told = "several processes recorded as rank 0, and the one that ended first was kept"
    assert told in done.stderr
    record(tmp_path / "one", "--noise", "0", of=command("plain"))
    runs = [read_merged(tmp_path / name / "plain") for name in ("r", "one")]
    first, alone = ({k: w.digest for k, w in run.tensors.items()} for run in runs)
    assert first == alone
    assert main(["compare", "--exact", str(tmp_path / "r"), str(tmp_path / "one")]) == 2
    assert told in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["r"], "give the command after --"),
        (["r", "python", "train.py"], "give the command after --"),
        (
            ["r", "--noise", "1", "--", "true"],
            "give 2 or more, or 0 for the other side",
        ),
        (
            ["r", "--steps", "x", "--", "true"],
            "--steps: 'x' is neither a number of steps",
        ),
        (["r", "--", "nosuchcommand"], "nosuchcommand: No such file"),
        ([".", "--", "true"], ". exists: choose another name"),
    ],
)
def test_bad_usage_is_reported_in_one_line(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    words: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["record", *arguments]) == 2
    assert words in capsys.readouterr().err


def test_a_broken_recording_is_reported_in_one_line(
    one: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = tmp_path / "broken"
    (broken / "plain").mkdir(parents=True)
    path = broken / "plain" / "rank-0.safetensors"
    manifest = (one / "run.json").read_text()

    def told() -> str:
        assert main(["compare", str(one), str(broken)]) == 2
        error = capsys.readouterr().err
        assert error.count("\n") == 1, error
        return error

    assert "is not a recording: run.json is missing. To make one" in told()
    later = manifest.replace(f'"version": {VERSION}', f'"version": {VERSION + 1}')
    (broken / "run.json").write_text(later)
    assert f"has version {VERSION + 1}, expected {VERSION}" in told()
    runs = json.loads(manifest) | {"runs": []}
    (broken / "run.json").write_text(json.dumps(runs))
    assert "lists no run: record it again" in told()
    (broken / "run.json").write_text("{")
    assert "run.json: Input data was truncated" in told()
    (broken / "run.json").write_text(manifest)
    assert "has no recording" in told()
    whole = (one / "plain" / "rank-0.safetensors").read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    assert "is not a recording" in told()
    of_two = whole.replace(b'\\"world_size\\":1', b'\\"world_size\\":2')
    path.write_bytes(of_two)
    assert told().endswith("these of 2 ranks wrote nothing: 1\n")
    path.with_name("unrecorded-1.json").write_text("{}")
    assert "wrote nothing: 1. Rank 1 called a model, and no step of an opt" in told()
    why = {"calls": {}, "notes": ["the gradients: ValueError: places"]}
    path.with_name("unrecorded-1.json").write_text(json.dumps(why))
    assert "Nothing was recorded on rank 1: the gradients: ValueError: pl" in told()
    path.with_name("rank-1.safetensors").write_bytes(whole)
    assert "has files of several jobs, of other numbers of ranks" in told()


IDLE_RANK = """
import torch, torch.distributed as dist
dist.init_process_group("gloo")
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for _ in range(3):
    model(torch.ones(4, 2)).sum().backward()
    if dist.get_rank() == 0:
        optimizer.step()
dist.barrier()
"""


@pytest.mark.slow
def test_a_rank_that_takes_no_step_is_told(tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text(IDLE_RANK)
    of = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    of += ["--nproc-per-node", "2", str(tmp_path / "job.py")]
    done = record(tmp_path / "run", "--noise", "0", of=of)
    assert "gradparity: Rank 1 called a model, and no step of an opt" in done.stderr


def test_a_folder_that_record_made_for_nothing_is_removed(tmp_path: Path) -> None:
    assert main(["record", str(tmp_path / "a" / "b"), "--", "true"]) == 2
    assert not [*tmp_path.iterdir()]
    assert main(["record", str(tmp_path / "a" / "b"), "--", "no-such-command"]) == 2
    assert not [*tmp_path.iterdir()]


def test_a_broken_reason_is_no_traceback(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    job = f"mkdir -p {out}/plain; echo {{ > {out}/plain/unrecorded-0.json"
    assert main(["record", str(out), "--noise", "0", "--", "sh", "-c", job]) == 2
    assert "no optimizer of torch was called" in capsys.readouterr().err
    assert not out.exists()


@pytest.mark.parametrize("stop", [False, True])
def test_a_job_that_fails_though_it_was_stopped_is_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], stop: bool
) -> None:
    """The message explains that ``--stop`` ends ranks while others wait for them."""
    out = tmp_path / "run"
    job = f"mkdir -p {out}/plain; touch {out}/plain/rank-0.safetensors; exit 1"
    options = ["--noise", "0", *["--stop"] * stop, "--", "sh", "-c", job]
    assert main(["record", str(out), *options]) == 1
    said = capsys.readouterr().err
    assert "the command then ended with 1" in said
    assert ("fewer steps then loses it and fails" in said) == stop
