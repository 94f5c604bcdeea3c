"""What ``--help`` tells beyond single flags: how they are grouped, examples, files, environment and exit statuses."""

from __future__ import annotations

# Which flags stand together, by the names of their fields, in the order in which they are shown.
GROUPS: dict[str, tuple[str, ...]] = {
    "where it listens": ("host", "port", "api_key", "allowed_host", "allow_origin", "unknown_fields", "client_seconds"),
    "the model": (
        "device",
        "dtype",
        "tensor_parallel",
        "served_model_name",
        "max_context",
        "response_template",
        "generation_config",
    ),
    "the log of sessions": ("data_dir", "database", "durability", "max_capsule"),
    "where KV lies, fastest first": (
        "kv_memory",
        "host_memory",
        "disk_space",
        "disk_floor",
        "remote",
        "remote_space",
        "kv_at_rest",
        "tenant_share",
    ),
    "load": ("max_running", "max_step_tokens", "max_queued", "drain_seconds"),
    "what it tells of itself": ("log_format", "log_level", "metrics_compat"),
}

PROGRAM = """\
Each command has its own help: warmturn COMMAND --help.

examples:
  warmturn serve                        the bundled demo model on port 8000
  warmturn chat                         talk to it, in another terminal
  warmturn doctor org/model             would that model run here, and how well
  warmturn bench                        how fast is this machine

exit status:
  0  it is done
  1  a server refused it, or it could not be done in full
  2  the command line or the environment is wrong; one line says where

Every flag is also an environment variable, which its help names: WARMTURN_...
for serve, cluster and doctor, WARMTURN_CHAT_... for chat and sessions,
WARMTURN_BENCH_... for bench. A flag wins over its variable.
"""

SERVE = """\
units:
  BYTES    a number, or one with K, M, G, T (powers of 1000) or KiB, MiB, GiB,
           TiB (powers of 1024)
  SECONDS  also fractions: 0.5

examples:
  warmturn serve
  warmturn serve ./my-model --port 9000
  warmturn serve org/model --host 0.0.0.0 --api-key ann=secret1
  warmturn serve org/model --kv-memory 8GiB --disk-space 200GiB

environment besides the flags:
  HF_HOME, HF_TOKEN, HF_HUB_OFFLINE   where hub models are kept, the key for
                                      those that need one, 1: no network
  OMP_NUM_THREADS                     compute threads on a CPU
  CUDA_VISIBLE_DEVICES                which GPUs may be used
  CXX                                 the compiler of the CPU kernels
  OTEL_EXPORTER_OTLP_ENDPOINT, ...    where traces are sent, with the extra otel

files, below --data-dir:
  log.sqlite   the sessions: back this up
  kv/          KV cache on disk: may be lost at any time
  verdicts/    what was measured of models, so that restarts compute alike

signals:
  SIGTERM, SIGINT   end in order: running turns finish, KV is written; a
                    second one ends at once and loses no committed turn

exit status:
  0  told to end
  2  it cannot serve: one line on standard error says why; warmturn doctor
     with the same arguments looks further
"""

CHAT = """\
keys:
  Ctrl-C   stop the reply; what was said stays; twice: leave that turn out
  Ctrl-D   leave; the session stays, --session goes on with it

examples:
  warmturn chat
  warmturn chat --session alice --system "Answer in one sentence."
  warmturn chat --url http://10.0.0.7:8000 --api-key secret1

exit status:
  0  left with Ctrl-D, or at the end of the input
  2  no server answers, or it does not accept the key
"""

SESSIONS = """\
Each verb has its own help: warmturn sessions VERB --help.

examples:
  warmturn sessions list --metadata team=a
  warmturn sessions show alice
  warmturn sessions fork alice --id alice-2 --turn 1
  warmturn sessions export alice alice.zip

exit status:
  0  done
  1  the server refused; one line on standard error says why
  2  the command line is wrong, or no server answers
"""

VERB = """\
exit status: 0 done, 1 the server refused, 2 wrong command or no server.
"""

CLUSTER = """\
It takes every flag and variable of warmturn serve, for each of its servers, and
needs the extra ray. docs/cluster.md tells how the servers share sessions.

examples:
  warmturn cluster --replicas 2
  warmturn cluster org/model --replicas 2 --max-replicas 4
  warmturn cluster --database postgresql://host/log --remote s3://bucket/kv

exit status:
  0  told to end, or the Ray cluster of --ray-address was told
  2  it cannot serve: one line on standard error says why
"""

DOCTOR = """\
It takes every flag and variable of warmturn serve: put doctor where serve
stood, and what that server would meet is looked at. Each line is ok, a warning
(it runs, but not as it could) or a fault (it does not run), with what to do.

With a MODEL it is loaded and measured in an engine of its own, without a disk
tier; beside a server that runs already this takes as much memory once more.
Nothing stays behind but compiled kernels: the file that measures the disk is
removed. Every check has a time limit, and one that reaches it is told as such.

examples:
  warmturn doctor
  warmturn doctor org/model --data-dir /data --kv-memory 8GiB
  warmturn doctor --json

exit status:
  0  no fault
  1  at least one fault
  2  the command line or the environment is wrong
"""

BENCH = """\
The load: chats of random words (20 to 60 in, 32 to 96 tokens out a turn), the
whole history sent again each turn as OpenAI's clients do, at temperature 0; the
same for every server. --history adds turns of 16 words on long histories. Where
a server refuses ignore_eos, which makes replies equally long, or another field,
the load goes without it and the report says so.

CPU seconds are those of the server's whole process tree, for a server on this
Linux machine: on a shared machine compare them, not wall time.

examples:
  warmturn bench
  warmturn bench org/model --sessions 1,8 --history 1000,4000
  warmturn bench org/model -- --device cpu --dtype bfloat16
  warmturn bench http://127.0.0.1:8001/v1 --api-key secret1 --out peer.md

exit status:
  0  every turn was answered
  1  some were not, or no server was there to answer
  2  the command line or the environment is wrong
"""

ENDS = {"serve": SERVE, "chat": CHAT, "sessions": SESSIONS, "cluster": CLUSTER, "doctor": DOCTOR, "bench": BENCH}


def group(name: str) -> str | None:
    """The title under which a field of `warmturn serve` is shown; None for one of no group."""
    return next((title for title, names in GROUPS.items() if name in names), None)


def place(name: str) -> int:
    """Where a field stands among others: in the order of the groups, and what is in none before them."""
    order = [field for names in GROUPS.values() for field in names]
    return order.index(name) if name in order else -1
