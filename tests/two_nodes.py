"""Two nodes on one machine: a command runs on node-a, and node-b is reached by ssh.

    python tests/two_nodes.py FOLDER COMMAND [ARGUMENT ...]

Each node is a network, a hostname, a /dev/shm and an ssh server of its own (Linux namespaces).
Files are shared, as on a cluster, but for FOLDER/not_shared, where each node sees its own.  Keys
and settings of ssh are made in FOLDER.  Nothing of the machine changes, and nothing is left when
the command ends.  Needs root, sshd, pdsh and iproute2.
"""

import os
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path

ADDRESSES = {"node-a": "10.213.77.1", "node-b": "10.213.77.2"}
SSH_CONFIG = """\
Host node-a node-b
    IdentityFile {folder}/key
    UserKnownHostsFile /dev/null
    StrictHostKeyChecking no
    LogLevel ERROR
"""
SSHD_CONFIG = """\
HostKey {folder}/key
AuthorizedKeysFile {folder}/key.pub
PermitRootLogin yes
StrictModes no
UsePAM no
PidFile none
"""


def why_not():
    """Return what this machine lacks for two nodes, None if nothing."""
    if os.geteuid():
        return "needs root"
    missing = [tool for tool in ("unshare", "ip", "ssh-keygen", "sshd", "pdsh") if not which(tool)]
    if missing:
        return f"needs {', '.join(missing)}"
    if subprocess.run(["unshare", "--mount", "--uts", "--net", "true"]).returncode:
        return "needs the right to make namespaces"
    return None


def which(tool):
    return shutil.which(tool, path=os.environ.get("PATH", "") + ":/usr/sbin:/sbin")


def run(*command):
    subprocess.run(list(map(str, command)), check=True)


def command_on_two_nodes(folder, command):
    """Return the command line that runs `command` on node-a beside a node-b."""
    separate = ["unshare", "--mount", "--uts", "--net", "--pid", "--fork", "--mount-proc",
                "--kill-child"]
    return [*separate, sys.executable, __file__, str(folder), *map(str, command)]


def write_settings(folder):
    """Write the key that opens both nodes, and the settings of ssh, into the folder."""
    (folder / "not_shared").mkdir()
    run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", folder / "key")
    (folder / "ssh_config").write_text(SSH_CONFIG.format(folder=folder))
    (folder / "sshd_config").write_text(SSHD_CONFIG.format(folder=folder))
    lines = ["127.0.0.1 localhost", *(f"{address} {name}" for name, address in ADDRESSES.items())]
    (folder / "hosts").write_text("\n".join(lines) + "\n")
    (folder / "hostfile").write_text("node-a slots=2\nnode-b slots=2\n")


def become(name, folder, device):
    """Give this process's namespaces the name, address, private folders and server of a node."""
    socket.sethostname(name)
    run("mount", "--bind", folder / "hosts", "/etc/hosts")
    run("mount", "--bind", folder / "ssh_config", "/etc/ssh/ssh_config")
    for private in ("/dev/shm", "/run", folder / "not_shared"):
        run("mount", "-t", "tmpfs", "none", private)
    Path("/run/sshd").mkdir()
    run("ip", "link", "set", "lo", "up")
    run("ip", "address", "add", f"{ADDRESSES[name]}/24", "dev", device)
    run("ip", "link", "set", device, "up")
    return subprocess.Popen([which("sshd"), "-D", "-f", folder / "sshd_config"],
                            stdin=subprocess.DEVNULL)


def be_node_b(folder):
    """Serve ssh on node-b until the other node ends."""
    print("separate", flush=True)  # now node-a can move the end of the cable here
    sys.stdin.readline()
    server = become("node-b", folder, "to-a")
    print("ready", flush=True)
    server.wait()


def be_node_a(folder, command):
    write_settings(folder)
    node_b = subprocess.Popen(
        ["unshare", "--mount", "--uts", "--net", sys.executable, __file__, folder],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    node_b.stdout.readline()
    run("ip", "link", "add", "to-b", "type", "veth", "peer", "name", "to-a", "netns", node_b.pid)
    become("node-a", folder, "to-b")
    node_b.stdin.write("\n")
    node_b.stdin.flush()
    node_b.stdout.readline()
    return subprocess.run(command).returncode


def main(folder, *command):
    folder = Path(folder)
    if not command:
        be_node_b(folder)
        return
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    sys.exit(be_node_a(folder, command))


if __name__ == "__main__":
    main(*sys.argv[1:])
