"""Commands that only ask another program to start something elsewhere: refused, whatever they stand behind."""

from __future__ import annotations

import shlex

import pytest

from gpuckpt import errors
from gpuckpt.supervisor.clients import client_in, refuse

CLIENTS = """
docker run x
/usr/bin/docker compose up
docker-compose up
podman run x
nerdctl run x
kubectl run x
ssh host vllm serve m
sudo docker run x
sudo -E -u bob docker run x
sudo -ubob A=b -- podman run x
sudo -iu root docker run x
doas -u root docker run x
env A=b docker run x
env -i -u X -C / A=b docker run x
env -S 'docker run' x
env --split-string='-i docker run' x
nice docker run x
nice -n 5 docker run x
nice -5 docker run x
ionice -c2 -n0 docker run x
timeout 10 docker run x
timeout -s KILL -k 5 10m sudo nice docker run x
timeout --signal=KILL --kill-after 5 10m docker run x
nohup setsid stdbuf -oL docker run x
taskset -c 0 docker run x
chrt -f 1 docker run x
numactl -N 0 --membind 0 docker run x
tini -- docker run x
sh -c 'docker run x'
bash -lc 'cd /x && exec docker compose up'
sh -c 'set -e
A=1 exec sudo docker run x'
"""

PROGRAMS = """
vllm serve docker
python train.py docker
./docker.py
sudo -u docker vllm serve m
sudo -g docker vllm serve m
env DOCKER=docker vllm serve m
nice -n docker
timeout 10 vllm serve docker
timeout 10
sudo
env
sh
sh -c
sh -c 'docker pull x; vllm serve m'
sh -c 'docker pull x
vllm serve m'
sh -c "echo it's"
sh start.sh docker
sh -x start.sh -c docker
"""


def commands(text: str) -> list[list[str]]:
    found: list[list[str]] = []
    line = ""
    for piece in text.strip().splitlines():
        line = f"{line}\n{piece}" if line else piece
        if line.count("'") % 2 == 0 or '"' in line:
            found.append(shlex.split(line))
            line = ""
    return found


def test_a_client_is_refused_whatever_it_stands_behind() -> None:
    made = commands(CLIENTS)
    assert len(made) > 30
    for command in made:
        assert client_in(command), command
        with pytest.raises(errors.Usage, match="what runs here is only its client; nothing was started") as refused:
            refuse(command)
        assert "run gpuckpt inside: " in refused.value.hint
    assert client_in(["docker", "compose", "up"]) == "docker compose"
    assert client_in(["sudo", "docker", "run"]) == "docker"


def test_what_only_looks_like_one_is_not() -> None:
    made = commands(PROGRAMS)
    assert len(made) > 15
    for command in [*made, []]:
        refuse(command)
