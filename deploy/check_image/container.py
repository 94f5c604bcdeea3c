"""A container of an image, without an engine: ``docker run --read-only --tmpfs /tmp --cap-drop ALL --volume ...``.

Its files, processes and rights are its own, the network is this machine's.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from deploy.check_image.builder import Image

_MOUNTS = """set -e
mount --make-rprivate /
mount --bind "$0" "$0"
mount -o remount,ro,bind "$0"
mount -t proc proc "$0/proc"
mount -t tmpfs -o mode=755,nosuid dev "$0/dev"
for device in null zero full random urandom tty; do
  touch "$0/dev/$device"; mount --bind "/dev/$device" "$0/dev/$device"
done
mkdir "$0/dev/shm"; mount -t tmpfs -o mode=1777,nosuid,nodev,noexec,size=64m shm "$0/dev/shm"
ln -s /proc/self/fd "$0/dev/fd"
mount -t tmpfs -o mode=1777,nosuid,nodev,noexec,size=64m tmp "$0/tmp"
"""


class Container:
    """A running container; its first process is that of the image's entrypoint."""

    def __init__(
        self, image: Image, volumes: Mapping[str, Path], settings: Mapping[str, str], arguments: Sequence[str] = ()
    ) -> None:
        """``volumes``: folders of this machine by their place in there. ``settings``: environment variables.
        ``arguments`` stand in for the image's command."""
        self._image = image
        self._name = Path(image.entrypoint[0]).name[:15]  # of the first process once everything is mounted
        self._environment = {**image.environment, **settings}
        script = _MOUNTS + "".join(f'mount --bind "{outer}" "$0{inner}"\n' for inner, outer in volumes.items())
        script += 'exec chroot "$0" "$@"'
        command = self._as_user([*image.entrypoint, *(arguments or image.command)])
        unshare = ["unshare", "--mount", "--pid", "--fork", "--kill-child", "sh", "-c", script, str(image.root)]
        self._unshare = subprocess.Popen([*unshare, *command], stdin=subprocess.DEVNULL)

    def run(self, command: Sequence[str]) -> subprocess.CompletedProcess[str]:
        """``docker exec``: a command beside the first process."""
        enter = ["nsenter", "--target", str(self.pid), "--mount", "--pid", "--root"]
        return subprocess.run([*enter, *self._as_user(command)], capture_output=True, text=True, check=False)

    @property
    def pid(self) -> int:
        """That of the first process once it runs, as this machine counts. Raises RuntimeError when it has ended."""
        pid = self._unshare.pid
        while self._unshare.poll() is None:
            children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
            with suppress(OSError):  # it has just ended
                if children and Path(f"/proc/{children[0]}/comm").read_text().strip() == self._name:
                    return int(children[0])
            time.sleep(0.01)
        raise RuntimeError(f"the container ended with status {self._unshare.returncode}")

    def wait(self, seconds: float) -> int:
        """The exit status. Raises TimeoutExpired."""
        return self._unshare.wait(seconds)

    def signal(self) -> None:
        """Tell the first process to stop, as the image wants to be told."""
        subprocess.run(["kill", "-s", signal.Signals[self._image.stop_signal].name[3:], str(self.pid)], check=True)

    def kill(self) -> None:
        """End it, whatever it does."""
        with suppress(RuntimeError):
            os.kill(self.pid, signal.SIGKILL)  # all other processes of the container go with the first one
        self._unshare.wait()

    def _as_user(self, command: Sequence[str]) -> list[str]:
        user, _, group = self._image.user.partition(":")
        rights = ["--clear-groups", "--no-new-privs", "--inh-caps=-all", "--bounding-set=-all"]
        pairs = [f"{name}={value}" for name, value in self._environment.items()]
        return [
            *["setpriv", f"--reuid={user}", f"--regid={group or user}", *rights],
            *["env", "-i", "-C", self._image.folder, *pairs, *command],
        ]
