"""Tests of `doctor --bundle`: contents, chosen plans, and no secrets."""

from __future__ import annotations

import json
import os
import zipfile
from pathlib import Path

import pytest

from tests.harness.no_home import leave_home
from ub_overlap.cli import bundle, doctor, main
from ub_overlap.cli.redact import REDACTED, redact_text, redact_variable
from ub_overlap.runtime import plan_store

DIGESTS = [f"{n:016x}" for n in (0xA0, 0xB0, 0xC0, 0xD0, 0xE0, 0xF0)]


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Store six plans, the last the newest, and skip the checks that need torch."""
    monkeypatch.setenv("UB_OVERLAP_CACHE_DIR", str(tmp_path / "cache"))
    for age, digest in enumerate(reversed(DIGESTS)):
        path = plan_store.save(digest, json.dumps({"digest": digest}))
        plan_store.save_graphs(digest, b"packed")
        os.utime(path, (2e9 - age, 2e9 - age))
    (plan_store.directory() / "notes.json").write_text("mine")
    monkeypatch.setattr(doctor, "_probe", lambda: {"settings": {"step_timeout_s": 7.0}, "packages": {"torch": "2.13.0"}})
    return tmp_path


def read(path: Path) -> dict[str, str]:
    with zipfile.ZipFile(path) as archive:
        assert archive.testzip() is None
        return {name: archive.read(name).decode() for name in archive.namelist()}


def test_contents(store: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("UB_OVERLAP_STEP_TIMEOUT_S", "7")
    monkeypatch.setenv("UB_OVERLAP_PROXY", "http://me:hunter2@proxy:3128")
    monkeypatch.setenv("UB_OVERLAP_HUB_TOKEN", "hunter3")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "hunter4")
    log, report = store / "train.log", store / "report.json"
    log.write_text("x" * bundle.MAX_LOG + f"\nHF_TOKEN=hunter5 tokens: 8192\nlast line in {Path.home()}/run\n")
    report.write_text("{}")
    path = store / "out.zip"
    assert main(["doctor", "--bundle", str(path), "--log", str(log), "--log", str(log), "--report", str(report), "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    files = read(path)
    assert {row["name"] for row in answer["contents"]} | {"contents.txt"} == set(files)
    assert {row["name"]: row["bytes"] for row in answer["contents"]} == {
        name: len(text.encode()) for name, text in files.items() if name != "contents.txt"
    }
    assert all(name in files["contents.txt"] for name in files if name != "contents.txt")
    newest = {f"plans/{digest}.{suffix}" for digest in DIGESTS[-4:] for suffix in ("json", "graphs")}
    assert {name for name in files if name.startswith("plans/")} == newest
    assert {name for name in files if name.startswith(("logs/", "reports/"))} == {
        "logs/train.log", "logs/2-train.log", "reports/report.json",
    }  # fmt: skip
    assert "UB_OVERLAP_STEP_TIMEOUT_S=7" in files["doctor.txt"] and "\x1b" not in files["doctor.txt"]
    facts = json.loads(files["doctor.json"])
    assert facts["probe"]["settings"] == {"step_timeout_s": 7.0} and facts["environment"]["UB_OVERLAP_HUB_TOKEN"] == REDACTED
    assert "pytest==" in files["packages.txt"]
    assert "tokens: 8192" in files["logs/train.log"] and files["logs/train.log"].endswith("last line in ~/run\n")
    assert len(files["logs/train.log"]) <= bundle.MAX_LOG + 100
    everything = "\n".join(files.values())
    assert "hunter" not in everything and "AWS_" not in everything and "proxy:3128" in everything
    assert sorted(p.name for p in store.iterdir()) == ["cache", "out.zip", "report.json", "train.log"], "no partial file"


def test_chosen_plans(store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = store / "out.zip"
    assert main(["doctor", "--bundle", str(path), "--plan", DIGESTS[0], "--plan", DIGESTS[1]]) == 0
    out = capsys.readouterr().out
    assert {n for n in read(path) if n.endswith(".graphs")} == {f"plans/{d}.graphs" for d in DIGESTS[:2]}
    assert f"wrote {path}" in out and f"plans/{DIGESTS[0]}.json" in out
    assert main(["doctor", "--bundle", str(path), "--newest", "0"]) == 0
    assert not [n for n in read(path) if n.startswith("plans/")]
    assert main(["doctor", "--bundle", str(path), "--plan", "ffff"]) == 2
    assert "no stored report with this digest" in capsys.readouterr().err


def test_a_folder_of_logs(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The newest files of the folder itself; links and folders in it are not followed."""
    monkeypatch.setattr(bundle, "MAX_LOGS", 2)
    flight = store / "flight"
    (flight / "inner").mkdir(parents=True)
    for age, file in enumerate(("rank0.json", "rank1.json", "rank2.json")):
        (flight / file).write_text('{"rank": 0, "api_key": "hunter6"}')
        os.utime(flight / file, (2e9 - age, 2e9 - age))
    (flight / "link.json").symlink_to("/etc/passwd")
    path = store / "out.zip"
    assert main(["doctor", "--bundle", str(path), "--log", str(flight)]) == 0
    files = read(path)
    assert {n for n in files if n.startswith("logs/")} == {"logs/flight/rank0.json", "logs/flight/rank1.json"}
    assert "hunter" not in files["logs/flight/rank0.json"]


def test_a_user_without_a_home_folder(store: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The bundle has no plans then."""
    leave_home(monkeypatch)
    path = store / "out.zip"
    assert main(["doctor", "--bundle", str(path)]) == 0
    assert set(read(path)) == {"contents.txt", "doctor.txt", "doctor.json", "packages.txt"}
    capsys.readouterr()
    assert main(["doctor", "--bundle", str(path), "--plan", DIGESTS[0]]) == 2
    assert "no stored reports: there is no home folder" in capsys.readouterr().err


def test_the_file_is_private_and_follows_no_link(store: Path) -> None:
    """Other users may have put links into the folder, e.g. /tmp."""
    victim = store / "victim"
    victim.write_text("precious")
    (store / ".out.zip.part").symlink_to(victim)
    path = store / "out.zip"
    path.symlink_to(victim)
    assert main(["doctor", "--bundle", str(path), "--newest", "0"]) == 0
    assert victim.read_text() == "precious" and not path.is_symlink()
    assert path.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize(
    "arguments", [("--plan", "a0"), ("--bundle", "nowhere/x.zip"), ("--bundle", "x.zip", "--log", "nowhere.log")], ids=str
)
def test_bad_usage(arguments: tuple[str, ...], store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(store)
    with pytest.raises(SystemExit) as exit:
        main(["doctor", *arguments])
    assert exit.value.code == 2 and not (store / "x.zip").exists()


@pytest.mark.parametrize(
    ("text", "redacted"),
    [
        ("git+https://me:pw@host/x.git", f"git+https://{REDACTED}@host/x.git"),
        ("https://token@host/x", f"https://{REDACTED}@host/x"),
        ("Authorization: Bearer abcdefgh12345", f"Authorization: Bearer {REDACTED}"),
        ('{"api_key": "abc", "lr": 0.1}', f'{{"api_key": "{REDACTED}", "lr": 0.1}}'),
        ("password=abc; x=1", f"password={REDACTED}; x=1"),
        ("login with hf_abcdefghijklm done", f"login with {REDACTED} done"),
        ("telegram_token=123456789:AAF-x_y", f"telegram_token={REDACTED}"),
        ("api_key=12345678-1234-abcd", f"api_key={REDACTED}"),
        ("password=12/ab, aws_session_token=0.abc", f"password={REDACTED}, aws_session_token={REDACTED}"),
        ("run.py --token abcdef --hf-token 1ab --lr 0.1", f"run.py --token {REDACTED} --hf-token {REDACTED} --lr 0.1"),
        (
            "['--api-key', 'abc', '--no-auth', '--pad-token', '0']",
            f"['--api-key', '{REDACTED}', '--no-auth', '--pad-token', '0']",
        ),
        ("X-Api-Key: abc", f"X-Api-Key: {REDACTED}"),
        ("http://me:p@ss@host/ http://host/a@b", f"http://{REDACTED}@host/ http://host/a@b"),
        ("PGPASS=x DB_PWD=y MYSQL_PASS=z", f"PGPASS={REDACTED} DB_PWD={REDACTED} MYSQL_PASS={REDACTED}"),
        ('password = "two words" next', f'password = "{REDACTED}" next'),
        ("password: 'it is \"quoted\"', x", f"password: '{REDACTED}', x"),
        (r'{"a": "{\"api_key\": \"abc d\", \"lr\": 1}"}', rf'{{"a": "{{\"api_key\": \"{REDACTED}\", \"lr\": 1}}"}}'),
        ("jwt eyJhbGciOiJI.eyJzdWIiOi.SflKxw done", f"jwt {REDACTED} done"),
        ("Authorization: Token abc.def", f"Authorization: {REDACTED}"),
        ("AccountName=me;AccountKey=ab/c+d==;End=x", f"AccountName=me;AccountKey={REDACTED};End=x"),
        ("https://a.blob/x?sv=2024&sig=a%2Fb%3D&se=9", f"https://a.blob/x?sv=2024&sig={REDACTED}&se=9"),
        ("key is AbCdEfGhIjKlMnOpQrStUvWx0123456789+= now", f"key is {REDACTED} now"),
        (
            "SSHPASS=a APP_KEY=b dbpass=c session_id=d",
            f"SSHPASS={REDACTED} APP_KEY={REDACTED} dbpass={REDACTED} session_id={REDACTED}",
        ),
        ("ANY_NAME=value OTHER='two words' STEPS=20", f"ANY_NAME={REDACTED} OTHER='{REDACTED}' STEPS=20"),
        ("NCCL_DEBUG=INFO UB_OVERLAP_LINKS=any NCCL_TOKEN=x", f"NCCL_DEBUG=INFO UB_OVERLAP_LINKS=any NCCL_TOKEN={REDACTED}"),
        ("run --key abc --keys 3", f"run --key {REDACTED} --keys 3"),
        ("login 0123456789abcdef0123456789abcdef01234567 done", f"login {REDACTED} done"),
        ("https://hooks.slack.com/services/T0/B0/xyz ok", f"https://hooks.slack.com/{REDACTED} ok"),
        ("Cookie: a=b; c=d", f"Cookie: {REDACTED}"),
        ("authorization bearer abcdefgh1", f"authorization bearer {REDACTED}"),
        ("plan 00112233aabbccdd-f00dcafe at 0x7fa0c0ffee00", "plan 00112233aabbccdd-f00dcafe at 0x7fa0c0ffee00"),
        ("forward pass: 12 ms, token=None, auth: false", "forward pass: 12 ms, token=None, auth: false"),
        ("_ZN5torch8autograd6EngineE0123456789ABCDEFabcdef()", "_ZN5torch8autograd6EngineE0123456789ABCDEFabcdef()"),
        ("/data/AbCdEfGhIjKlMnOpQrStUvWx0123456789/model.pt", "/data/AbCdEfGhIjKlMnOpQrStUvWx0123456789/model.pt"),
        ("f(pad_token=0) token: 1.5, [token=2] {'token': 3}", "f(pad_token=0) token: 1.5, [token=2] {'token': 3}"),
        ("tokens=8192 tokens_per_second: 12 pad_token: 0", "tokens=8192 tokens_per_second: 12 pad_token: 0"),
        ("step 1 loss 2.0 https://host/x all_gather(x, [t, t_1])", "step 1 loss 2.0 https://host/x all_gather(x, [t, t_1])"),
    ],
)
def test_redaction(text: str, redacted: str) -> None:
    assert redact_text(text) == redacted


def test_redaction_of_variables() -> None:
    assert redact_variable("WANDB_API_KEY", "x") == REDACTED == redact_variable("MY_PASSWORD_FILE", "x")
    assert redact_variable("UB_OVERLAP_LINKS", "any") == "any" and redact_variable("HF_TOKEN", "") == ""
