"""The options of `warmturn serve`: name, type, unit, default and description of each.

The command line (``server.config.command_line``), the environment and ``--help`` are made from these fields.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Annotated, Literal

from pydantic import ByteSize, Field, field_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from server.config.option_types import (
    Adapters,
    ApiKeys,
    Count,
    Folder,
    GenerationSource,
    Hosts,
    JsonFile,
    Memory,
    Names,
    Origins,
    PromptRules,
    Seconds,
    StorageUrl,
)
from server.config.prompt_rules import PROMPT_RULES

DEMO = "demo"  # the name of the bundled model, on the command line and in requests
DEMO_FOLDER = Path(__file__).resolve().parents[1] / "demo"

PATH_LIKE = re.compile(r"[./~]")  # how a folder starts that cannot be a hub id


def default_data_dir() -> Path:
    """Where people's programs keep data: $XDG_DATA_HOME/warmturn, else ~/.local/share/warmturn."""
    base = os.environ.get("XDG_DATA_HOME", "")
    return (Path(base) if os.path.isabs(base) else Path.home() / ".local" / "share") / "warmturn"


class ServeConfig(BaseSettings):
    """`warmturn serve`. A value comes from its flag, else from the environment, else it is the default."""

    model_config = SettingsConfigDict(
        env_prefix="WARMTURN_", frozen=True, extra="forbid", hide_input_in_errors=True, protected_namespaces=()
    )

    model: str = Field(
        default=DEMO,
        min_length=1,
        description="hub id or folder of a causal model, several for several models; demo: the bundled one",
        json_schema_extra={"metavar": "MODEL", "positional": True, "several": True},
    )
    also: Names = Field(
        default=[],
        description="a further model behind the same port, repeatable (environment: a comma list); the same as a "
        "second MODEL",
        json_schema_extra={"metavar": "MODEL", "default": "none"},
    )
    models: Path | None = Field(
        default=None,
        description="a folder of models, or a TOML file of models with options of their own (docs/models.md)",
        json_schema_extra={"metavar": "PATH", "default": "none"},
    )
    max_models: Count | None = Field(
        default=None,
        description="models that are loaded at once; for another one the least recently used is unloaded",
        json_schema_extra={"metavar": "N", "default": "all, at most 4"},
    )
    models_memory: Memory | None = Field(
        default=None,
        description="memory of all loaded models together, weights and KV, in bytes",
        json_schema_extra={"metavar": "BYTES", "default": "nine tenths of the RAM; on a GPU what is free"},
    )
    idle_unload: Seconds = Field(
        default=0.0,
        description="unload a model that is idle for so long (90, 10m, 2h); its KV goes to disk; 0: never",
        json_schema_extra={"metavar": "TIME", "default": "0"},
    )
    host: str = Field(
        default="127.0.0.1", min_length=1, description="address to listen on; 0.0.0.0: all IPv4 interfaces"
    )
    port: int = Field(default=8000, ge=0, le=65535, description="TCP port; 0: any free one")
    api_key: ApiKeys = Field(
        default={},
        description="a tenant's name and its bearer key, repeatable (environment: a comma list); "
        "without keys everyone who reaches the port is served",
        json_schema_extra={"metavar": "NAME=KEY", "default": "none"},
    )
    key_file: Path | None = Field(
        default=None,
        description="file of further tenants, digests of their keys and their limits; `warmturn keys` writes it",
        json_schema_extra={"metavar": "FILE", "default": "none"},
    )
    data_dir: Path = Field(
        default_factory=default_data_dir,
        description="folder of the session log and of KV on disk; for one server at a time",
        json_schema_extra={"metavar": "DIR", "default": "$XDG_DATA_HOME/warmturn or ~/.local/share/warmturn"},
    )
    device: Literal["auto", "cpu", "cuda"] = Field(
        default="auto", description="where the model runs; auto: cuda if there is a GPU"
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        default="auto", description="type of the weights and the KV cache; auto: as the model was saved"
    )
    weights: Literal["auto", "int8", "int4"] = Field(
        default="auto", description="round the weights to so many bits, on a CPU; auto: as the checkpoint has them"
    )
    activations: Literal["auto", "int8"] = Field(default="auto", description="inputs of products with packed weights")
    served_model_name: str | None = Field(
        default=None,
        min_length=1,
        description="model name in the API",
        json_schema_extra={"metavar": "NAME", "default": "the hub id or the folder's name"},
    )
    model_alias: Names = Field(
        default=[],
        description="another name of the model in the API, repeatable (environment: a comma list)",
        json_schema_extra={"metavar": "NAME", "default": "none"},
    )
    adapter: Adapters = Field(
        default={},
        description="a LoRA adapter of MODEL, in a folder as peft saves it, under a name of its own for requests, "
        "repeatable (environment: a comma list)",
        json_schema_extra={"metavar": "NAME=PATH", "default": "none"},
    )
    adapter_folder: Folder | None = Field(
        default=None,
        description="folder below which POST /v1/load_lora_adapter may load adapters; none: it loads none",
        json_schema_extra={"metavar": "DIR", "default": "none"},
    )
    model_names: Literal["any", "served"] = Field(
        default="any",
        description="which names requests may use for the model: any; served: its own and its aliases, others get 404",
    )
    ollama: Literal["on", "off"] = Field(
        default="on", description="serve Ollama's API (/api/chat and others) too, for clients that speak no other"
    )
    sharing: Literal["on", "off"] = Field(
        default="off",
        description="whether read-only links to sessions can be made, which need no key (docs/sharing.md)",
    )
    max_context: Count | None = Field(
        default=None,
        description="longest session, in tokens",
        json_schema_extra={"metavar": "TOKENS", "default": "what the model allows"},
    )
    kv_memory: Memory | None = Field(
        default=None,
        description="KV cache on the device (with tensor parallelism on each), in bytes: 512M, 4G, 4GiB",
        json_schema_extra={"metavar": "BYTES", "default": "measured from free memory"},
    )
    host_memory: Memory | None = Field(
        default=None,
        description="KV cache in host memory for sessions offloaded from the device, in bytes",
        json_schema_extra={"metavar": "BYTES", "default": "0 on CPU, a quarter of the memory with CUDA"},
    )
    tensor_parallel: Count = Field(
        default=1,
        description="processes that share the model; with CUDA each has a GPU",
        json_schema_extra={"metavar": "RANKS"},
    )
    speculate: Literal["auto", "off"] = Field(
        default="off",
        description="draft tokens and verify several in one step; replies stay the same, byte for byte",
    )
    draft_model: str | None = Field(
        default=None,
        description="a small model with the same tokenizer that drafts tokens; for --speculate auto",
        json_schema_extra={"metavar": "MODEL", "default": "none"},
    )
    max_running: Count = Field(
        default=256, description="turns in the batch at once", json_schema_extra={"metavar": "TURNS"}
    )
    max_step_tokens: Count | None = Field(
        default=None,
        description="tokens of one model step over all turns",
        json_schema_extra={"metavar": "TOKENS", "default": "512 on CPU, 2048 with CUDA"},
    )
    max_queued: Count = Field(
        default=1024,
        description="turns that may wait; further requests get 429",
        json_schema_extra={"metavar": "TURNS"},
    )

    durability: Literal["process", "power"] = Field(
        default="process",
        description="what an answered turn survives: process: a crash of the server; power: a crash of the machine too "
        "(every commit waits for the disk)",
    )
    database: str | None = Field(
        default=None,
        min_length=1,
        repr=False,  # it may hold a password
        description="database of the session log: postgresql://user@host/name, which several servers may share; "
        "put a password into the environment, not on the command line",
        json_schema_extra={"metavar": "URL", "default": "SQLite in the data dir"},
    )
    client_seconds: float = Field(
        default=30.0,
        gt=0,
        allow_inf_nan=False,
        description="time limit for a client to send a request (longer if it is large) or to read an answer",
        json_schema_extra={"metavar": "SECONDS", "default": "30"},
    )
    allowed_host: Hosts = Field(
        default=[],
        description="a host name that clients may use, repeatable (environment: a comma list); needed without keys; "
        "IP addresses and localhost are always allowed, * allows every name",
        json_schema_extra={"metavar": "NAME", "default": "none"},
    )
    allow_origin: Origins = Field(
        default=[],
        description="an origin whose web pages may call the API (CORS), repeatable (environment: a comma list); "
        "* allows every page: without keys, any page in a browser that reaches the port",
        json_schema_extra={"metavar": "ORIGIN", "default": "none"},
    )
    media_domains: Hosts = Field(
        default=[],
        description="a host from which pictures are fetched by URL, repeatable (environment: a comma "
        "list); none: pictures are taken in requests only (data: URLs)",
        json_schema_extra={"metavar": "NAME", "default": "none"},
    )
    unknown_fields: Literal["refuse", "ignore"] = Field(
        default="refuse",
        description="unknown fields of requests: refuse: answer 400 with the field's name; "
        "ignore: leave them out and list them in the receipt",
    )
    response_template: JsonFile | None = Field(
        default=None,
        description="how replies write reasoning, content and tool calls: a response template of transformers, as JSON",
        json_schema_extra={"metavar": "FILE", "default": "the tokenizer's, else measured"},
    )
    prompt_rules: PromptRules = Field(
        default=PROMPT_RULES,
        description="rules by which a prompt begins as the one before: all, none, or a comma list of "
        f"{', '.join(PROMPT_RULES)}",
        json_schema_extra={"metavar": "RULES", "default": "all"},
    )
    generation_config: GenerationSource = Field(
        default="model",
        min_length=1,
        description="defaults of sampling parameters and stop strings: model: the model's generation config; "
        "openai: OpenAI's; or a generation config as JSON",
        json_schema_extra={"metavar": "model|openai|FILE"},
    )
    thinking_budget: int = Field(
        default=-1,
        ge=-1,
        description="most reasoning tokens of a chat's reply, where the request does not say; then the end of the "
        "reasoning is forced; 0: no reasoning, -1: no limit",
        json_schema_extra={"metavar": "TOKENS", "default": "-1"},
    )
    thinking_budget_message: str | None = Field(
        default=None,
        max_length=1000,
        description="what is written at the end of reasoning that is cut off; empty: nothing",
        json_schema_extra={"metavar": "TEXT", "default": "a sentence"},
    )
    drain_seconds: float = Field(
        default=30.0,
        ge=0,
        allow_inf_nan=False,
        description="how long running turns may continue after SIGTERM; then KV is written for as long, at most 30 s",
        json_schema_extra={"metavar": "SECONDS", "default": "30"},
    )
    disk_space: Memory | None = Field(
        default=None,
        description="KV cache on disk, in the data dir, in bytes; 0: no disk tier",
        json_schema_extra={"metavar": "BYTES", "default": "a tenth of the free space"},
    )
    disk_floor: Memory | None = Field(
        default=None,
        description="free space that KV leaves on that disk, in bytes",
        json_schema_extra={"metavar": "BYTES", "default": "5 % of the disk, at most 5 GiB"},
    )
    packed_space: Memory | None = Field(
        default=None,
        description="packed weights that are kept for later starts, in the user's cache folder, in bytes; 0: none",
        json_schema_extra={"metavar": "BYTES", "default": "a quarter of the free space"},
    )
    remote: StorageUrl | None = Field(
        default=None,
        repr=False,  # so may this
        description="remote KV cache, as an fsspec URL: s3://bucket/folder, gs://..., file:///shared/folder",
        json_schema_extra={"metavar": "URL", "default": "none"},
    )
    remote_space: Memory | None = Field(
        default=None,
        description="size of the remote KV cache, in bytes",
        json_schema_extra={"metavar": "BYTES", "default": "no limit"},
    )
    kv_dtype: Literal["auto", "int8", "fp8"] = Field(default="auto", description="KV in memory, exact or in 8 bits")
    kv_at_rest: Literal["exact", "int8", "fp8"] = Field(default="exact", description="KV on disk, exact or in 8 bits")
    tenant_share: float = Field(
        default=1.0,
        gt=0,
        le=1,
        description="part of every KV tier that a tenant may hold when others need the room",
        json_schema_extra={"metavar": "FRACTION", "default": "1"},
    )
    line_seconds: int = Field(
        default=86_400,
        ge=0,
        le=10 * 365 * 86_400,
        description="how long the log and KV of a conversation are kept after its last request if its client sends the "
        "whole history and a conversation id of its own (docs/lines.md); 0: such conversations are not logged",
        json_schema_extra={"metavar": "SECONDS", "default": "86400"},
    )
    max_capsule: Annotated[ByteSize, Field(ge=1)] = Field(
        default=ByteSize(4 * 2**30),
        description="largest session file that can be imported, in bytes",
        json_schema_extra={"metavar": "BYTES", "default": "4GiB"},
    )

    log_format: Literal["text", "json"] = Field(
        default="text",
        description="form of the log on standard error: text, or one JSON object per line, also for every request",
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        default="info", description="lowest level that is logged; debug: also every request as text"
    )
    metrics_compat: Literal["none", "vllm"] = Field(default="none", description="more metric names, for dashboards")

    @field_validator("model")
    @classmethod
    def _model_folder_exists(cls, model: str) -> str:
        folder = Path(model).expanduser()
        if model != DEMO and folder.exists():
            # the engine runs elsewhere; a link to a file keeps its name, which says what the file is
            return str(folder.absolute() if folder.is_file() else folder.resolve())
        if PATH_LIKE.match(model):
            raise ValueError("there is no such file" if folder.suffix == ".gguf" else "there is no such folder")
        return model

    @property
    def source(self) -> str:
        """What the model and its tokenizer are loaded from: a hub id or an absolute folder."""
        return str(DEMO_FOLDER) if self.model == DEMO else self.model

    @property
    def copies_kv(self) -> bool:
        """Whether a tier beyond the data dir has copies of KV files."""
        return self.remote is not None

    @property
    def has_keys(self) -> bool:
        return bool(self.api_key) or self.key_file is not None

    @property
    def name(self) -> str:
        if self.served_model_name is not None:
            return self.served_model_name
        return Path(self.model).name if os.path.isabs(self.model) else self.model
