"""Job files as people write them: what is understood, and how each mistake is shown."""

import os
import re
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from chaosrun import api
from chaosrun.errors import SpecError, UsageError
from chaosrun.faults.kinds import KINDS
from chaosrun.spec.bounds import MOST_PER_CORE
from chaosrun.spec.job_file import load_job

LEAST = "name: probe\nscript: train.py\nworkers: 2\n"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A directory with a script, and the working directory of the test: errors then show the bare file name."""
    (tmp_path / "train.py").write_text("from chaosrun import attach\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def load(text: str | bytes, *overrides: str):
    path = Path("job.yaml")
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return load_job(path, overrides)


def refusal(text: str | bytes, *overrides: str) -> SpecError:
    with pytest.raises(SpecError) as caught:
        load(text, *overrides)
    return caught.value


def headlines(error: SpecError) -> list[str]:
    """Lines that are neither excerpt, caret nor hint."""
    return [line for line in error.message.splitlines() if not line.startswith("  ")]


def test_a_job_knows_its_places(folder):
    job = load(LEAST)
    assert (job.spec.name, job.spec.workers) == ("probe", 2)
    assert (job.path, job.directory, job.script_path) == (Path("job.yaml"), folder, folder / "train.py")
    assert job.text == LEAST


def test_scalars_of_args_and_env_are_text_as_written(folder):
    spec = load(LEAST + "args: [--lr, 0.10, 1e-3, 007, off, 'a b', ~]\nenv: {A: 0x10, B: true, C: , 1: 2}\n").spec
    assert spec.args == ("--lr", "0.10", "1e-3", "007", "off", "a b", "~")
    assert spec.env == {"A": "0x10", "B": "true", "C": "", "1": "2"}


def test_off_is_a_word_not_a_truth_value(folder):
    assert load(LEAST + "deterministic: off\n").spec.deterministic == "off"


def test_anchors_may_be_used(folder):
    verify = load(LEAST + "verify: {losses: &t {atol: 1}, weights: *t}\n").spec.verify
    assert verify.losses == verify.weights


def test_the_whole_text_of_an_unknown_key(folder):
    error = refusal("name: probe\nscript: train.py\nworker: 2  # two\n")
    assert error.message.splitlines() == [
        "job.yaml:3:1: unknown key 'worker', did you mean 'workers'?",
        "     3 | worker: 2  # two",
        "       | ^^^^^^",
    ]
    assert error.hint is not None and error.hint.startswith("keys here: name, script")
    assert error.exit_code == 2


def test_all_problems_are_told_at_once_sorted_by_place(folder):
    error = refusal(
        "seed: x\nworkers: '3'\nname: probe\nscript: trian.py\n"
        "checkpoint:\n  keep: 1\n  keep: 3\n"
        "faults:\n  schedule:\n    - at_step: 3\n      every_step: 5\n    - until_step: 8\n      at_step: 2\n"
        "  random: {count: 3, mean_steps: 4}\nenv:\n  RANK: 0\n",
        "worker=3",
    )
    assert headlines(error) == [
        "job.yaml:1:7: seed must be a whole number, not the text 'x'",
        "job.yaml:2:10: workers must be a whole number, not the text '3'",
        f"job.yaml:4:9: no such script: {folder / 'trian.py'}",
        "job.yaml:6:9: checkpoint.keep must be at least 2, not 1",
        "job.yaml:7:3: duplicate key 'keep', first given on line 6",
        "job.yaml:11:7: unknown key 'every_step' in faults.schedule[0], did you mean 'every_steps'?",
        "job.yaml:12:7: until_step needs every_steps",
        "job.yaml:14:22: count and mean_steps exclude each other",
        "job.yaml:16:3: RANK is set by chaosrun, for each rank and attempt",
        "override 'worker=3': unknown key 'worker', did you mean 'workers'?",
    ]
    assert error.message.count("  hint: ") == 10
    assert error.hint is None


MISTAKES = [
    ("keep: 4", "4:1: unknown key 'keep'", "keep", "keep belongs elsewhere: checkpoint.keep"),
    ("at_step: 4", "4:1: unknown key 'at_step'", "at_step", "at_step belongs elsewhere: faults.schedule[].at_step"),
    ("Max-Steps: 4", "4:1: unknown key 'Max-Steps', did you mean 'max_steps'?", "Max-Steps", "keys here: name"),
    ("zzz: 4", "4:1: unknown key 'zzz'", "zzz", "keys here: name"),
    ("verify: {weigths: {}}", "4:10: unknown key 'weigths' in verify, did you mean 'weights'?", "weigths", "keys of verify"),
    (
        "deterministic: strickt",
        "4:16: deterministic must be one of strict, warn, off, not the text 'strickt'; did you mean 'strict'?",
        "strickt",
        "deterministic: strict: an",
    ),
    ("seed: '7'", "4:7: seed must be a whole number, not the text '7'", "'7'", "remove the quotes"),
    ("max_steps: 1.5", "4:12: max_steps must be a whole number, not 1.5", "1.5", "max_steps: stop after"),
    ("checkpoint:", "4:1: checkpoint must be a mapping, not empty", "checkpoint", "give checkpoint a value, or remove the key"),
    ("checkpoint: [1, 2]", "4:13: checkpoint must be a mapping, not a list", "[1, 2]", "checkpoint: when"),
    ("args: --lr 3", "4:7: args must be a list, not the text '--lr 3'", "--lr 3", "write [--lr, 3]"),
    ("data: {probe: yes}", "4:15: data.probe must be true or false, not the text 'yes'", "yes", "write true"),
    (
        "verify: {confirm: yes}",
        "4:19: verify.confirm must be true, false, or how many runs without faults are to agree, such as 3",
        "yes",
        "confirm: after a difference",
    ),
    ("verify: {losses: {atol: .inf}}", "4:25: verify.losses.atol must be a finite number, not inf", ".inf", "atol: largest"),
    ("timeout: soon", "4:10: timeout must be a time greater than 0", "soon", "timeout: longest"),
    ("faults: {random: {}}", "4:10: random faults need count, mean_steps, rate or mtbf", "random", "say how many"),
    ("faults: {schedule: [{rank: 0}]}", "4:21: a fault at phase step needs at_step, every_steps,", "{", "say when"),
    (
        "faults: {random: {count: 1, between: [0, 3]}}",
        "4:39: faults.random.between[0] must be at least 1, not 0",
        "0",
        "between: first and last step",
    ),
    ("seed: 3\nseed: 4", "5:1: duplicate key 'seed', first given on line 4", "seed", "keep one of the two"),
    (
        "seed: !!python/object:os.system {}",
        "4:7: the tag !!python/object:os.system has no meaning here",
        None,
        "remove the tag",
    ),
    ("seed: !!int x", "4:7: 'x' is not what its tag !!int says", None, "remove the tag"),
    ("seed: &a 3\n<<: {max_steps: 4}", "5:1: merge keys (<<) have no meaning here", "<<", "write the keys out"),
    ("? [a]\n: 3", "4:3: a key must be text, not a list or a mapping", "[a]", "put a name before the colon"),
    ("日本: 3", "4:1: unknown key '日本'", "日本__", "keys here"),
]


@pytest.mark.parametrize(("lines", "headline", "caret_under", "hint"), MISTAKES)
def test_one_mistake_one_place(folder, lines, headline, caret_under, hint):
    error = refusal(LEAST + lines + "\n")
    shown = error.message.splitlines()
    assert len(shown) == 3, error.message
    assert shown[0].startswith(f"job.yaml:{headline}"), error.message
    assert error.hint is not None and error.hint.startswith(hint), error.hint
    if caret_under is not None:
        assert shown[2].count("^") == len(caret_under)
        column = int(shown[0].split(":")[2]) - 1
        assert shown[2] == "       | " + " " * column + "^" * len(caret_under)


@pytest.mark.parametrize(
    ("text", "headline"),
    [
        ("", "job.yaml:1:1: the job file is empty"),
        ("# nothing yet\n", "job.yaml:1:1: the job file is empty"),
        ("- name: probe\n", "job.yaml:1:1: a job file holds keys and values, this one holds a list"),
        ("just words\n", "job.yaml:1:1: a job file holds keys and values, this one holds a single value"),
        ("name: probe\ncheckpoint:\n\tkeep: 3\n", "job.yaml:3:1: a tab in the indentation"),
        ("name: [a, b\n", "job.yaml:2:1: not valid YAML: expected ',' or ']', but got the end of the text"),
        ("name: a: b\n", "job.yaml:1:8: not valid YAML: mapping values are not allowed here"),
        ("name: *nobody\n", "job.yaml:1:7: not valid YAML: found undefined alias 'nobody'"),
        (LEAST + "---\n" + LEAST, "job.yaml:4:1: a second document begins here"),
        (b"name: probe\nscript: tr\xe4in.py\n", "job.yaml:2:11: not UTF-8: byte 0xe4"),
        (b"\xef\xbb\xbfname: \xff\n", "job.yaml:1:7: not UTF-8: byte 0xff"),
        (b"name: pr\x00be\n", "job.yaml:1:9: not a text file: it holds the character U+0000"),
        ("[" * 1_000, "job.yaml:1:1: the values nest too deep, or expand to too many"),
    ],
)
def test_what_is_no_job_file_at_all(folder, text, headline):
    error = refusal(text)
    assert headlines(error)[0].startswith(headline), error.message
    assert error.hint


def test_an_alias_of_itself_and_one_that_explodes_are_refused(folder):
    assert "nest too deep" in refusal(LEAST + "args: &a [*a]\n").message
    bomb = "".join(f"b{n}: &b{n} [{', '.join([f'*b{n - 1}'] * 9)}]\n" for n in range(1, 10))
    assert "expand to too many" in refusal(LEAST + "b0: &b0 [x]\n" + bomb).message


def test_windows_line_ends_and_a_byte_order_mark_change_no_place(folder):
    error = refusal(b"\xef\xbb\xbfname: probe\r\nscript: train.py\r\nworkers: x\r\n")
    assert headlines(error) == ["job.yaml:3:10: workers must be a whole number, not the text 'x'"]


def test_a_missing_key_is_shown_and_its_misspelling_only_once(folder):
    assert headlines(refusal("name: probe\nscript: train.py\n")) == ["job.yaml:1:1: missing key 'workers'"]
    assert headlines(refusal("name: probe\nscrpt: train.py\n")) == [
        "job.yaml:1:1: missing key 'workers'",
        "job.yaml:2:1: unknown key 'scrpt', did you mean 'script'?",
    ]


def test_a_very_long_line_is_cut_around_the_place(folder):
    error = refusal(LEAST + "env: {" + "A: " + "x" * 400 + ", RANK: 1, B: " + "y" * 400 + "}\n")
    _, line, caret = error.message.splitlines()
    assert len(line) < 130
    assert line[caret.index("^") : caret.rindex("^") + 1] == "RANK"


class TestFiles:
    @pytest.mark.parametrize(
        ("asked", "hint"),
        [
            ("jbo.yaml", "did you mean job.yaml?"),
            ("nowhere/job.yaml", "the directory nowhere does not exist"),
            *((far, "job files there: job.yaml") for far in ("bob.yaml", "nojob.yaml", "jubilee.yaml")),
        ],
    )
    def test_no_job_file(self, folder, asked, hint):
        (folder / "job.yaml").write_text(LEAST)
        (folder / "bobby.yaml").write_text("name: a suite\ndrills: []\n")
        with pytest.raises(UsageError, match=f"no such job file: {re.escape(asked)}") as caught:
            load_job(Path(asked))
        assert caught.value.hint == hint

    @pytest.mark.parametrize(
        ("name", "text", "told", "then"),
        [
            ("a.yaml", "faults:\n- {kind: kill}\n", "a.yaml is a preset of faults, not a job file", "faults.preset=/"),
            ("a.yaml", "name: x\njob: job.yaml\ndrills: [{name: x}]\n", "a.yaml is a suite, not a job file", "chaosrun suite"),
            ("job.txt", "a note\nwith: two: colons\n", "job.txt is not a job file: it does not hold YAML", "ends in .yaml"),
            ("a.sh", "python train.py\n", "a.sh is a shell script, not a job file", "-- bash a.sh"),
            ("train.py", "import torch\n", "train.py is a Python script, not a job file", "chaosrun submit train.py"),
            ("a.yaml", "a" * (5 << 20), "a.yaml is not a job file: it has more than 4 MiB", "YAML"),
            ("model.pt", "\udcff\0", "model.pt is not a job file: it holds no text", "YAML"),
        ],
    )
    def test_a_file_of_another_kind_is_told_in_one_sentence(self, folder, name, text, told, then):
        (folder / name).write_text(text, errors="surrogateescape")
        with pytest.raises(UsageError) as caught:
            load_job(Path(name))
        assert caught.value.message.startswith(told) and "\n" not in caught.value.message
        assert then in (caught.value.hint or "")

    @pytest.mark.parametrize("name", ["job.yaml", "job.txt"])
    def test_a_job_file_may_be_called_anything(self, folder, name):
        """The controls: a job file, and one with an error of its own, are not taken for another kind."""
        (folder / name).write_text(LEAST)
        assert load_job(Path(name)).spec.workers == 2
        (folder / name).write_text(LEAST + "drills: []\n")
        with pytest.raises(SpecError, match="unknown key 'drills'"):
            load_job(Path(name))

    def test_places_that_cannot_be_written(self, folder):
        (folder / "train.py").write_text("from chaosrun import attach")
        error = refusal(LEAST + "checkpoint: {storage: /proc/nope}\n")
        assert headlines(error) == [
            "job.yaml:4:23: checkpoint.storage /proc/nope cannot be written: nothing can be made in /proc "
            "(No such file or directory)"
        ]
        (folder / "train.py").write_text("")
        (error,) = headlines(refusal(LEAST + "outputs: [out, train.py/x]\n"))
        assert error == f"job.yaml:4:16: {folder / 'train.py'} is a file: nothing can be written below it"
        (folder / "train.py").write_text("from chaosrun import attach")
        names = sorted(os.listdir(folder))
        (folder / "job.yaml").write_text(LEAST + "checkpoint: {storage: new/checkpoints}\n")
        assert load_job(Path("job.yaml")).spec.checkpoint.storage == "new/checkpoints"
        assert sorted(os.listdir(folder)) == names, "trying leaves nothing"

    def test_a_directory(self, folder):
        (folder / "job.yaml").write_text(LEAST)
        with pytest.raises(UsageError, match="is a directory") as caught:
            load_job(folder)
        assert caught.value.hint == f"did you mean {folder / 'job.yaml'}?"

    def test_no_script(self, folder):
        error = refusal(LEAST.replace("train.py", "tarin.py"))
        assert headlines(error) == [f"job.yaml:2:9: no such script: {folder / 'tarin.py'}"]
        assert error.hint == "did you mean train.py?"

    def test_the_script_is_a_directory(self, folder):
        assert "is a directory" in refusal(LEAST.replace("train.py", ".")).message

    def test_the_script_lies_beside_the_job_file_not_in_the_working_directory(self, folder):
        (folder / "jobs").mkdir()
        (folder / "jobs" / "other.py").write_text("from chaosrun import attach\n")
        (folder / "jobs" / "job.yaml").write_text(LEAST.replace("train.py", "other.py"))
        assert load_job(Path("jobs/job.yaml")).script_path == folder / "jobs" / "other.py"


class TestOverrides:
    def test_they_win_over_the_file_and_later_ones_over_earlier(self, folder):
        spec = load(LEAST, "workers=3", "workers=4", "faults.seed=7", "checkpoint={keep: 5}").spec
        assert (spec.workers, spec.faults.seed, spec.checkpoint.keep) == (4, 7, 5)

    def test_list_entries_by_index(self, folder):
        text = LEAST + "faults: {schedule: [{at_step: 3, rank: 0}, {at_step: 5}]}\nargs: [a, b]\n"
        spec = load(text, "faults.schedule[0].rank=1", "faults.schedule[1].at_step=6", "args[1]=0.10").spec
        assert [(fault.rank, fault.at_step) for fault in spec.faults.schedule] == [(1, 3), ("random", 6)]
        assert spec.args == ("a", "0.10")

    def test_whole_lists_empty_values_and_text_with_equals_signs(self, folder):
        spec = load(LEAST + "max_steps: 9\n", "args=[--x=1, 2.50]", "max_steps=", "env.OPTS=a=b", "env.N=1.0").spec
        assert (spec.args, spec.max_steps, spec.env) == (("--x=1", "2.50"), None, {"OPTS": "a=b", "N": "1.0"})

    def test_they_can_repair_what_the_file_lacks(self, folder):
        assert load("name: probe\nworkers: 2\n", "script=train.py").spec.script == "train.py"

    def test_the_file_itself_is_kept_as_it_was(self, folder):
        assert load(LEAST, "workers=4").text == LEAST

    @pytest.mark.parametrize(
        ("override", "message", "caret"),
        [
            ("workers=x", "workers must be a whole number, not the text 'x'", "        ^"),
            ("faults.seeed=3", "unknown key 'seeed' in faults, did you mean 'seed'?", "       ^^^^^"),
            ("workers", "not of the form key=value", "^^^^^^^"),
            ("=3", "not of the form key=value", "^^"),
            ("faults..seed=3", "'faults..seed' does not name a key", "       ^"),
            ("faults.=3", "'faults.' does not name a key", "      ^"),
            ("[0]=3", "'[0]' does not name a key", "^"),
            ("args[x]=3", "'args[x]' does not name a key", "    ^"),
            ("workers.cpu=3", "workers is a single value in the job file, it has no keys", "        ^^^"),
            ("args.first=3", "args is a list in the job file, it has no keys", "     ^^^^^"),
            ("workers[0]=3", "workers is not a list in the job file", "       ^^^"),
            ("args[1]=3", "args has 1 entry, there is no [1]", "    ^^^"),
            ("faults.schedule[0].rank=1", "faults.schedule is not a list in the job file", "               ^^^"),
            ("name=[a", "not valid YAML: expected ',' or ']', but got the end of the text", "       ^"),
            ("script=nope.py", "no such script: ", "       ^^^^^^^"),
        ],
    )
    def test_mistakes_are_shown_in_the_override(self, folder, override, message, caret):
        error = refusal(LEAST + "args: [a]\n", override)
        shown = error.message.splitlines()
        assert shown[0].startswith(f"override {override!r}: {message}"), error.message
        assert shown[1] == f"       | {override}"
        assert shown[2] == f"       | {caret}"
        assert error.hint


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=st.text(alphabet=st.sampled_from("ab:-[]{}&*!|>'\"%@#,? \n\t\\\x00é<1"), max_size=40))
def test_no_text_whatever_escapes_as_another_error(folder, text):
    for bytes_of_it in (text.encode(), (LEAST + text).encode()):
        try:
            load(bytes_of_it)
        except SpecError as error:
            assert error.message.startswith("job.yaml:")


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(override=st.text(alphabet=st.sampled_from("ab.=[]0{}:*!' \nfaultsseed"), max_size=20))
def test_no_override_whatever_escapes_as_another_error(folder, override):
    try:
        load(LEAST, override)
    except SpecError as error:
        assert error.message.startswith("override ")


class TestUnknownKeys:
    """A key that nobody knows hides nothing else, and the key that is named instead is the one that was meant."""

    def told(self, folder: Path, entry: str) -> list[str]:
        return headlines(refusal(LEAST + f"faults:\n  schedule:\n    - {entry}\n"))

    @pytest.mark.parametrize(
        ("key", "meant"),
        [("step", "at_step"), ("steps_", "steps"), ("every", "every_steps"), ("type", "kind"), ("rnak", "rank")],
    )
    def test_the_one_that_was_meant(self, folder: Path, key: str, meant: str) -> None:
        assert f"did you mean {meant!r}?" in self.told(folder, f"{{at_step: 3, {key}: 1}}")[0]

    @pytest.mark.parametrize(
        ("entry", "conflict"),
        [
            ("{at_step: 3, every_steps: 5, colour: red}", "6:20: at_step and every_steps exclude each other"),
            ("{at_step: 3, grace: 5s, rnak: 1}", "6:20: a fault of kind kill has no grace"),
        ],
    )
    def test_a_conflict_is_told_beside_it(self, folder: Path, entry: str, conflict: str) -> None:
        told = self.told(folder, entry)
        assert len(told) == 2
        assert f"job.yaml:{conflict}" in told

    @pytest.mark.parametrize(
        "entry", ["{att_step: 3}", "{at_step: 3, every_step: 5}", "{until_step: 9, every_step: 5}", "{at_step: 3, steps_: 3}"]
    )
    def test_nothing_is_told_that_depends_on_what_was_meant(self, folder: Path, entry: str) -> None:
        assert len(self.told(folder, entry)) == 1

    def test_a_long_list_of_words_is_in_the_hint(self, folder: Path) -> None:
        (told,) = self.told(folder, "{kind: kil, at_step: 3}")
        assert told.endswith(f"must be one of {len(KINDS)} words, not the text 'kil'; did you mean 'kill'?")
        error = refusal(LEAST + "faults: {schedule: [{kind: boom, at_step: 3}]}\n")
        assert "did you mean" not in error.message
        assert (error.hint or "").startswith("kind: kill, preempt, segfault, ")


class TestPlansAreRefusedAtTheirPlace:
    def refused_plan(self, folder: Path, *lines: str, overrides: tuple[str, ...] = ()) -> SpecError:
        path = folder / "job.yaml"
        path.write_text("\n".join(["name: x", "script: train.py", "workers: 2", "max_steps: 20", *lines, ""]))
        with pytest.raises(SpecError) as caught:
            api.plan(path, overrides)
        return caught.value

    def test_in_the_file(self, folder: Path) -> None:
        lines = ("faults:", "  schedule:", "    - rank: 1", "      at_step: 30", "    - {rank: 7, at_step: 3}")
        error = self.refused_plan(folder, *lines)
        first, second = [line for line in error.message.splitlines() if not line.startswith(" ")]
        assert first.endswith("job.yaml:7:7: faults.schedule[0]: step 30 is never reached, max_steps is 20")
        assert "job.yaml:9:7: faults.schedule[1]: rank 7 does not exist" in second
        assert "       ^^^^^^^^^^^^^^^^^^^^^" in error.message
        assert error.message.count("a fault that cannot fire") == 0 and "cannot fire proves nothing" in (error.hint or "")

    def test_everything_at_once_whatever_hides_what(self, folder: Path) -> None:
        wrong = "{kind: kil, phase: nowhere, rank: 5, at_step: 80}"
        error = self.refused_plan(folder, "faults:", f"  schedule: [{wrong}, {{rank: 0, at_step: 20}}]")
        places = [line.partition(": ")[2] for line in error.message.splitlines() if line.startswith("/")]
        assert [told.partition(" must be")[0] for told in places] == [
            "faults.schedule[0].kind",
            "faults.schedule[0].phase",
            "rank 5 does not exist: the last of 2 workers is rank 1",
            "step 80 is never reached, max_steps is 20",
        ]
        error = self.refused_plan(
            folder, "faults:", "  schedule: [{rank: 5, at_step: 3}, {every_steps: 90}, {at_step: 2, phase: restore.end}]"
        )
        for told in ("rank 5 does not exist", "every 90 steps comes to none", "no checkpoint is saved at step 2"):
            assert error.message.count(told) == 1, error.message

    def test_more_workers_than_the_machine_could_ever_run(self, folder: Path, own_ray: None) -> None:
        cores = os.cpu_count() or 1
        many = MOST_PER_CORE * cores + 1
        error = self.refused_plan(folder, overrides=(f"workers={many}",))
        assert f"at most {many - 1} are started here" in error.message
        (share,) = re.findall(r"set (per_worker\.cpu=\S+)", error.hint or "")
        loaded, _ = api.plan(folder / "job.yaml", [f"workers={many}", share])
        assert loaded.spec.workers == many
        api.plan(folder / "job.yaml", [f"workers={many - 1}"])
        api.plan(folder / "job.yaml", [f"workers={many}"], address="a.cluster:6379")

    def test_in_an_override(self, folder: Path) -> None:
        error = self.refused_plan(folder, overrides=("faults.schedule=[{at_step: 40}]",))
        assert error.message.startswith(
            "override 'faults.schedule=[{at_step: 40}]': faults.schedule[0]: step 40 is never reached"
        )

    def test_random(self, folder: Path) -> None:
        error = self.refused_plan(folder, "faults:", "  random: {count: 30}")
        assert "job.yaml:6:3: faults.random: 30 faults do not fit" in error.message
