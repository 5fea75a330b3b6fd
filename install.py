"""Set up onediff-ext in an environment of its own (.venv beside this file) and run it.

  python install.py demo [ARGS...]   set up, then run the demo
  python install.py ui [ARGS...]     set up, then open the panel in the browser
  python install.py run ARGS...      set up, then run the onediff-ext command line
  python install.py test [ARGS...]   set up, then run the tests; ARGS go on to pytest
  python install.py test --oneflow   set up another environment, with OneFlow, for which any
                                     Python 3.10 is looked for, and run OneFlow's tests
  python install.py                  what a Stable Diffusion WebUI runs at each start:
                                     adds what this extension lacks to the WebUI's Python

Set-up happens once: later runs start at once, and one that was interrupted or killed at any
moment is repaired by the next.

  ONEDIFF_TORCH         which torch to install instead of the tested one, as "torch==2.11.0"
  ONEDIFF_PIP_ARGS      further arguments for pip, as "--extra-index-url https://..."; which
                        index is used is pip's own configuration, not set here
  ONEDIFF_ONEFLOW_VENV  where the environment with OneFlow lies, so that clones can share it
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import importlib.util
import json
import os
import re
import shlex
import shutil
import string
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent
SUPPORTED = ((3, 10), (3, 13))
TESTED_TORCH = "torch==2.13.0"
WINDOWS_CUDA_INDEX = "https://download.pytorch.org/whl/cu130"
CPU_INDEX = "https://download.pytorch.org/whl/cpu"

# What the extension needs inside a WebUI besides torch, which is the WebUI's own affair.
HOST_REQUIREMENTS = {"safetensors": "safetensors>=0.4.2,<1", "filelock": "filelock>=3.20.3,<5"}

# Command: (extras to install, module that runs, arguments before the user's).
COMMANDS = {
    "demo": ({"diffusers"}, "onediff_ext", ("demo",)),
    "ui": ({"diffusers", "ui"}, "onediff_ext", ("ui",)),
    "run": ({"diffusers"}, "onediff_ext", ()),
    # For two cores: most tests use one, and some wait for processes, disks and clocks.
    "test": ({"diffusers", "test"}, "pytest", ("--numprocesses=3", "--dist=loadfile")),
}

# The last Python that OneFlow has wheels for, and an environment of its own: it needs old
# versions of packages that everything else is better off without.
ONEFLOW_PYTHON = (3, 10)
ONEFLOW_VENV = ".venv-oneflow"
ONEFLOW_EXTRAS = {"test-oneflow"}

# Settings of the calling shell or WebUI that would lead pip and Python out of .venv.
_LEADING_OUT = ("PYTHONHOME", "PYTHONPATH", "PIP_TARGET", "PIP_PREFIX", "PIP_USER")

_DISK_FULL = "The disk is full: free about 8 GB, then run the same command again."
_NO_NETWORK = (
    "NewConnectionError",
    "NameResolutionError",
    "Failed to establish a new connection",
    "ConnectTimeoutError",
    "ReadTimeoutError",
    "ConnectionResetError",
    "ProxyError",
    "SSLError",
)


class SetUpError(Exception):
    """Set-up cannot go on. `hint` is what the user does next."""

    def __init__(self, message: str, hint: str) -> None:
        super().__init__(message)
        self.hint = hint


def main(argv: list[str]) -> int:
    """Run one command.

    Returns:
        Exit status: the command's own; 1 when set-up failed, 2 for an unknown command,
        130 when set-up was interrupted.
    """
    if not argv:
        return start_in_host()
    command, arguments = argv[0], argv[1:]
    if command in ("-h", "--help"):
        print(__doc__.strip())
        return 0
    if command not in COMMANDS:
        print(f"install.py: unknown command {command!r}\n\n{__doc__.strip()}", file=sys.stderr)
        return 2
    extras, module, before = COMMANDS[command]
    try:
        if command == "test" and "--oneflow" in arguments:
            arguments.remove("--oneflow")
            if sys.version_info[:2] != ONEFLOW_PYTHON:
                python = find_python(ONEFLOW_PYTHON)
                return hand_over([str(python), __file__, "test", "--oneflow", *arguments])
            venv = os.environ.get("ONEDIFF_ONEFLOW_VENV", "").strip() or ONEFLOW_VENV
            python, module, before = set_up(ROOT, ONEFLOW_EXTRAS, venv), "tests.oneflow", ()
        else:
            check_python(sys.version_info[:2])
            python = set_up(ROOT, extras)
    except SetUpError as exc:
        print(f"\ninstall.py: {exc}\n  {exc.hint}", file=sys.stderr)
        return 1
    except OSError as exc:
        print(f"\ninstall.py: {exc}\n  {_hint_for(exc)}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nStopped. The same command finishes the set-up.", file=sys.stderr)
        return 130
    if command == "test":
        os.chdir(ROOT)
    return hand_over([str(python), "-m", module, *before, *arguments])


# ----------------------------------------------------------------- inside a WebUI


def start_in_host() -> int:
    """Install what the extension lacks in the WebUI's Python. Never fails, says little.

    Returns:
        0, always: the WebUI prints a stack trace for anything else.
    """
    try:
        if importlib.util.find_spec("launch") is None:
            print("To try onediff-ext without a WebUI: python install.py demo")
            return 0
        missing = [name for name in HOST_REQUIREMENTS if importlib.util.find_spec(name) is None]
        if missing:
            _install_in_host(missing)
    except (Exception, SystemExit) as exc:
        reason = (str(exc).strip() or type(exc).__name__).splitlines()[0]
        print(f"onediff-ext: could not install what it needs, so it will stay off: {reason}")
    return 0


def _install_in_host(names: list[str]) -> None:
    import launch  # the WebUI's own; on its PYTHONPATH while it installs extensions

    for name in names:
        if not launch.is_installed(name):
            # --no-deps: nothing else of the WebUI's may change, its torch least of all.
            launch.run_pip(f'install --no-deps "{HOST_REQUIREMENTS[name]}"', f"onediff-ext: {name}")


# ------------------------------------------------------- an environment of our own


def check_python(version: tuple[int, int]) -> None:
    """Raise SetUpError unless PyTorch and this project support this Python."""
    oldest, newest = SUPPORTED
    if oldest <= version <= newest:
        return
    names = [f"python{oldest[0]}.{minor}" for minor in range(newest[1], oldest[1] - 1, -1)]
    found = next((name for name in names if shutil.which(name)), None)
    example = found or (f"py -{newest[0]}.{newest[1]}" if os.name == "nt" else names[0])
    raise SetUpError(
        f"this is Python {_dotted(version)}; {_dotted(oldest)} to {_dotted(newest)} are supported.",
        f"Run it with {'' if found else 'an installed '}one of these, "
        f"for example: {example} install.py demo",
    )


def find_python(version: tuple[int, int]) -> Path:
    """Find an interpreter of this version: on the PATH, by Windows' launcher, among pyenv's.

    Raises:
        SetUpError: There is none.
    """
    name = _dotted(version)
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    candidates = [[found] for n in (f"python{name}", "python3") if (found := shutil.which(n))]
    if os.name == "nt":
        candidates.append(["py", f"-{name}"])
    for folder in sorted(pyenv.glob(f"versions/{name}*"), reverse=True):
        candidates.append([str(folder / "bin" / "python")])
    script = "import sys; print('%d.%d' % sys.version_info[:2]); print(sys.executable)"
    for candidate in candidates:
        with contextlib.suppress(OSError, subprocess.TimeoutExpired):
            answer = subprocess.run(
                [*candidate, "-I", "-c", script], capture_output=True, text=True, timeout=60
            )
            found, _, executable = answer.stdout.strip().partition("\n")
            if answer.returncode == 0 and found == name:
                return Path(executable)
    raise SetUpError(
        f"no Python {name} was found on the PATH or in {pyenv / 'versions'}.",
        f"Install one, for example: pyenv install {name}",
    )


def set_up(root: Path, extras: set[str], name: str = ".venv") -> Path:
    """Make sure that the environment ``root/name`` has the project with these extras installed.

    Args:
        root: Folder of the project.
        extras: Of pyproject.toml.
        name: Of the environment; an absolute path puts it elsewhere.

    Returns:
        Path of the environment's Python.

    Raises:
        SetUpError: It could not be set up.
    """
    venv = root / name
    check_path(venv)
    python = venv_python(venv)
    digest = set_up_digest(root)
    if extras <= installed_extras(venv, digest) and python.exists():
        return python
    state = root / f"{name}-setup"  # outside, so that it survives a recreated environment
    state.mkdir(parents=True, exist_ok=True)
    with only_one(state / "lock") as lock:
        present = installed_extras(venv, digest)
        if extras <= present and python.exists():
            return python  # another run has just done it
        _stamp(venv).unlink(missing_ok=True)
        unfinished, log = state / "unfinished", state / "pip.log"
        say(f"Setting up {venv} for Python {_dotted(sys.version_info[:2])}; once only.")
        if unfinished.exists() or not is_healthy(python):
            if not unfinished.exists():
                check_place(venv)
            # Before anything is made: what a killed set-up leaves is then known to be its own.
            unfinished.touch()
            make_venv(venv, lock)
        unfinished.touch()
        log.write_bytes(b"")
        torch, index_arguments, note = torch_choice()
        arguments = [*index_arguments, *_pip_arguments()]
        if note:
            say(f"  {torch}: {note}")
        what = f"{torch} (up to 3 GB: 2 to 15 minutes)"
        _pip_install(root, python, log, what, [torch, *arguments], lock)
        wanted = ",".join(sorted(present | extras))
        # torch once more: its version must not change to please another package.
        what = f"onediff-ext[{wanted}]"
        packages = ["-e", f".[{wanted}]", torch]
        _pip_install(root, python, log, what, [*packages, *arguments], lock)
        unfinished.unlink()
        stamp = json.dumps({"digest": digest, "extras": wanted.split(",")})
        _stamp(venv).write_text(stamp, encoding="utf-8")
        return python


def set_up_digest(root: Path) -> str:
    """Digest of all that decides what is installed: when it changes, pip runs again."""
    parts = {
        "pyproject": (root / "pyproject.toml").read_text(encoding="utf-8"),
        "root": str(root),
        "python": _dotted(sys.version_info[:2]),
        "torch": torch_choice()[0],
        "pip": _pip_arguments(),
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def installed_extras(venv: Path, digest: str) -> set[str]:
    """Extras that a finished set-up with this digest has installed; else none."""
    try:
        stamp = json.loads(_stamp(venv).read_text(encoding="utf-8"))
        return set(stamp["extras"]) if stamp["digest"] == digest else set()
    except (OSError, ValueError, KeyError, TypeError):
        return set()


def torch_choice() -> tuple[str, list[str], str]:
    """Which torch to install.

    Returns:
        (pip requirement, pip arguments that find it, what to tell the user).
    """
    chosen = os.environ.get("ONEDIFF_TORCH", "").strip()
    if chosen:
        return chosen, [], "as ONEDIFF_TORCH says"
    has_nvidia = shutil.which("nvidia-smi") is not None
    if os.name == "nt" and has_nvidia:
        # PyPI's builds for Windows are for the CPU only.
        note = f"the build for NVIDIA GPUs, from {WINDOWS_CUDA_INDEX}"
        return TESTED_TORCH, ["--extra-index-url", WINDOWS_CUDA_INDEX], note
    if sys.platform == "linux" and not has_nvidia and not _pip_arguments():
        note = (
            "no NVIDIA GPU found, so the smaller CPU build would do: "
            f'ONEDIFF_PIP_ARGS="--extra-index-url {CPU_INDEX}", beside the index that pip uses'
        )
        return TESTED_TORCH, [], note
    return TESTED_TORCH, [], ""


def venv_python(venv: Path, windows: bool = os.name == "nt") -> Path:
    """Path of a virtual environment's Python."""
    return venv / "Scripts" / "python.exe" if windows else venv / "bin" / "python"


def is_healthy(python: Path) -> bool:
    """Whether an environment's Python runs, has pip, and is the version that runs this file."""
    script = "import sys, pip; print('%d.%d' % sys.version_info[:2])"
    try:
        answer = subprocess.run(
            [str(python), "-I", "-c", script], capture_output=True, text=True, timeout=60
        )
    except (OSError, subprocess.TimeoutExpired):
        return False
    return answer.returncode == 0 and answer.stdout.strip() == _dotted(sys.version_info[:2])


def check_path(venv: Path) -> None:
    """Raise SetUpError where an environment cannot lie, before gigabytes are installed there.

    setuptools takes ``$name`` and ``{name}`` in an environment's path for variables.
    """
    try:
        path_variables(venv)
    except ValueError:
        raise SetUpError(
            f"an environment cannot be made at {venv}: its path has braces that do not match.",
            "Move this folder to a path without { and }.",
        ) from None


def path_variables(venv: Path) -> dict[str, str]:
    """What setuptools takes for variables in a path, each standing for itself.

    Raises:
        ValueError: It could not make anything of the path.
    """
    braced = re.sub(r"\$([a-zA-Z_][a-zA-Z_0-9]*)", r"{\1}", str(venv))
    names = [field for _, field, _, _ in string.Formatter().parse(braced) if field is not None]
    if not all(name.isidentifier() for name in names):
        raise ValueError(braced)
    return {name: f"${name}" for name in names}


def check_place(venv: Path) -> None:
    """Raise SetUpError when something that is no environment is in the way.

    Empty folders are not: an environment that is being made begins with some.
    """
    is_folder = venv.is_dir() and not (venv / "pyvenv.cfg").exists()
    holds_files = is_folder and any(not path.is_dir() for path in venv.rglob("*"))
    if holds_files or (venv.exists() and not venv.is_dir()):
        raise SetUpError(
            f"{venv} is in the way: it is no virtual environment.",
            "Move it elsewhere, then run the same command again.",
        )


def make_venv(venv: Path, lock: int | None = None) -> None:
    """Make an empty environment, in place of one that is broken or of another Python.

    Args:
        venv: Where; what is there is deleted.
        lock: A descriptor that the process which makes it keeps open.

    Raises:
        SetUpError: This Python cannot.
    """
    for name in ("venv", "ensurepip"):
        if importlib.util.find_spec(name) is None:
            package = f"python{_dotted(sys.version_info[:2])}-venv"
            raise SetUpError(
                f"this Python lacks its standard module {name}.",
                f"On Debian and Ubuntu: sudo apt install {package}. "
                "Elsewhere, use Python from python.org.",
            )
    # The base interpreter: the running one may itself lie in an environment, even in this one.
    base = getattr(sys, "_base_executable", None) or sys.executable
    command = [base, "-I", "-m", "venv", "--clear", str(venv)]
    done = subprocess.run(
        command, capture_output=True, text=True, env=clean_environment(), **_keeping(lock)
    )
    if done.returncode:
        printed = done.stdout + done.stderr
        raise SetUpError(
            f"{base} could not make {venv}:\n{_last_lines(printed)}",
            _DISK_FULL
            if "No space left" in printed
            else "Put that right, or use another Python, then run the same command again.",
        )


def _pip_install(
    root: Path, python: Path, log: Path, what: str, arguments: list[str], lock: int
) -> None:
    start = time.monotonic()
    say(f"  installing {what}")
    command = [str(python), "-I", "-m", "pip", "install", "--progress-bar", "off", *arguments]
    with log.open("ab") as output:
        offset = output.tell()
        process = subprocess.Popen(
            command,
            cwd=root,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**path_variables(python.parent.parent), **clean_environment()},
            **_keeping(lock),
        )
        try:
            status = _wait_showing_time(process, start)
        except BaseException:
            process.terminate()
            process.wait()
            raise
    if status:
        printed = log.read_bytes()[offset:].decode(errors="replace")
        if "Installing collected packages" not in printed:  # nothing is half installed
            (log.parent / "unfinished").unlink(missing_ok=True)
        raise SetUpError(f"pip failed:\n{_last_lines(printed)}", pip_hint(printed, log))
    say(f"  done in {time.monotonic() - start:.0f} s")


def pip_hint(printed: str, log: Path) -> str:
    """What the user does next, given what a failed pip printed."""
    if "No space left on device" in printed or "not enough space on the disk" in printed:
        return _DISK_FULL
    if any(sign in printed for sign in _NO_NETWORK):
        return (
            "The package index could not be reached: check the network (HTTPS_PROXY for a "
            "proxy, ONEDIFF_PIP_ARGS for a mirror), then run the same command again."
        )
    if "ResolutionImpossible" in printed:
        return (
            "These versions exclude each other: ONEDIFF_TORCH must lie in pyproject.toml's range."
        )
    if "No matching distribution found" in printed:
        return (
            f"There is no such package for Python {_dotted(sys.version_info[:2])} on this "
            "machine: try another 64-bit Python of 3.10 to 3.13, or another ONEDIFF_TORCH."
        )
    return f"All that pip said is in {log}. The same command tries again."


@contextlib.contextmanager
def only_one(path: Path):
    """Hold the lock at a path; wait, and say so, while another process holds it.

    Yields the lock's file descriptor.
    """
    with path.open("a+b") as lock:
        waiting = False
        while not _try_lock(lock.fileno()):
            if not waiting:
                say("Another set-up is running here; waiting for it.")
            waiting = True
            time.sleep(0.3)
        yield lock.fileno()  # closing the file gives the lock back, as the process's end would


def _keeping(lock: int | None) -> dict[str, tuple[int, ...]]:
    """Arguments of a child process that holds the lock as well.

    When this process is killed, the child goes on, and the next set-up waits for it.
    """
    return {} if lock is None or os.name == "nt" else {"pass_fds": (lock,)}


def _try_lock(descriptor: int) -> bool:
    try:
        try:
            import fcntl
        except ImportError:  # Windows
            import msvcrt

            os.lseek(descriptor, 0, os.SEEK_SET)
            msvcrt.locking(descriptor, msvcrt.LK_NBLCK, 1)
        else:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as exc:
        if exc.errno in (errno.EACCES, errno.EAGAIN, errno.EDEADLK):
            return False
        raise
    return True


# ------------------------------------------------------------------------- the rest


def hand_over(command: list[str]) -> int:
    """Run a command as if it had been started in our place.

    Returns:
        Its exit status, on Windows; elsewhere it takes over this process.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    if os.name != "nt":
        os.execve(command[0], command, clean_environment())
    with subprocess.Popen(command, env=clean_environment()) as process:
        while True:
            try:
                return process.wait()
            except KeyboardInterrupt:
                continue  # the command got it too; how it ends is its own affair


def clean_environment() -> dict[str, str]:
    """The process's environment without what would lead out of .venv."""
    environment = {name: value for name, value in os.environ.items() if name not in _LEADING_OUT}
    return {**environment, "PIP_DISABLE_PIP_VERSION_CHECK": "1", "PIP_NO_INPUT": "1"}


def say(line: str) -> None:
    """Print a line about set-up, apart from what the command prints."""
    print(line, file=sys.stderr, flush=True)


def _wait_showing_time(process: subprocess.Popen[bytes], start: float) -> int:
    while True:
        try:
            status = process.wait(timeout=1)
        except subprocess.TimeoutExpired:
            if sys.stderr.isatty():
                print(f"\r  {time.monotonic() - start:.0f} s", end="", file=sys.stderr, flush=True)
            continue
        if sys.stderr.isatty():
            print("\r", end="", file=sys.stderr)
        return status


def _hint_for(exc: OSError) -> str:
    if exc.errno == errno.ENOSPC:
        return _DISK_FULL
    if exc.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return f"Move this folder to where you may write: {ROOT}"
    return "Put that right, then run the same command again."


def _stamp(venv: Path) -> Path:
    return venv / "onediff-setup.json"


def _pip_arguments() -> list[str]:
    # Windows paths keep their backslashes only outside POSIX mode, which leaves quotes on.
    text = os.environ.get("ONEDIFF_PIP_ARGS", "")
    try:
        words = shlex.split(text, posix=os.name != "nt")
    except ValueError as exc:
        raise SetUpError(
            f"ONEDIFF_PIP_ARGS cannot be read ({exc}): {text!r}",
            "Close each quotation mark, and write a backslash twice.",
        ) from None
    return [word.strip("\"'") for word in words]


def _last_lines(text: str, count: int = 12) -> str:
    lines = [line.rstrip() for line in text.splitlines() if line.strip()]
    return "\n".join(f"  {line[:300]}" for line in lines[-count:])


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
