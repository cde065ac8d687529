"""The launchers as a user starts them, in a copy of the suite with an environment that is installed already."""
import os
import re
import shutil
import subprocess

import pytest
from conftest import ROOT, SMALL

LAUNCHERS = ("launch_v4_cpu.sh", "launch_v4_mps_safe.sh", "launch_v4_mps_no_accum.sh")


@pytest.fixture
def suite(tmp_path):
    """A copy of the suite; .venv/bin/python is a script that shows how it was started and then becomes the real one."""
    for name in (*LAUNCHERS, "launch_env.sh", "requirements.txt", *(p.name for p in ROOT.glob("*.py"))):
        shutil.copy(ROOT / name, tmp_path / name)
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    python = tmp_path / ".venv" / "bin" / "python"
    python.write_text(f'#!/bin/sh\nenv > env.txt; ulimit -n >> env.txt; echo "$@" >> started.txt\nexec {ROOT}/.venv/bin/python "$@"\n')
    python.chmod(0o755)
    shutil.copy(ROOT / "requirements.txt", tmp_path / ".venv" / ".installed-requirements.txt")
    return tmp_path


def launch(suite, name, *flags, cwd=None, **env):
    clean = {k: v for k, v in os.environ.items() if k not in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "KMP_DUPLICATE_LIB_OK", "PAIRS", "BANK")}
    return subprocess.run([str(suite / name), *flags], cwd=cwd or suite, env=clean | env, capture_output=True, text=True, timeout=200)


def started(suite):
    return [line for line in (suite / "started.txt").read_text().splitlines() if "train_twotower_v4.py" in line][-1]


@pytest.mark.parametrize("name", LAUNCHERS)
def test_launchers_are_short_and_hold_only_what_differs(name):
    lines = (ROOT / name).read_text().splitlines()
    assert len(lines) < 25 and lines[0] == "#!/usr/bin/env bash" and lines[1].startswith("# Summary:") and lines[2].startswith("# Usage:")
    assert os.access(ROOT / name, os.X_OK)


def test_callers_flags_and_data_win_and_exit_status_is_the_trainers(suite, lab):
    data = os.path.relpath(lab.folder / "data", suite.parent)
    done = launch(suite, "launch_v4_cpu.sh", *SMALL, "--max-steps", "2", cwd=suite.parent, PAIRS=f"{data}/pairs.npz", BANK=f"{data}/bank.npz")
    assert done.returncode == 0, done.stderr
    assert "8 x 4 = 32 pairs a step" in done.stdout                       # --bs 8 --accum 4 over the launcher's 32 x 16
    assert (suite / "runs" / "v4_cpu" / "checkpoints" / "best.pt").exists()
    assert "set-up: installing" not in done.stdout
    done = launch(suite, "launch_v4_cpu.sh", "--bs", "0")
    assert done.returncode == 2 and "--bs is 0" in done.stderr


def test_environment_has_the_documented_exports_and_keeps_the_users_own(suite):
    launch(suite, "launch_v4_cpu.sh", "--version", OMP_NUM_THREADS="7")
    env = (suite / "env.txt").read_text()
    assert "KMP_DUPLICATE_LIB_OK=TRUE\n" in env and "PYTHONUNBUFFERED=1\n" in env and "OMP_NUM_THREADS=7\n" in env
    assert re.search(r"^MKL_NUM_THREADS=[1-9]", env, re.M) and re.search(r"^OPENBLAS_NUM_THREADS=[1-9]", env, re.M)


def test_descriptor_limit_is_raised_where_it_is_lower(suite):
    subprocess.run(["bash", "-c", f"ulimit -Sn 256; exec {suite}/launch_v4_cpu.sh --version"], cwd=suite, capture_output=True)
    assert (suite / "env.txt").read_text().splitlines()[-1] == "4096"


def test_launchers_hold_the_documented_configurations(suite):
    expected = {"launch_v4_cpu.sh": "--device cpu --precision fp32 --bs 32 --accum 16", "launch_v4_mps_safe.sh": "--device mps --precision fp32 --bs 24 --accum 4",
                "launch_v4_mps_no_accum.sh": "--device mps --precision fp32 --bs 16 --accum 1 --epochs 5 --no-mining"}
    for name, flags in expected.items():
        launch(suite, name, "--version")
        assert flags in started(suite)


@pytest.mark.parametrize("name", LAUNCHERS[1:])
def test_mps_launchers_say_what_to_use_on_a_machine_without_mps(suite, name):
    done = launch(suite, name)
    assert done.returncode == 2 and "./launch_v4_cpu.sh" in done.stderr and len(done.stderr.strip().splitlines()) == 1, done.stderr


def test_documented_files_are_used_when_they_are_there(suite, lab):
    (suite / "artifacts" / "twotower").mkdir(parents=True)
    shutil.copy(lab.pairs, suite / "artifacts" / "twotower" / "pairs_v4_synth.npz")
    shutil.copy(lab.bank, suite / "artifacts" / "wikipedia_500k_corrected_vectors.npz")
    done = launch(suite, "launch_v4_cpu.sh", *SMALL, "--max-steps", "1")
    assert done.returncode == 0 and "demo data" not in done.stdout and "306 training" in done.stdout, done.stderr


def test_half_of_the_data_named_is_refused(suite):
    done = launch(suite, "launch_v4_cpu.sh", PAIRS="x.npz")
    assert done.returncode == 2 and "set both PAIRS= and BANK=" in done.stderr


def test_changed_requirements_install_again_and_a_failed_install_is_said(suite):
    (suite / "requirements.txt").write_text("no-such-package-of-any-kind==1.2.3\n")
    done = launch(suite, "launch_v4_cpu.sh", PIP_RETRIES="0")
    assert done.returncode == 2 and "could not install requirements.txt" in done.stderr
    assert not (suite / "runs").exists()
