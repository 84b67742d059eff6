"""First process (pid 1) of a stand-in host: makes it look like one, then lives as long as its standard input.

Run by hosts.py as `python -I -S host_init.py NAME HOSTS_FILE_TEXT`, in fresh namespaces. When it ends, the kernel ends
every other process of the host.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import uuid
from pathlib import Path

#: the host's own memory-backed folder, and the folder for temporary files in it.
SHARED_MEMORY = "/dev/shm"
TEMPORARY = SHARED_MEMORY + "/tmp"


def furnish(name: str, hosts_file: str) -> None:
    """Host name, shared memory, /sys of its own network, boot id, names of all hosts."""
    Path("/proc/sys/kernel/hostname").write_text(name)
    # Mounts made here must not reach the machine's own mount namespace.
    _run("mount", "--make-rprivate", "/")
    _run("mount", "-t", "tmpfs", "-o", "mode=1777,size=4g", "tmpfs", SHARED_MEMORY)
    keep = Path(SHARED_MEMORY, "cgroup")
    keep.mkdir()
    _run("mount", "--rbind", "/sys/fs/cgroup", str(keep))
    _run("mount", "-t", "sysfs", "sysfs", "/sys")
    _run("mount", "--move", str(keep), "/sys/fs/cgroup")
    keep.rmdir()
    _replace("/proc/sys/kernel/random/boot_id", f"{uuid.uuid4()}\n")
    _replace("/etc/hosts", hosts_file)
    _run("ip", "link", "set", "lo", "up")
    Path(TEMPORARY).mkdir(mode=0o1777)


def reap(*_: object) -> None:
    """Collects orphans, as the first process of a system must."""
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        return


def main() -> int:
    try:
        furnish(*sys.argv[1:])
    except (OSError, subprocess.CalledProcessError) as error:
        print(error, getattr(error, "stderr", ""), file=sys.stderr, flush=True)
        return 1
    signal.signal(signal.SIGCHLD, reap)
    print("ready", flush=True)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    while os.read(0, 4096):
        pass
    return 0


def _replace(path: str, text: str) -> None:
    """Mounts a file with `text` over `path`."""
    source = Path(SHARED_MEMORY, "file")
    source.write_text(text)
    _run("mount", "--bind", str(source), path)
    source.unlink()  # the mount keeps it


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True, stdin=subprocess.DEVNULL)


if __name__ == "__main__":
    sys.exit(main())
