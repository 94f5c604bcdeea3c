"""The parts of ``--help`` besides single flags: groups, examples, files, environment and exit statuses."""

from __future__ import annotations

# The groups of flags, by the names of their fields, in the order of the help.
GROUPS: dict[str, tuple[str, ...]] = {
    "network and clients": (
        "host",
        "port",
        "api_key",
        "key_file",
        "allowed_host",
        "allow_origin",
        "media_domains",
        "unknown_fields",
        "ollama",
        "sharing",
        "client_seconds",
    ),
    "several models": ("also", "models", "max_models", "models_memory", "idle_unload"),
    "the model": (
        "device",
        "dtype",
        "weights",
        "activations",
        "tensor_parallel",
        "speculate",
        "draft_model",
        "served_model_name",
        "model_alias",
        "model_names",
        "adapter",
        "adapter_folder",
        "max_context",
        "response_template",
        "prompt_rules",
        "generation_config",
        "thinking_budget",
        "thinking_budget_message",
    ),
    "session log": ("data_dir", "database", "durability", "line_seconds", "max_capsule"),
    "KV tiers, fastest first": (
        "kv_memory",
        "host_memory",
        "disk_space",
        "disk_floor",
        "packed_space",
        "remote",
        "remote_space",
        "kv_dtype",
        "kv_at_rest",
        "tenant_share",
    ),
    "load": ("max_running", "max_step_tokens", "max_queued", "drain_seconds"),
    "logs and metrics": ("log_format", "log_level", "metrics_compat"),
}

PROGRAM = """\
Each command has its own help: warmturn COMMAND --help.

examples:
  warmturn serve                        the bundled demo model on port 8000
  warmturn chat                         a chat with it, in another terminal
  warmturn connect claude               prints settings for Claude Code
  warmturn doctor org/model             checks whether that model runs here
  warmturn bench                        measures the speed of this machine

exit status:
  0  success
  1  a server refused the request, or it could not be completed
  2  the command line or the environment is wrong; one line says where

Every flag is also an environment variable, which its help names: WARMTURN_...
for serve, cluster and doctor, WARMTURN_CHAT_... for chat, sessions and
connect, WARMTURN_BENCH_... for bench. A flag overrides its variable.
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
  HF_HOME, HF_TOKEN, HF_HUB_OFFLINE   folder of hub models, token for those
                                      that need one, 1: no network
  OMP_NUM_THREADS                     compute threads on a CPU
  CUDA_VISIBLE_DEVICES                GPUs that may be used
  CXX                                 compiler of the CPU kernels
  XDG_CACHE_HOME, TILE_CACHE_DIR      folder of the compiled kernels, folder of
                                      packed weights that are kept (its tiles)
  OTEL_EXPORTER_OTLP_ENDPOINT, ...    collector of traces, with the extra otel

files in --data-dir:
  log.sqlite   the session log: back this up
  kv/          KV cache on disk: can be deleted while the server is stopped
  verdicts/    measurements of models, so that restarts give equal results

signals:
  SIGTERM, SIGINT   stop: running turns finish, KV is written; a second one
                    stops at once and loses no committed turn

exit status:
  0  stopped by a signal
  2  it cannot serve: one line on standard error says why; run warmturn doctor
     with the same arguments for more
"""

CHAT = """\
keys:
  Enter    send
  Alt-Enter, Ctrl-J, or a \\ at the end of a line
           begin another line; a pasted text keeps its lines
  Ctrl-C   stop the reply and keep it; twice: drop the turn
  Ctrl-D   leave; the session stays, --session continues it

commands: /help lists them (new, list, open, fork, undo, edit, retry, save,
system, set, stats, quit).

With a MESSAGE, or with text through a pipe, the reply alone goes to standard
output. The lines that were typed are kept in ~/.local/state/warmturn.

examples:
  warmturn chat
  warmturn chat --session alice --system "Answer in one sentence."
  warmturn chat --url http://10.0.0.7:8000 --api-key secret1
  git diff | warmturn chat "Review this."

exit status:
  0  left with /quit or Ctrl-D, or the message was answered
  1  the message was not answered; one line on standard error says why
  2  no server answers, or it refuses the key
"""

SESSIONS = """\
Each verb has its own help: warmturn sessions VERB --help.

examples:
  warmturn sessions list --metadata team=a
  warmturn sessions show alice
  warmturn sessions fork alice --id alice-2 --turn 1
  warmturn sessions export alice alice.zip

exit status:
  0  success
  1  the server refused; one line on standard error says why
  2  the command line is wrong, or no server answers
"""

VERB = """\
exit status: 0 success, 1 the server refused, 2 wrong command or no server.
"""

KEYS = """\
A new key is printed once; the file has its digest only. Servers that run with
--key-file read the file again within a second.

examples:
  warmturn keys add ann --key-file keys.json --requests-per-minute 60
  warmturn keys list --key-file keys.json
  warmturn keys revoke ann --key-file keys.json

exit status:
  0  success
  1  there is no such key
  2  the command line is wrong, or the file cannot be read or written
"""

CONNECT = """\
Without CLIENT the known clients are listed. Model name and context length are
the server's. --write adds to files that have other settings too, and never
changes these.

examples:
  warmturn connect
  warmturn connect claude
  warmturn connect codex --write --url http://10.0.0.7:8000 --api-key secret1

exit status:
  0  printed or written
  1  a file could not be written; one line on standard error says why
  2  the command line is wrong, or no server answers
"""

CLUSTER = """\
It takes every flag and variable of warmturn serve, for each of its servers, and
needs the extra ray. docs/cluster.md explains how the servers share sessions.

examples:
  warmturn cluster --replicas 2
  warmturn cluster org/model --replicas 2 --max-replicas 4
  warmturn cluster --database postgresql://host/log --remote s3://bucket/kv

exit status:
  0  stopped by a signal, or deployed to the Ray cluster of --ray-address
  2  it cannot serve: one line on standard error says why
"""

DOCTOR = """\
It takes every flag and variable of warmturn serve and checks what a server
started with them would find. Each line is ok, a warning (it runs, but not as
well as it could) or a fault (it does not run), with what to do.

A MODEL is loaded and measured in a separate engine without a disk tier. If a
server is running already, this needs the same memory again. Only compiled
kernels and digests of files are kept; the file that measures the disk is
removed. Every check has a time limit, and a check that reaches it is reported.

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
the load leaves it out and the report says so.

CPU seconds are those of the server's whole process tree, for a server on this
Linux machine. On a shared machine compare these and not wall time.

examples:
  warmturn bench
  warmturn bench org/model --sessions 1,8 --history 1000,4000
  warmturn bench org/model -- --device cpu --dtype bfloat16
  warmturn bench http://127.0.0.1:8001/v1 --api-key secret1 --out peer.md

exit status:
  0  every turn was answered
  1  some were not, or there was no server
  2  the command line or the environment is wrong
"""

ENDS = {
    "serve": SERVE,
    "chat": CHAT,
    "sessions": SESSIONS,
    "connect": CONNECT,
    "keys": KEYS,
    "cluster": CLUSTER,
    "doctor": DOCTOR,
    "bench": BENCH,
}


def group(name: str) -> str | None:
    """The title under which a field of `warmturn serve` is shown; None for one of no group."""
    return next((title for title, names in GROUPS.items() if name in names), None)


def place(name: str) -> int:
    """Where a field stands among others: in the order of the groups, and what is in none before them."""
    order = [field for names in GROUPS.values() for field in names]
    return order.index(name) if name in order else -1
